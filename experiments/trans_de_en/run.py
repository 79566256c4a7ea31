"""BLEU of a small transformer, German to English, on eight nodes and beside allreduce.

Run: python -m experiments.trans_de_en.run
     data: apt-get install trans-de-en; python -m jaxdec.data prepare trans_de_en

Writes results.jsonl beside this file and fills the README's table. Finished runs are not done
again.
"""

import pathlib

from configs import default, trans_de_en
from experiments.study import Cell, Study, difference, markdown, mean_and_error, report

HERE = pathlib.Path(__file__).parent
RATES = (3e-3, 6e-3, 1.2e-2)

study = Study(
    HERE,
    trans_de_en.get_config,
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
    study.run()
    report(HERE, tables())


if __name__ == "__main__":
    main()
