"""How the gradient of the mean model shrinks with K at γ ∝ 1/√K, for decentralized Adams.

Run: python -m experiments.adam_convergence.run   (about 13 minutes on two cores)

Writes results.jsonl and gradient.png beside this file and fills the README's table.
"""

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

import jaxdec
from experiments import logistic
from experiments.study import markdown, mean_and_error, plot_means, read_lines, report, write_lines

HERE = pathlib.Path(__file__).parent
NODES = 8
HORIZONS = (1000, 4000, 16_000, 64_000)
SEEDS = range(3)
SPLITS = {"IID": False, "by label": True}
TOPOLOGIES: dict[str, dict[str, Any]] = {"ring": {}, "one_peer_exponential": {"symmetric": True}}
METHODS: dict[str, dict[str, Any]] = {
    "decentralized_adamw": {},
    "accumulated_adamw": {"window": 4},
    "allreduce": {"optimizer": "adamw"},
}
SCALE = 0.3  # γ = SCALE / √K


def cells() -> Iterator[dict[str, Any]]:
    for method, (graph, fields), split, K, seed in itertools.product(
        METHODS, TOPOLOGIES.items(), SPLITS, HORIZONS, SEEDS
    ):
        topology = jaxdec.topology.by_name(graph, NODES, **fields)
        if method == "allreduce" and graph != "ring":
            continue  # it is the same on any
        tx = jaxdec.algorithms.by_name(
            method, jaxdec.Gossip(topology), learning_rate=SCALE / K**0.5, **METHODS[method]
        )
        data = logistic.examples(NODES, seed, by_label=SPLITS[split])
        steps = K // topology.period * topology.period
        yield {
            "method": method,
            "topology": graph,
            "split": split,
            "steps": K,
            "seed": seed,
            "gradient": logistic.mean_squared_gradient(tx, data, steps, seed, topology.period),
        }


def _settings() -> list[tuple[str, str, str]]:
    found = ((x["method"], x["topology"], x["split"]) for x in read_lines(HERE))
    return list(dict.fromkeys(found))


def _gradients(setting: tuple[str, str, str]) -> list[np.ndarray]:
    own = [x for x in read_lines(HERE) if (x["method"], x["topology"], x["split"]) == setting]
    return [np.array([x["gradient"] for x in own if x["steps"] == K]) for K in HORIZONS]


def tables() -> dict[str, str]:
    """The README's table, from results.jsonl."""
    rows = []
    for setting in _settings():
        values = _gradients(setting)
        slopes = [
            np.polyfit(np.log(HORIZONS), np.log([v[seed] for v in values]), 1)[0] for seed in SEEDS
        ]
        method, graph, split = setting
        graph = "" if method == "allreduce" else graph.replace("_", " ")
        cells = [f"{1e3 * v.mean():.3f}" for v in values]
        rows.append([f"`{method}`", graph, split, *cells, mean_and_error(slopes)])
    header = ["method", "graph", "data", *(f"K = {K:,}" for K in HORIZONS), "slope in K"]
    return {"gradient": markdown(header, rows)}


def plot() -> Figure:
    """Mean ‖∇f(x̄)‖² against K, a panel a split, beside 1/√K."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    panels = figure.subplots(1, len(SPLITS), sharey=True)
    for axes, split in zip(panels, SPLITS, strict=True):
        for setting in _settings():
            if setting[2] == split:
                label = " ".join(setting[: 1 if setting[0] == "allreduce" else 2])
                plot_means(axes, HORIZONS, _gradients(setting), label=label.replace("_", " "))
        guide = 0.03 * (HORIZONS[0] / np.array(HORIZONS)) ** 0.5
        axes.plot(HORIZONS, guide, "k:", label="1/√K")
        axes.set(xscale="log", yscale="log", xlabel="K", title=split)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean ‖∇f(x̄)‖² over K steps")
    panels[-1].legend(fontsize="x-small")
    return figure


def main() -> None:
    lines = list(track(cells(), "runs", total=5 * len(SPLITS) * len(HORIZONS) * len(SEEDS)))
    write_lines(HERE, lines)
    report(HERE, tables())
    plot().savefig(HERE / "gradient.png", dpi=130)


if __name__ == "__main__":
    main()
