"""Test accuracy of the quickstart with gossip, without it, and with allreduce, over seeds.

Run: python -m experiments.quickstart.run   (about four minutes on two cores)

Writes results.jsonl and accuracy.png beside this file, and prints the table.
"""

import pathlib
import tempfile

import jax
import numpy as np
from matplotlib.figure import Figure

from configs import default, quickstart
from experiments.study import markdown, mean_and_error, read_lines, report, write_lines
from jaxdec.train import train_and_evaluate

HERE = pathlib.Path(__file__).parent
SEEDS = range(6)
# Name in the table → what differs from configs/quickstart.py.
RUNS = {
    "accumulated Adam, one-peer exponential": {},
    "the same without gossip": {"topology.name": "isolated", "allow_unstable": True},
    "accumulated Adam, ring": {"topology.name": "ring"},
    "decentralized Adam, one-peer exponential": default.DECENTRALIZED_ADAM,
    "allreduce Adam": default.ALLREDUCE_ADAM,
}


def run(name: str, seed: int, steps: int | None = None) -> dict:
    config = quickstart.get_config()
    config.seed = seed
    config.lift = "simulate"
    config.update_from_flattened_dict(RUNS[name])
    if steps is not None:
        config.steps = steps
    config.eval_every = config.steps
    with tempfile.TemporaryDirectory() as folder:
        summary = train_and_evaluate(config, folder)
    return {
        "run": name,
        "seed": seed,
        "accuracy": summary["eval/accuracy"],
        "accuracy_nodes": float(np.mean(summary["eval/accuracy_nodes"])),
        "consensus_distance": summary["consensus_distance"],
        "bytes_sent": summary["bytes_sent_per_node_per_step"],
        "jax": jax.__version__,
    }


def tables() -> dict[str, str]:
    """The README's table, from results.jsonl."""
    rows = []
    for name in RUNS:
        own = [line for line in read_lines(HERE) if line["run"] == name]
        cells = [
            mean_and_error([100 * line[key] for line in own])
            for key in ("accuracy", "accuracy_nodes")
        ]
        rows.append([name, *cells, f"{own[0]['bytes_sent'] / 1e6:.2f}"])
    header = ["run", "mean model", "a node's own", "MB sent a node a step"]
    return {"accuracy": markdown(header, rows)}


def plot() -> Figure:
    """Every seed's accuracy and their mean, a row a run."""
    results = read_lines(HERE)
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for row, name in enumerate(RUNS):
        values = [100 * r["accuracy"] for r in results if r["run"] == name]
        axes.plot(values, [row] * len(values), "o", color="#7f8c9a", markersize=5, alpha=0.7)
        axes.plot(np.mean(values), row, "|", color="#c0392b", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(RUNS)), RUNS)
    axes.set_ylim(len(RUNS) - 0.5, -0.5)
    axes.set_xlabel("test accuracy, % (dots: seeds; bar: mean)")
    axes.grid(axis="x", alpha=0.3)
    return figure


def main() -> None:
    results = [run(name, seed) for name in RUNS for seed in SEEDS]
    write_lines(HERE, results)
    plot().savefig(HERE / "accuracy.png", dpi=130)
    report(HERE, tables())


if __name__ == "__main__":
    main()
