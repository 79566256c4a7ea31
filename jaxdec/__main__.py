"""Run a config: python -m jaxdec --config=configs/NAME.py --workdir=DIR [--config.field=value]."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run, a file of configs/.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the run's outputs.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, of several.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes of the run.")
_PROCESS = flags.DEFINE_integer("process", None, "Which of them this is.")
_TIMEOUT = flags.DEFINE_integer("connect_timeout", 300, "Seconds for processes to meet.")


def _fail(message: object, code: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized() and code != 75:
        sys.stdout.flush()
        os._exit(code)  # at its usual end, JAX would wait for the other processes
    sys.exit(code)


def _parse(argv: Sequence[str]) -> list[str]:
    """Parse the flags, whatever is wrong with them in one line."""
    if {"--help", "-help", "-h"} & set(argv):
        print(f"{__doc__}\n\nEvery field, with its meaning, is in configs/default.py.")
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
        given = {"config": _CONFIG.value, "workdir": _WORKDIR.value}
        if _CONFIG.value is not None:
            _CONFIG.value.to_dict()  # a file that could not be loaded complains at its first use
    except (AttributeError, KeyError) as error:  # ml_collections, of a field that is not there
        text = str(error).replace("\\n", "; ").replace("\\", "").replace("'", "").strip('"')
        _fail(f"config has no field {text}")
    except Exception as error:
        _fail(" ".join(str(error).split()))
    for name, value in given.items():
        if not value:
            _fail(f"--{name} is missing; write --{name}=...")
    if len(rest) > 1:
        _fail(f"unknown argument {rest[1]!r}; flags are written --name=value")
    return rest


def main(_: Sequence[str]) -> None:
    """Train. Exits: 2 a config that cannot run, 1 a run that failed, 75 SIGTERM, state saved."""
    logging.set_verbosity(logging.FATAL)  # Orbax logs the trace of what becomes our own error
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/jaxdec"))

    from jaxdec import checkpoint, config, hosts, train

    try:
        given = hosts.Job(_COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
        job = hosts.find(given, os.environ)
        alike = (train.TrainingInterruptedError,)
        with hosts.connect(job, _TIMEOUT.value, _CONFIG.value.watchdog_seconds, alike):
            train.train_and_evaluate(_CONFIG.value, str(_WORKDIR.value))
    except (config.ConfigError, hosts.HostsError) as error:
        _fail(error)
    except train.TrainingInterruptedError as error:
        _fail(error, code=75)
    except (train.TrainingDivergedError, checkpoint.CheckpointError) as error:
        _fail(error, code=1)
    except OSError as error:
        _fail(f"{error}; make room or give permission, and the same command continues", code=1)
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _fail(repr(error), code=1)


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
