"""Pictures of a topology and of a run."""

import pathlib
from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from matplotlib.figure import Figure

from jaxdec.topology import Topology

MOST_PANELS = 8
NODE, EDGE, MEAN = "#1f4e79", "#7f8c9a", "#c0392b"


def plot_topology(topology: Topology) -> Figure:
    """Each distinct round as a graph on a circle; arrows where the weights are one-sided.

    >>> import jaxdec
    >>> len(plot_topology(jaxdec.topology.one_peer_exponential(8)).axes)
    3
    """
    phases = topology.distinct_phases
    shown = phases[:MOST_PANELS]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.9 * columns + 0.3, 3.1 * rows + 0.6), layout="constrained")
    for panel, phase in enumerate(shown):
        axes = figure.add_subplot(rows, columns, panel + 1)
        _draw_round(axes, topology.matrix(phase))
        axes.set_title("exact mean" if topology.is_mean(phase) else f"phase {phase}", fontsize=10)
    more = f" (first {len(shown)} of {len(phases)} rounds)" if len(phases) > len(shown) else ""
    figure.suptitle(topology.name + more, fontsize=11)
    return figure


def _draw_round(axes: Any, matrix: np.ndarray) -> None:
    n = len(matrix)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    both_ways, one_way = [], []
    for i, j in np.argwhere(matrix - np.diag(np.diag(matrix))).tolist():
        if np.isclose(matrix[i, j], matrix[j, i]):
            both_ways.append((j, i))
        else:
            one_way.append((j, i))
    place = nx.circular_layout(graph)
    size = max(30, 330 - 8 * n)
    nx.draw_networkx_nodes(graph, place, ax=axes, node_size=size, node_color=NODE)
    if n <= 32:
        nx.draw_networkx_labels(graph, place, ax=axes, font_size=8, font_color="white")
    nx.draw_networkx_edges(graph, place, edgelist=both_ways, ax=axes, edge_color=EDGE, arrows=False)
    nx.draw_networkx_edges(
        graph,
        place,
        edgelist=one_way,
        ax=axes,
        edge_color=EDGE,
        node_size=size,
        connectionstyle="arc3,rad=0.12",
    )
    axes.set_axis_off()
    axes.margins(0.12)
    axes.set_aspect("equal")


def plot_loss(history: Sequence[dict[str, Any]]) -> Figure:
    """Training loss by node and its mean; test loss of the mean model where there is one."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    train = [record for record in history if "train/loss" in record]
    steps = [record["step"] for record in train]
    by_node = np.array([record["train/loss_nodes"] for record in train])
    axes.plot(steps, by_node, color=EDGE, linewidth=0.6, alpha=0.6)
    axes.plot([], [], color=EDGE, linewidth=0.6, label="train, each node")
    axes.plot(steps, [r["train/loss"] for r in train], color=NODE, label="train, mean over nodes")
    tests = [record for record in history if "eval/loss" in record]
    axes.plot(
        [r["step"] for r in tests],
        [r["eval/loss"] for r in tests],
        color=MEAN,
        marker="o",
        markersize=3,
        label="test, mean model",
    )
    _finish(axes, "loss")
    return figure


def plot_consensus(history: Sequence[dict[str, Any]]) -> Figure:
    """Consensus distance by step."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    records = [record for record in history if "consensus_distance" in record]
    axes.plot(
        [r["step"] for r in records],
        [r["consensus_distance"] for r in records],
        color=NODE,
        marker="o",
        markersize=3,
        label="root mean square distance from the mean model",
    )
    _finish(axes, "consensus distance", log=any(r["consensus_distance"] > 0 for r in records))
    return figure


def _finish(axes: Any, ylabel: str, log: bool = True) -> None:
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.legend(frameon=False, fontsize=9)


def save_run(folder: pathlib.Path, topology: Topology, history: Sequence[dict[str, Any]]) -> None:
    """Write loss.png, consensus_distance.png and topology.png."""
    folder.mkdir(exist_ok=True)
    figures = {
        "loss": plot_loss(history),
        "consensus_distance": plot_consensus(history),
        "topology": plot_topology(topology),
    }
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=130)
