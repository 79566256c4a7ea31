"""Checkpoints of a run (Orbax): exact resume, and a start from another run's state."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp

from jaxdec.state import TrainState

Window = list[dict[str, list[float]]]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are intact."""


class Checkpoints:
    """The checkpoints of one run, in `folder`/checkpoints: the state of every node, asynchronous.

    A batch is a function of the step, so the state and the open window of training metrics are all
    there is to save. One that was not written whole is never seen.

    Args:
      folder: of the run.
      keep: how many to keep; the newest.
      read_only: write nothing there, not even the folder.
    """

    def __init__(self, folder: pathlib.Path, keep: int = 2, *, read_only: bool = False):
        self._folder = folder / "checkpoints"
        options = (
            ocp.CheckpointManagerOptions(read_only=True, create=False)
            if read_only
            else ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        )
        self._manager = ocp.CheckpointManager(self._folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint; None: there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, window: Window) -> None:
        """Save the state after `step` steps, without waiting for the disk.

        Raises:
          CheckpointError: this or the save before it failed.
        """
        # The caller goes on appending to its window while this one is written.
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), log=ocp.args.JsonSave({"window": list(window)})
        )
        with _named(f"writing a checkpoint of step {step} to {self._folder}"):
            self._manager.save(step, args=items)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, Window]:
        """The state and window after `step` steps, placed as `like` is.

        Raises:
          CheckpointError: it cannot be read.
        """
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(_abstract, like)),
            log=ocp.args.JsonRestore(),
        )
        with _named(f"reading the checkpoint of step {step} in {self._folder}"):
            restored = self._manager.restore(step, args=items)
        return restored["state"], restored["log"]["window"]

    def close(self) -> None:
        """Wait for saves under way.

        Raises:
          CheckpointError: one of them failed.
        """
        with _named(f"writing a checkpoint to {self._folder}"):
            self._manager.wait_until_finished()
            self._manager.close()


def _abstract(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@contextlib.contextmanager
def _named(action: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        if len(reason) > 300:
            reason = f"{reason[:120]} … {reason[-160:]}"
        raise CheckpointError(
            f"{action} failed: {reason}; earlier ones are intact, and once this is mended the same "
            "command continues"
        ) from error
