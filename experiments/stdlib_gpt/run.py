"""A byte-level GPT on four and on eight nodes, beside allreduce at equal tokens.

Run: python -m experiments.stdlib_gpt.run   (FILL)
     data: python -m jaxdec.data prepare stdlib

Writes results.jsonl beside this file and fills the README's table. Finished runs are not done
again.
"""

import pathlib

import numpy as np
from ml_collections import ConfigDict

from configs import default, stdlib_gpt
from experiments.study import Cell, Study, markdown, mean_and_error, report

HERE = pathlib.Path(__file__).parent
RATES = (2e-3, 4e-3, 8e-3)


def get_config() -> ConfigDict:
    """The config's model made smaller, so that a run takes about five minutes of one core."""
    config = stdlib_gpt.get_config()
    config.batch_size = 64
    config.steps = 300
    config.data.context = 128
    config.model.layers = 3
    config.model.width = 96
    config.eval_batch = 100
    config.eval_examples = 1000
    return config


study = Study(
    HERE,
    get_config,
    {
        "allreduce Adam, 8 nodes": Cell(default.ALLREDUCE_ADAM, RATES),
        "decentralized Adam, 4 nodes": Cell(default.DECENTRALIZED_ADAM | {"nodes": 4}, RATES),
        "decentralized Adam, 8 nodes": Cell(default.DECENTRALIZED_ADAM, RATES),
    },
    score="eval/loss",
)
STUDIES = (study,)


def tables() -> dict[str, str]:
    """The README's table, from results.jsonl."""
    outcomes = study.outcomes()
    base = outcomes["allreduce Adam, 8 nodes"].values("eval/loss").mean()
    rows = []
    for name, outcome in outcomes.items():
        losses = outcome.values("eval/loss")
        rows.append(
            [
                name,
                mean_and_error(losses / np.log(2), 3),
                f"{100 * (losses.mean() / base - 1):+.2f} %",
                f"{outcome.rate:g}" + "†" * outcome.at_edge,
                mean_and_error(outcome.values("consensus_distance"), 3),
            ]
        )
    header = ["run", "bits a byte", "against allreduce", "learning rate", "consensus distance"]
    return {"gpt": markdown(header, rows)}


def main() -> None:
    study.run(most=1)  # of several runs in a program, each takes longer here
    report(HERE, tables())


if __name__ == "__main__":
    main()
