"""How fast gossip reaches agreement, by rounds and by bytes.

Run: python -m experiments.topologies.run   (about a minute on two cores)

Writes results.jsonl and consensus.png beside this file and fills the README's tables.
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
SIZES = (4, 8, 16, 32, 64, 128, 256)
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "complete": {},
    "ring": {},
    "one_peer_ring": {},
    "torus": {},
    "hypercube": {},
    "exponential": {},
    "symmetric_exponential": {},
    "one_peer_exponential": {},
    "alternating_exponential_ring": {"local": 2},
    "base_k": {"k": 1},
    "random_matching": {"seed": 0, "period": 64},
}
TARGET = 1e-6  # agreement: the distance from the mean, as a share of that at the start
MOST, DIM = 2000, 16


def consensus(topology: jaxdec.Topology) -> tuple[list[float], list[float]]:
    """The relative distance from the mean, and models sent a node, after each round."""
    gossip = jaxdec.Gossip(topology)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((topology.n, DIM)))
    step = jaxdec.nodes.simulate(lambda x, *, phase: x + gossip(x, phase), donate_argnums=())

    def distance(x: jax.Array) -> float:
        models = np.asarray(x)
        return float(np.linalg.norm(models - models.mean(axis=0)))

    start = distance(x)
    distances, sent = [1.0], [0.0]
    for t in range(MOST):
        phase = topology.phase(t)
        x = step(x, phase=phase)
        distances.append(distance(x) / start)
        sent.append(sent[-1] + gossip.bytes_sent(x[0], phase) / x[0].nbytes)
        if distances[-1] < TARGET:
            break
    return distances, sent


def cells() -> Iterator[dict[str, Any]]:
    for name, n in itertools.product(TOPOLOGIES, SIZES):
        topology = jaxdec.topology.by_name(name, n, **TOPOLOGIES[name])
        distances, sent = consensus(topology)
        keep = sorted({*range(min(40, len(distances))), *range(0, len(distances), 20)})
        yield {
            "topology": name,
            "nodes": n,
            "reached": distances[-1] < TARGET,
            "rounds": len(distances) - 1,
            "models_sent": sent[-1],
            "curve": [[t, round(sent[t], 3), float(f"{distances[t]:.3g}")] for t in keep],
        }


def _table(field: str, digits: int) -> str:
    found = {(line["topology"], line["nodes"]): line for line in read_lines(HERE)}
    rows = []
    for name in TOPOLOGIES:
        cells = [found[name, n] for n in SIZES]
        texts = [f"{c[field]:.{digits}f}" if c["reached"] else f"> {c[field]:.0f}" for c in cells]
        rows.append([name.replace("_", " "), *texts])
    return markdown(["graph", *(f"n = {n}" for n in SIZES)], rows)


def tables() -> dict[str, str]:
    """The README's tables, from results.jsonl."""
    return {"rounds": _table("rounds", 0), "models": _table("models_sent", 1)}


def plot(nodes: int = 64) -> Figure:
    """The distance from agreement at one size, against rounds and against models sent."""
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    lines = [line for line in read_lines(HERE) if line["nodes"] == nodes]
    for index, line in enumerate(lines):
        rounds, sent, distances = zip(*line["curve"], strict=True)
        label = line["topology"].replace("_", " ")
        style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
        for axes, xs in zip(panels, (rounds, sent), strict=True):
            axes.plot(xs, distances, marker=".", markersize=3, label=label, **style)
    for axes, what in zip(panels, ("rounds", "models that a node has sent"), strict=True):
        axes.set(yscale="log", xlabel=what, ylim=(TARGET, 1.5), xlim=(0, 60))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(f"distance from the mean of {nodes} nodes, relative")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", fontsize="small")
    return figure


def main() -> None:
    with jax.enable_x64(True):
        lines = list(track(cells(), "graphs", total=len(TOPOLOGIES) * len(SIZES)))
    write_lines(HERE, lines)
    report(HERE, tables())
    plot().savefig(HERE / "consensus.png", dpi=130)


if __name__ == "__main__":
    main()
