"""BLEU of a small transformer, German to English, on eight nodes and beside allreduce.

Run: python -m experiments.trans_de_en.run
     data: apt-get install trans-de-en; python -m jaxdec.data prepare trans_de_en

Writes results.jsonl beside this file and fills the README's table. Finished runs are not done
again.
"""

import pathlib

from ml_collections import ConfigDict

from configs import default, trans_de_en
from experiments.study import Cell, Study, difference, markdown, mean_and_error, report

HERE = pathlib.Path(__file__).parent
RATES = (3e-3, 6e-3, 1.2e-2)


def get_config() -> ConfigDict:
    """The config with smaller and fewer batches, so that a run takes about five minutes."""
    config = trans_de_en.get_config()
    config.batch_size = 2048
    config.steps = 1000
    return config


study = Study(
    HERE,
    get_config,
    {
        "allreduce Adam": Cell(default.ALLREDUCE_ADAM, RATES),
        "decentralized Adam": Cell(default.DECENTRALIZED_ADAM, RATES),
        "accumulated Adam": Cell({}, RATES),
    },
    score="eval/bleu",
)
STUDIES = (study,)


def tables() -> dict[str, str]:
    """The README's table, from results.jsonl."""
    outcomes = study.outcomes()
    base = outcomes["allreduce Adam"].values("eval/bleu")
    rows = [
        [
            name,
            mean_and_error(outcome.values("eval/bleu")),
            difference(outcome.values("eval/bleu"), base),
            mean_and_error(outcome.values("eval/loss"), 3),
            f"{outcome.rate:g}" + "†" * outcome.at_edge,
        ]
        for name, outcome in outcomes.items()
    ]
    header = ["run", "BLEU", "against allreduce", "test loss, nats a token", "learning rate"]
    return {"bleu": markdown(header, rows)}


def main() -> None:
    study.run(most=1)  # a program of several runs would be compiled apart from that of one
    report(HERE, tables())


if __name__ == "__main__":
    main()
