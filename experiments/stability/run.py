"""Where algorithms diverge: the predicted spectral radius against training.

Run: python -m experiments.stability.run   (about 20 minutes on two cores)

Writes results.jsonl and phases.png beside this file and fills the README's tables.
"""

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

import jaxdec
from experiments.study import markdown, read_lines, report, write_lines

HERE = pathlib.Path(__file__).parent
ALGORITHMS = (
    "dmsgd",
    "awc_dmsgd",
    "da_dmsgd",
    "slowmo",
    "qg_dmsgd",
    "d2_dmsgd",
    "decentlam",
)
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "ring": {},
    "symmetric_exponential": {},
    "exponential": {},
    "one_peer_ring": {},
    "one_peer_exponential": {},
    "one_peer_exponential, XOR": {"symmetric": True},
    "alternating_exponential_ring": {"local": 2},
    "random_matching": {"seed": 0},
    "random_matching, lazy": {"seed": 0, "lazy": True},
}
MOMENTA = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SIZES = (4, 8, 16)
STEPS, DIM, RATE = 3000, 4, 1e-3
GROWTH = 1e4  # diverged: the models are so much farther apart than at the start


def mixing(algorithm: str, name: str, n: int) -> jaxdec.Topology:
    topology = jaxdec.topology.by_name(name.split(",")[0], n, **TOPOLOGIES[name])
    if algorithm == "slowmo":
        return jaxdec.topology.with_mean(topology, every=12)
    return topology


def diverges(algorithm: str, topology: jaxdec.Topology, beta: float) -> bool:
    """Train on f_i(x) = ½‖x − c_i‖² from models that differ."""
    tx = jaxdec.algorithms.by_name(
        algorithm, jaxdec.Gossip(topology), learning_rate=RATE, momentum=beta
    )
    period = topology.period

    def run(x: jax.Array, target: jax.Array) -> jax.Array:
        def body(_: jax.Array, carry: Any) -> Any:
            x, state = carry
            for phase in range(period):
                updates, state = tx.update(x - target, state, x, phase=topology.phase(phase))
                x = x + updates
            return x, state

        return jax.lax.fori_loop(0, -(-STEPS // period), body, (x, tx.init(x)))[0]

    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((2, topology.n, DIM)).astype(np.float32)
    lifted = jaxdec.nodes.simulate(run, donate_argnums=())
    models = np.asarray(lifted(jnp.asarray(x), jnp.asarray(target)))
    apart = np.linalg.norm(models - models.mean(axis=0))
    return not apart < GROWTH * np.linalg.norm(x)


def cells() -> Iterator[dict[str, Any]]:
    for algorithm, name, n, beta in itertools.product(ALGORITHMS, TOPOLOGIES, SIZES, MOMENTA):
        topology = mixing(algorithm, name, n)
        yield {
            "algorithm": algorithm,
            "topology": name,
            "nodes": n,
            "beta": beta,
            "radius": jaxdec.analysis.spectral_radius(algorithm, topology, beta),
            "diverges": diverges(algorithm, topology, beta),
        }


def agrees(line: dict[str, Any]) -> bool:
    return (line["radius"] > 1) == line["diverges"]


def tables() -> dict[str, str]:
    """The README's tables, from results.jsonl."""
    lines = read_lines(HERE)
    groups = {f"`{name}`": [x for x in lines if x["algorithm"] == name] for name in ALGORITHMS}
    rows = [
        [
            name,
            str(len(own)),
            str(sum(line["diverges"] for line in own)),
            f"{100 * sum(map(agrees, own)) / len(own):.1f} %",
        ]
        for name, own in (groups | {"all": lines}).items()
    ]
    header = ["algorithm", "cells", "diverged", "as predicted"]
    return {"agreement": markdown(header, rows), "disagreement": _disagreements(lines)}


def _disagreements(lines: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"`{line['algorithm']}`",
            line["topology"].replace("_", " "),
            str(line["nodes"]),
            f"{line['beta']:g}",
            f"{line['radius']:.5f}",
            "diverges" if line["diverges"] else "stays",
        ]
        for line in lines
        if not agrees(line)
    ]
    return markdown(["algorithm", "graph", "nodes", "β", "predicted radius", "training"], rows)


def plot() -> Figure:
    """The predicted radius by graph and momentum at the largest size; crosses where it diverged."""
    shown = [a for a in ALGORITHMS if a not in ("dmsgd", "awc_dmsgd", "slowmo")]
    figure = Figure(figsize=(10.4, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).ravel()
    lines = read_lines(HERE)
    for axes, algorithm in zip(panels, shown, strict=True):
        own = {
            (line["topology"], line["beta"]): line
            for line in lines
            if (line["algorithm"], line["nodes"]) == (algorithm, max(SIZES))
        }
        radii = [[own[name, beta]["radius"] for beta in MOMENTA] for name in TOPOLOGIES]
        image = axes.imshow(radii, cmap="RdBu_r", vmin=0.7, vmax=1.3, aspect="auto")
        for (row, name), (column, beta) in itertools.product(
            enumerate(TOPOLOGIES), enumerate(MOMENTA)
        ):
            if own[name, beta]["diverges"]:
                axes.plot(column, row, "kx", markersize=5)
        axes.set_title(algorithm)
        axes.set_xticks(range(len(MOMENTA)), [f"{beta:g}" for beta in MOMENTA])
        axes.set_yticks(range(len(TOPOLOGIES)), [name.replace("_", " ") for name in TOPOLOGIES])
    for axes in panels[2:]:
        axes.set_xlabel("momentum β")
    figure.colorbar(image, ax=list(panels), label="predicted spectral radius")
    return figure


def main() -> None:
    total = len(ALGORITHMS) * len(TOPOLOGIES) * len(SIZES) * len(MOMENTA)
    lines = list(track(cells(), "cells", total=total))
    write_lines(HERE, lines)
    report(HERE, tables())
    plot().savefig(HERE / "phases.png", dpi=130)


if __name__ == "__main__":
    main()
