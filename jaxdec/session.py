"""What surrounds a run: compiled programs kept, SIGTERM, a profiler's trace, a board at wandb."""

import os
import pathlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import jax

from jaxdec.config import ConfigError

Record = dict[str, Any]


def keep_compiled() -> None:
    """Keep compiled programs for the next process: JAX's cache, in ~/.cache/jaxdec by default."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser("~/.cache/jaxdec"))


class Sigterm:
    """An event that SIGTERM sets, while inside; elsewhere than the main thread, it never does."""

    def __enter__(self) -> threading.Event:
        self._event = threading.Event()
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._before = signal.signal(signal.SIGTERM, self._set)
        return self._event

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._in_main:
            signal.signal(signal.SIGTERM, self._before)

    def _set(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._event.set()


class Trace:
    """Traces steps with `jax.profiler`; a context manager.

    Args:
      folder: gets the trace, for TensorBoard's profile plugin or Perfetto.
      first: steps taken when it begins.
      steps: how many to trace; 0: none.
    """

    def __init__(self, folder: pathlib.Path, first: int, steps: int):
        self._folder = folder
        self._first = first
        self._last = first + steps
        self._traces = False

    def __enter__(self) -> "Trace":
        return self

    def step(self, taken: int) -> None:
        """Note that a step was dispatched."""
        if taken == self._first < self._last:
            jax.profiler.start_trace(self._folder)
            self._traces = True
        elif taken == self._last:
            self._stop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._traces:
            jax.profiler.stop_trace()
        self._traces = False


def wandb_board(project: str, folder: pathlib.Path, config: Record) -> Callable[[Record], None]:
    """Sends records to a project at Weights & Biases.

    Raises:
      ConfigError: the package is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"config.wandb={project!r} needs the package wandb: pip install 'jaxdec[wandb]'; or "
            "leave the field None"
        ) from error
    board = wandb.init(project=project, dir=folder, config=config, id=folder.name, resume="allow")

    def log(record: Record) -> None:
        board.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    return log
