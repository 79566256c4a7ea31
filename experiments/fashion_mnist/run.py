"""Fashion-MNIST on eight nodes: Adams beside allreduce's, and methods on unequal data.

Run: python -m experiments.fashion_mnist.run   (about 75 minutes on two cores)
     data: python -m jaxdec.data prepare fashion_mnist

Writes results.jsonl and unequal.png beside this file and fills the README's tables. Finished runs
are not done again.
"""

import itertools
import pathlib

from matplotlib.figure import Figure

from configs import default, fashion_mnist
from experiments.study import Cell, Outcome, Study, markdown, mean_and_error, plot_means, report

HERE = pathlib.Path(__file__).parent

CNN_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)

cnn = Study(
    HERE,
    fashion_mnist.get_config,
    {
        "accumulated Adam, one-peer exponential": Cell({}, CNN_RATES),
        "allreduce Adam": Cell(default.ALLREDUCE_ADAM, CNN_RATES),
    },
)

MLP = {
    "model.name": "mlp",
    "model.channels": None,
    "model.hidden": (128,),
    "batch_size": 512,
    "steps": 468,  # four epochs
    "schedule.warmup_steps": 39,
    "algorithm.weight_decay": 1e-4,
}
SGD, MOMENTUM = (0.03, 0.1, 0.3, 1.0), (0.01, 0.03, 0.1, 0.3)
ADAM = (1e-3, 3e-3, 1e-2, 3e-2)
METHODS = {
    "dsgd": ({}, SGD),
    "dmsgd": ({"algorithm.momentum": 0.9}, MOMENTUM),
    "decentlam": ({"algorithm.momentum": 0.9}, MOMENTUM),
    "qg_dmsgd": ({"algorithm.momentum": 0.9}, MOMENTUM),
    "accumulated_adamw": ({"algorithm.weight_decay": 0.01}, ADAM),
}
ALPHAS = (None, 1.0, 0.1)
TOPOLOGIES = ("ring", "one_peer_exponential")


def _cell(method: str, topology: str, alpha: float | None) -> Cell:
    fields, rates = METHODS[method]
    if (method, topology) == ("decentlam", "one_peer_exponential"):
        fields = {"algorithm.momentum": 0.7}  # at 0.9 it is unstable there
    split = {} if alpha is None else {"data.partition": "dirichlet", "data.alpha": alpha}
    names = {"algorithm.name": method, "topology.name": topology}
    return Cell(MLP | names | fields | split, rates)


unequal = Study(
    HERE,
    fashion_mnist.get_config,
    {
        f"{method} {topology} {alpha}": _cell(method, topology, alpha)
        for method, topology, alpha in itertools.product(METHODS, TOPOLOGIES, ALPHAS)
    },
)
STUDIES = (cnn, unequal)


def _score(outcome: Outcome) -> str:
    return mean_and_error(100 * outcome.values("eval/accuracy")) + "†" * outcome.at_edge


def tables() -> dict[str, str]:
    """The README's tables, from results.jsonl."""
    of_cnn, of_mlp = cnn.outcomes(), unequal.outcomes()
    adams = [
        [
            name,
            _score(outcome),
            mean_and_error(outcome.values("eval/loss"), 4),
            f"{outcome.rate:g}",
        ]
        for name, outcome in of_cnn.items()
    ]
    methods = [
        [
            f"`{method}`",
            *(
                _score(of_mlp[f"{method} {topology} {alpha}"])
                for topology in TOPOLOGIES
                for alpha in ALPHAS
            ),
        ]
        for method in METHODS
    ]
    heads = [
        f"{topology.replace('_', ' ')}, α = {alpha or '∞'}"
        for topology in TOPOLOGIES
        for alpha in ALPHAS
    ]
    return {
        "cnn": markdown(["run", "test accuracy, %", "test loss", "learning rate"], adams),
        "unequal": markdown(["method", *heads], methods),
    }


def plot() -> Figure:
    """Accuracy against α, a panel a topology."""
    outcomes = unequal.outcomes()
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    panels = figure.subplots(1, len(TOPOLOGIES), sharey=True)
    for axes, topology in zip(panels, TOPOLOGIES, strict=True):
        for method in METHODS:
            values = [
                100 * outcomes[f"{method} {topology} {alpha}"].values("eval/accuracy")
                for alpha in ALPHAS
            ]
            plot_means(axes, range(len(ALPHAS)), values, label=method)
        axes.set_xticks(range(len(ALPHAS)), [f"α = {alpha or '∞'}" for alpha in ALPHAS])
        axes.set_title(topology.replace("_", " "))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy of the mean model, %")
    panels[-1].legend(fontsize="small")
    return figure


def main() -> None:
    cnn.run(most=3)
    unequal.run()
    report(HERE, tables())
    plot().savefig(HERE / "unequal.png", dpi=130)


if __name__ == "__main__":
    main()
