"""Where a run's numbers go: JSON lines, TensorBoard, a progress bar with ETA, and tables."""

import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from tensorboardX import SummaryWriter

from jaxdec.placement import Placement
from jaxdec.workdir import write_whole

SHOWN = {
    "train/loss": "loss",
    "eval/accuracy": "test acc",
    "consensus_distance": "consensus",
    "examples_per_second": "ex/s",
}


class StepClock:
    """Steps a second, once each round is compiled; what is paused for is left out.

    A run of no more steps than rounds is timed with its compilation.

    Args:
      skip: steps that may compile.
    """

    def __init__(self, skip: int):
        self._skip = skip
        self._all = 0
        self._start = self._resumed = time.perf_counter()
        self._running = False
        self._counted = 0
        self._seconds = 0.0
        self._lap = (0, 0.0)

    def step(self) -> None:
        """Count a step."""
        self._all += 1
        if self._running:
            self._counted += 1
        elif self._all > self._skip:
            self._running, self._resumed = True, time.perf_counter()

    def pause(self) -> None:
        """Stop the clock until the step after the next begins."""
        if self._running:
            self._seconds += time.perf_counter() - self._resumed
        self._running = False

    def lap(self) -> float:
        """Steps a second since the last lap; where none was timed, since the start."""
        counted, seconds = self._lap
        self._lap = (self._counted, self._seconds)
        if self._counted == counted:
            return self.steps_per_second
        return (self._counted - counted) / (self._seconds - seconds)

    @property
    def steps_per_second(self) -> float:
        if self._counted:
            return self._counted / self._seconds
        return self._all / (time.perf_counter() - self._start)


class Window:
    """Training metrics by node of the steps since the last record.

    Args:
      placement: of the nodes; each process adds those of its own.
      entries: of the steps before, as `entries` had them then.
    """

    def __init__(self, placement: Placement, entries: Sequence[dict[str, list[float]]] = ()):
        self._placement = placement
        self._entries = list(entries)
        self._own: list[dict[str, np.ndarray]] = []

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        """Wait for the metrics of a step, [nodes] each."""
        self._own.append({k: self._placement.fetch_own(v) for k, v in metrics.items()})

    def entries(self) -> list[dict[str, list[float]]]:
        """A step each, of all nodes, as JSON; a collective where there are several processes."""
        if self._own:
            names = sorted(self._own[0])
            rows = np.array([[step[name] for name in names] for step in self._own])
            rows = self._placement.gather_own(np.moveaxis(rows, 2, 0))  # [nodes, steps, names]
            self._entries += [
                {name: rows[:, step, i].tolist() for i, name in enumerate(names)}
                for step in range(rows.shape[1])
            ]
            self._own = []
        return list(self._entries)

    def clear(self) -> None:
        """Forget all steps: they were recorded."""
        self._entries = []


class RunLog:
    """Writes one run's metrics; a context manager.

    Args:
      folder: gets metrics.jsonl and TensorBoard events.
      steps: of the whole run, for the progress bar.
      start: steps taken before; metrics.jsonl is cut back to them, and goes on from there.
      console: where the bar goes; a bar on a terminal, a line an evaluation elsewhere.
      board: a further place for scalars: (record) → None.
      quiet: write nothing: another process does.

    Attributes:
      history: every record so far, for the plots.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        steps: int,
        console: Console,
        start: int = 0,
        board: Callable[[dict[str, Any]], None] | None = None,
        quiet: bool = False,
    ):
        path = folder / "metrics.jsonl"
        self.history = _records(path, start) if path.exists() else []
        self._quiet = quiet
        self._console = console
        self._board = board
        if not quiet:
            write_whole(path, "".join(json.dumps(record) + "\n" for record in self.history))
            self._file = path.open("a")
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._events = SummaryWriter(str(folder))
            for record in self.history:
                self._draw(record)
        self._latest: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=steps, completed=start, metrics="")

    def __enter__(self) -> "RunLog":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        if not self._quiet:
            self._file.close()
            self._events.close()

    def advance(self) -> None:
        """Count a step on the progress bar."""
        self._progress.advance(self._task)

    def training(
        self, step: int, window: Sequence[Mapping[str, Any]], examples_per_second: float
    ) -> None:
        """Record the mean over the steps of a window, after `step` steps.

        Args:
          step: steps taken.
          window: a step each: "train/…_nodes" → [nodes]; recorded beside their mean over nodes.
          examples_per_second: over all nodes, since the last record.
        """
        metrics: dict[str, Any] = {}
        for name in sorted(window[0]):
            each = np.mean([entry[name] for entry in window], axis=0)
            metrics[name.removesuffix("_nodes")] = each.mean()
            metrics[name] = each
        self._write(step, metrics | {"examples_per_second": examples_per_second})

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record an evaluation after `step` steps: scalars, or one number a node."""
        self._write(step, metrics)
        if not (self._quiet or self._console.is_terminal):
            self._console.print(f"step {step}  {self._shown()}")

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        record: dict[str, Any] = {"step": step}
        record |= {name: np.asarray(v, np.float64).tolist() for name, v in metrics.items()}
        self.history.append(record)
        if not self._quiet:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
            self._draw(record)
        if self._board is not None:
            self._board(record)
        self._latest |= {label: record[name] for name, label in SHOWN.items() if name in record}
        self._progress.update(self._task, metrics=self._shown())

    def _draw(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, list):
                for node, entry in enumerate(value):
                    self._events.add_scalar(f"{name}/{node}", entry, record["step"])
            elif name != "step":
                self._events.add_scalar(name, value, record["step"])

    def last_evaluation(self) -> dict[str, Any]:
        """The newest record of an evaluation, without its step."""
        record = next(record for record in reversed(self.history) if "eval/loss" in record)
        return {name: value for name, value in record.items() if name != "step"}

    def _shown(self) -> str:
        return "  ".join(f"{label} {value:.4g}" for label, value in self._latest.items())


def _records(path: pathlib.Path, last_step: int) -> list[dict[str, Any]]:
    """The records up to a step; a last line that was cut short is one of a later step."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [record for record in records if record["step"] <= last_step]


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A run's summary.json as a terminal table."""
    table = Table(show_header=False, title="summary", title_justify="left")
    for name, value in summary.items():
        if isinstance(value, list):
            value = f"{min(value):.4g} … {max(value):.4g} over {len(value)} nodes"
        elif isinstance(value, float):
            value = f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
        table.add_row(name, str(value))
    return table
