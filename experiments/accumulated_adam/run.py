"""Adam on small local batches, and what accumulated moments recover, at a fixed total batch.

Run: python -m experiments.accumulated_adam.run
     data: python -m jaxdec.data prepare stdlib

Writes results.jsonl, spread.jsonl and loss.png beside this file and fills the README's tables.
Finished runs are not done again.
"""

import itertools
import pathlib
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from configs import default, stdlib_gpt
from experiments.study import (
    Cell,
    Outcome,
    Study,
    difference,
    markdown,
    mean_and_error,
    plot_means,
    read_lines,
    report,
    write_lines,
)
from jaxdec import sweep

HERE = pathlib.Path(__file__).parent
RATES = (2e-3, 4e-3, 8e-3)
NODES = (2, 4, 8, 16, 32)
WINDOWS = (1, 2, 4, 8, 16)
# The paper's: 4 on 8 nodes, 8 on 16 and 32.
WINDOW_OF = {2: 1, 4: 2, 8: 4, 16: 8, 32: 8}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ring": {"topology.name": "ring"},
    "one-peer exponential": {"topology.symmetric": True},
    "AER": {"topology.name": "alternating_exponential_ring", "topology.local": 4},
    "complete": {"topology.name": "complete"},
}


def get_config() -> ConfigDict:
    """A GPT of 2 layers; 64 windows of 64 bytes a step, over all nodes."""
    config = stdlib_gpt.get_config()
    config.batch_size = 64
    config.steps = 300
    config.data.context = 64
    config.model.layers = 2
    config.model.width = 64
    config.eval_batch = 200
    config.eval_examples = 2000
    config.topology.symmetric = True
    return config


def _adam(nodes: int, beta1: float) -> Cell:
    fields = {"algorithm.name": "decentralized_adamw", "algorithm.b1": beta1, "nodes": nodes}
    return Cell(fields, RATES)


def _accumulated(nodes: int, window: int, order: str, topology: str) -> Cell:
    graph = {"topology.symmetric": None} | TOPOLOGIES[topology]
    fields = {"algorithm.window": window, "algorithm.order": order, "nodes": nodes}
    return Cell(fields | graph, RATES)


ALLREDUCE = default.ALLREDUCE_ADAM | {"topology.symmetric": None}
PLAIN, ROOTED, ACCUMULATED = "decentralized", "decentralized, β₁ = 0.9^(1/s)", "accumulated"
CELLS = {"allreduce": Cell(ALLREDUCE, RATES)}
for _n in NODES:
    CELLS[f"{PLAIN} {_n}"] = _adam(_n, 0.9)
    CELLS[f"{ROOTED} {_n}"] = _adam(_n, 0.9 ** (1 / WINDOW_OF[_n]))
    CELLS[f"{ACCUMULATED} {_n}"] = _accumulated(_n, WINDOW_OF[_n], "awc", "one-peer exponential")
for _order in ("awc", "atc"):
    for _window in WINDOWS:
        CELLS[f"s={_window} {_order}"] = _accumulated(16, _window, _order, "one-peer exponential")
    for _topology, _window in itertools.product(TOPOLOGIES, (1, 8)):
        name = f"{_topology} s={_window} {_order}"
        CELLS[name] = _accumulated(16, _window, _order, _topology)

study = Study(HERE, get_config, CELLS, score="eval/loss")
STUDIES = (study,)


def spread(nodes: int, method: str, rate: float) -> dict[str, Any]:
    """How far nodes' moments are apart at the end of training.

    The variance over nodes, over the square of their mean, each summed over parameters: of the
    second moment V, and of the direction M/(√V + ε).
    """
    overrides = CELLS[f"{method} {nodes}"].at(rate, seed=1)
    (run,) = sweep.configured(get_config, [overrides])
    ((state,), _) = sweep.Together([run[1]]).train()
    mu, nu = (optax.tree.get(state.opt_state, field) for field in ("mu", "nu"))
    direction = jax.tree.map(lambda m, v: m / (np.sqrt(v) + 1e-8), mu, nu)

    def relative(tree: Any) -> float:
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
        variance = sum(leaf.var(axis=0).sum() for leaf in leaves)
        return float(variance / sum((leaf.mean(axis=0) ** 2).sum() for leaf in leaves))

    return {
        "nodes": nodes,
        "method": method,
        "second_moment": relative(nu),
        "direction": relative(direction),
    }


