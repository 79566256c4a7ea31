"""The trainer's flags, and every failure of it in one line."""

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from jaxdec import checkpoint, config, hosts, train

CONFIG = config_flags.DEFINE_config_file("config", None, "The run, a file of configs/.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the run's outputs.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, of several.")
PROCESSES = flags.DEFINE_integer("processes", None, "Number of processes of the run.")
PROCESS = flags.DEFINE_integer("process", None, "Which of them this is.")
TIMEOUT = flags.DEFINE_integer("connect_timeout", 300, "Seconds for processes to meet.")

UNSET = re.compile(r"--?config\.([\w.]+)=None")
EXIT_CODES: dict[type[Exception], int] = {
    config.ConfigError: 2,
    hosts.HostsError: 2,
    train.TrainingInterruptedError: 75,
    train.TrainingDivergedError: 1,
    checkpoint.CheckpointError: 1,
}


def parse(
    argv: Sequence[str], doc: str, required: Sequence[flags.FlagHolder] = (CONFIG, WORKDIR)
) -> list[str]:
    """Parse the flags, whatever is wrong with them in one line.

    Beyond what ml_collections can, `--config.field=None` unsets a field.
    """
    if {"--help", "-help", "-h"} & set(argv):
        print(f"{doc}\n\nEvery field, with its meaning, is in configs/default.py.")
        sys.exit(0)
    try:
        unset = [found[1] for arg in argv if (found := UNSET.fullmatch(arg))]
        rest = flags.FLAGS([arg for arg in argv if not UNSET.fullmatch(arg)])
        if CONFIG.value is not None:
            CONFIG.value.to_dict()  # a file that could not be loaded complains at its first use
            CONFIG.value.update_from_flattened_dict(dict.fromkeys(unset))
    except (AttributeError, KeyError) as error:  # ml_collections, of a field that is not there
        text = str(error).replace("\\n", "; ").replace("\\", "").replace("'", "").strip('"')
        _fail(f"config has no field {text}")
    except Exception as error:
        _fail(" ".join(str(error).split()))
    for flag in required:
        if not flag.value:
            _fail(f"--{flag.name} is missing; write --{flag.name}=...")
    if len(rest) > 1:
        _fail(f"unknown argument {rest[1]!r}; flags are written --name=value")
    return rest


def job() -> hosts.Job:
    """What the flags say of a run of several processes."""
    return hosts.Job(COORDINATOR.value, PROCESSES.value, PROCESS.value)


@contextmanager
def failures() -> Iterator[None]:
    """Exit with one line on stderr, and the code of its kind, for what users can mend."""
    try:
        yield
    except tuple(EXIT_CODES) as error:
        _fail(error, next(EXIT_CODES[kind] for kind in type(error).mro() if kind in EXIT_CODES))
    except OSError as error:
        _fail(f"{error}; make room or give permission, and the same command continues", 1)
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _fail(repr(error), 1)


def _fail(message: object, code: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized() and code != 75:
        sys.stdout.flush()
        os._exit(code)  # at its usual end, JAX would wait for the other processes
    sys.exit(code)
