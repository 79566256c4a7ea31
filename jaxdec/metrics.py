"""Where a run's numbers go: JSON lines, TensorBoard, a progress bar with ETA, and tables."""

import json
import pathlib
from collections.abc import Mapping
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
      folder: gets metrics.jsonl, written anew, and TensorBoard events.
      steps: of the whole run, for the progress bar.
      log_every: training metrics are averaged over so many steps.
      console: where the bar goes; a bar on a terminal, a line an evaluation elsewhere.

    Attributes:
      history: every record so far, for the plots.
    """

    def __init__(self, folder: pathlib.Path, steps: int, log_every: int, console: Console):
        self.history: list[dict[str, Any]] = []
        self._steps = steps
        self._log_every = log_every
        self._window: list[Mapping[str, Any]] = []
        self._console = console
        self._file = (folder / "metrics.jsonl").open("w")
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._board = SummaryWriter(str(folder))
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
        self._task = self._progress.add_task("training", total=steps, metrics="")

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
        self._window.append(by_node)
        if step % self._log_every and step != self._steps:
            return
        metrics = {}
        for name in by_node:
            each = np.mean([entry[name] for entry in self._window], axis=0)
            metrics[name.removesuffix("_nodes")] = each.mean()
            metrics[name] = each
        self._window = []
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
        for name in metrics:
            if isinstance(record[name], list):
                for node, value in enumerate(record[name]):
                    self._board.add_scalar(f"{name}/{node}", value, step)
            else:
                self._board.add_scalar(name, record[name], step)
        self._latest |= {label: record[name] for name, label in SHOWN.items() if name in record}
        self._progress.update(self._task, metrics=self._shown())

    def _shown(self) -> str:
        return "  ".join(f"{label} {value:.4g}" for label, value in self._latest.items())


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