def _bits(outcome: Outcome) -> np.ndarray:
    return outcome.values("eval/loss") / np.log(2)


def _cell(outcome: Outcome) -> str:
    return mean_and_error(_bits(outcome), 3) + "†" * outcome.at_edge


def tables() -> dict[str, str]:
    """The README's tables, from results.jsonl and spread.jsonl."""
    outcomes = study.outcomes()
    base = _bits(outcomes["allreduce"])
    header = [f"n = {n}" for n in NODES]
    by_nodes = [["allreduce Adam", *[_cell(outcomes["allreduce"])] * len(NODES)]]
    for method in (PLAIN, ROOTED, ACCUMULATED):
        by_nodes.append([method, *(_cell(outcomes[f"{method} {n}"]) for n in NODES)])
    for above, below in ((PLAIN, None), (ACCUMULATED, None), (ACCUMULATED, PLAIN)):
        cells = [
            difference(
                _bits(outcomes[f"{above} {n}"]),
                base if below is None else _bits(outcomes[f"{below} {n}"]),
                3,
            )
            for n in NODES
        ]
        by_nodes.append([f"{above} − {below or 'allreduce'}", *cells])
    windows = [
        [order.upper(), *(_cell(outcomes[f"s={window} {order}"]) for window in WINDOWS)]
        for order in ("awc", "atc")
    ]
    ablation = [
        [
            topology,
            *(
                _cell(outcomes[f"{topology} s={s} {order}"])
                for s in (1, 8)
                for order in ("awc", "atc")
            ),
        ]
        for topology in TOPOLOGIES
    ]
    found = {(x["method"], x["nodes"]): x for x in read_lines(HERE, "spread.jsonl")}
    spreads = [
        [what.replace("_", " "), method, *(f"{found[method, n][what]:.3g}" for n in NODES)]
        for what in ("second_moment", "direction")
        for method in (PLAIN, ACCUMULATED)
    ]
    return {
        "nodes": markdown(["bits a byte", *header], by_nodes),
        "windows": markdown(["order", *(f"s = {window}" for window in WINDOWS)], windows),
        "ablation": markdown(
            ["graph", *(f"s = {s}, {o}" for s in (1, 8) for o in ("AWC", "ATC"))], ablation
        ),
        "spread": markdown(["variance over nodes of", "method", *header], spreads),
    }


def plot() -> Figure:
    """Bits a byte and the spread of the second moment, against the number of nodes."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    bits, apart = figure.subplots(1, 2)
    outcomes = study.outcomes()
    bits.axhline(_bits(outcomes["allreduce"]).mean(), color="black", linewidth=1, label="allreduce")
    for method in (PLAIN, ROOTED, ACCUMULATED):
        plot_means(bits, NODES, [_bits(outcomes[f"{method} {n}"]) for n in NODES], label=method)
    for method in (PLAIN, ACCUMULATED):
        own = [x for x in read_lines(HERE, "spread.jsonl") if x["method"] == method]
        apart.plot(NODES, [x["second_moment"] for x in own], marker="o", label=method)
    bits.set(xscale="log", xlabel="nodes, 64 windows a step in all", ylabel="bits a byte")
    apart.set(xscale="log", yscale="log", xlabel="nodes", ylabel="relative variance of V")
    for axes in (bits, apart):
        axes.set_xticks(NODES, map(str, NODES))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def main() -> None:
    outcomes = study.run(most=3)
    spreads = [
        spread(n, method, outcomes[f"{method} {n}"].rate)
        for n in NODES
        for method in (PLAIN, ACCUMULATED)
    ]
    write_lines(HERE, spreads, "spread.jsonl")
    report(HERE, tables())
    plot().savefig(HERE / "loss.png", dpi=130)


if __name__ == "__main__":
    main()
