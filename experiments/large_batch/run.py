"""Test accuracy against total batch: who keeps up with all-reduce's momentum SGD.

Run: python -m experiments.large_batch.run
     data: python -m jaxdec.data prepare fashion_mnist

Writes results.jsonl and accuracy.png beside this file and fills the README's tables. Finished runs
are not done again.
"""

import itertools
import pathlib

from matplotlib.figure import Figure
from ml_collections import ConfigDict

from configs import default
from experiments.study import (
    Cell,
    Outcome,
    Study,
    difference,
    markdown,
    mean_and_error,
    plot_means,
    report,
)

HERE = pathlib.Path(__file__).parent
IMAGES, EPOCHS = 60_000, 4
BATCHES = (256, 1024, 4096, 16_384)
TOPOLOGIES = ("ring", "symmetric_exponential")
# How the images are split over nodes.
SPLITS = {
    "IID": {},
    "α = 0.1": {"data.partition": "dirichlet", "data.alpha": 0.1},
}
RATES, LARS_RATES = (0.01, 0.03, 0.1, 0.3), (1.0, 3.0, 10.0, 30.0)
METHODS = {
    "PmSGD": {"algorithm.name": "allreduce", "algorithm.optimizer": "momentum"},
    "PmSGD + LARS": {"algorithm.name": "allreduce", "algorithm.optimizer": "lars"},
    "DmSGD": {"algorithm.name": "dmsgd"},
    "AWC-DmSGD": {"algorithm.name": "awc_dmsgd"},
    "DA-DmSGD": {"algorithm.name": "da_dmsgd"},
    "SlowMo": {"algorithm.name": "slowmo"},
    "QG-DmSGD": {"algorithm.name": "qg_dmsgd"},
    "D²-DmSGD": {"algorithm.name": "d2_dmsgd", "topology.lazy": True},
    "DecentLaM": {"algorithm.name": "decentlam"},
}


def get_config() -> ConfigDict:
    """An MLP on eight nodes."""
    config = default.get_config()
    config.data.name = "fashion_mnist"
    config.model.hidden = (64,)
    config.schedule.name = "cosine"
    config.algorithm.momentum = 0.9
    config.algorithm.weight_decay = 1e-4
    return config


def _cell(method: str, topology: str, split: str, batch_size: int) -> Cell:
    steps = EPOCHS * IMAGES // batch_size
    sizes = {"batch_size": batch_size, "steps": steps, "schedule.warmup_steps": steps // 10}
    # All-reduce is the same on every topology: one program, and one line.
    graph = {} if method.startswith("PmSGD") else {"topology.name": topology}
    rates = LARS_RATES if method.endswith("LARS") else RATES
    return Cell(METHODS[method] | graph | SPLITS[split] | sizes, rates)


study = Study(
    HERE,
    get_config,
    {
        f"{method} {topology} {split} {batch}": _cell(method, topology, split, batch)
        for split, topology, batch, method in itertools.product(
            SPLITS, TOPOLOGIES, BATCHES, METHODS
        )
    },
)
STUDIES = (study,)


def _score(outcome: Outcome) -> str:
    return mean_and_error(100 * outcome.values("eval/accuracy")) + "†" * outcome.at_edge


def tables() -> dict[str, str]:
    """The README's tables, from results.jsonl."""
    outcomes = study.outcomes()
    found, gaps = {}, []
    for split, topology in itertools.product(SPLITS, TOPOLOGIES):
        rows = [
            [method, *(_score(outcomes[f"{method} {topology} {split} {b}"]) for b in BATCHES)]
            for method in METHODS
        ]
        found[f"{split} {topology}"] = markdown(["method", *(f"{b:,}" for b in BATCHES)], rows)
        for above, below in (("PmSGD", "DmSGD"), ("DecentLaM", "DmSGD"), ("DecentLaM", "PmSGD")):
            cells = [
                difference(
                    *(
                        100
                        * outcomes[f"{method} {topology} {split} {batch}"].values("eval/accuracy")
                        for method in (above, below)
                    )
                )
                for batch in BATCHES
            ]
            gaps.append([split, topology.replace("_", " "), f"{above} − {below}", *cells])
    found["gaps"] = markdown(["data", "graph", "difference", *(f"{b:,}" for b in BATCHES)], gaps)
    return found


def plot() -> Figure:
    """Accuracy against batch, a panel a split and topology."""
    outcomes = study.outcomes()
    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    panels = figure.subplots(len(SPLITS), len(TOPOLOGIES), sharex=True, sharey="row")
    for row, split in zip(panels, SPLITS, strict=True):
        for axes, topology in zip(row, TOPOLOGIES, strict=True):
            for index, method in enumerate(METHODS):
                values = [
                    100 * outcomes[f"{method} {topology} {split} {b}"].values("eval/accuracy")
                    for b in BATCHES
                ]
                strong = method in ("PmSGD", "DmSGD", "DecentLaM")
                plot_means(
                    axes,
                    BATCHES,
                    values,
                    color=f"C{index}",
                    linewidth=2 if strong else 1,
                    alpha=1 if strong else 0.6,
                    label=method,
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(BATCHES, [f"{b:,}" for b in BATCHES])
            axes.set_title(f"{split}, {topology.replace('_', ' ')}")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("test accuracy of the mean model, %")
    for axes in panels[-1]:
        axes.set_xlabel("total batch")
    panels[0][-1].legend(fontsize="small", ncols=2)
    return figure


def main() -> None:
    study.run(most=12)
    report(HERE, tables())
    plot().savefig(HERE / "accuracy.png", dpi=130)


if __name__ == "__main__":
    main()
