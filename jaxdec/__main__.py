"""Run a config: python -m jaxdec --config=configs/NAME.py --workdir=DIR [--config.field=value]."""

import os
from collections.abc import Sequence

from absl import app, logging

from jaxdec import command, hosts, train
from jaxdec.session import keep_compiled


def main(_: Sequence[str]) -> None:
    """Train. Exits: 2 a config that cannot run, 1 a run that failed, 75 SIGTERM, state saved."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs the trace of what becomes our own error
    keep_compiled()
    config = command.CONFIG.value
    with command.failures():
        job = hosts.find(command.job(), os.environ)
        alike = (train.TrainingInterruptedError,)
        with hosts.connect(job, command.TIMEOUT.value, config.watchdog_seconds, alike):
            train.train_and_evaluate(config, str(command.WORKDIR.value))


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: command.parse(argv, str(__doc__)))
