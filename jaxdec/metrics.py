"""Where a run's numbers go: JSON lines, TensorBoard, a progress bar with ETA, and tables."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

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

SHOWN = {
    "train/loss": "loss",
    "eval/accuracy": "test acc",
    "consensus_distance": "consensus",
}


class RunLog:
    """Writes one run's metrics; a context manager.

    Args:
      folder: gets metrics.jsonl and TensorBoard events.
      steps: of the whole run, for the progress bar.
      log_every: training metrics are averaged over so many steps.
      start: steps taken before; metrics.jsonl is cut back to them, and goes on from there.
      window: the training metrics since the last record, as `window` had them then.
      console: where the bar goes; a bar on a terminal, a line an evaluation elsewhere.

    Attributes:
      history: every record so far, for the plots.
      window: training metrics since the last record, as JSON; a checkpoint holds them.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        steps: int,
        log_every: int,
        console: Console,
        start: int = 0,
        window: Sequence[dict[str, list[float]]] = (),
    ):
        path = folder / "metrics.jsonl"
        self.history = _records(path, start) if path.exists() else []
        self.window = list(window)
        self._steps = steps
        self._log_every = log_every
        self._console = console
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.history))
        os.replace(partial, path)
        self._file = path.open("a")
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._board = SummaryWriter(str(folder))
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
            disable=not console.is_terminal,
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
        self._file.close()
        self._board.close()

    def train_step(self, step: int, by_node: Mapping[str, Any]) -> None:
        """Count a step, and record the mean of the last `log_every` with it.

        Args:
          step: steps taken, this one included.
          by_node: "train/…_nodes" → [nodes]; recorded beside their mean over nodes.
        """
        self._progress.advance(self._task)
        self.window.append({name: np.asarray(v).tolist() for name, v in by_node.items()})
        if step % self._log_every and step != self._steps:
            return
        metrics = {}
        for name in by_node:
            each = np.mean([entry[name] for entry in self.window], axis=0)
            metrics[name.removesuffix("_nodes")] = each.mean()
            metrics[name] = each
        self.window = []
        self._write(step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record an evaluation after `step` steps: scalars, or one number a node."""
        self._write(step, metrics)
        if not self._console.is_terminal:
            self._console.print(f"step {step}  {self._shown()}")

    def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
        record: dict[str, Any] = {"step": step}
        record |= {name: np.asarray(v, np.float64).tolist() for name, v in metrics.items()}
        self.history.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._draw(record)
        self._latest |= {label: record[name] for name, label in SHOWN.items() if name in record}
        self._progress.update(self._task, metrics=self._shown())

    def _draw(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, list):
                for node, entry in enumerate(value):
                    self._board.add_scalar(f"{name}/{node}", entry, record["step"])
            elif name != "step":
                self._board.add_scalar(name, value, record["step"])

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
