"""Write a run's mean model as a plain Flax NNX checkpoint: python -m jaxdec.export WORKDIR OUT."""

import argparse
import pathlib
import sys

import orbax.checkpoint as ocp
from flax import nnx
from ml_collections import ConfigDict

from jaxdec import config as configs
from jaxdec import restore
from jaxdec.checkpoint import CheckpointError
from jaxdec.run import build
from jaxdec.workdir import read_config


def export(workdir: pathlib.Path, out: pathlib.Path) -> int:
    """Write the mean model of a run's newest checkpoint. Returns its step.

    Raises:
      ConfigError: no run is there, it has no checkpoint, or `out` exists.
      CheckpointError: the checkpoint cannot be read.
    """
    config = ConfigDict(read_config(workdir, str(workdir)))
    if out.exists():
        raise configs.ConfigError(f"{out} exists; write another folder")
    checkpoints, step = restore.newest(workdir, str(workdir))
    config.lift = "simulate"  # one device is enough
    run = build(config)
    state, _ = checkpoints.restore(step, run.initial_state())
    mean, statistics = run.evaluation().mean_model(state.params, state.statistics)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out.absolute(), nnx.merge_state(mean, statistics))
    return step


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 2, after one line on stderr, where it could not."""
    parser = argparse.ArgumentParser(prog="python -m jaxdec.export", description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path, help="of a run")
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    try:
        step = export(arguments.workdir, arguments.out)
    except (configs.ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"the mean model of step {step} is in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
