"""What the studies share: runs tuned alike, error bars, and tables that READMEs hold."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from ml_collections import ConfigDict

from jaxdec import sweep
from jaxdec.session import keep_compiled


class Cell(NamedTuple):
    """What is compared: a method in its setting, and the learning rates to try."""

    overrides: dict[str, Any]
    rates: Sequence[float]

    def at(self, rate: float, seed: int) -> dict[str, Any]:
        """What one run overrides."""
        return self.overrides | {"algorithm.learning_rate": rate, "seed": seed}


class Outcome(NamedTuple):
    """A cell at the best of its rates."""

    rate: float
    at_edge: bool  # it is the least or the largest that was tried
    lines: list[dict[str, Any]]  # of results.jsonl, by seed

    def values(self, name: str) -> np.ndarray:
        """A field's values over seeds."""
        return np.array([line[name] for line in self.lines], float)


@dataclasses.dataclass(frozen=True)
class Study:
    """Cells tuned alike: every rate with the first seed, and the best again with the others.

    The first seed chooses the rate and is not reported.

    Args:
      folder: gets results.jsonl; runs that it holds are not done again.
      get_config: the config that cells override.
      cells: by name.
      score: the field to tune for; a loss is to be small.
      seeds: the first one tunes.
    """

    folder: pathlib.Path
    get_config: Callable[[], ConfigDict]
    cells: Mapping[str, Cell]
    score: str = "eval/accuracy"
    seeds: Sequence[int] = (0, 1, 2, 3)

    def run(self, most: int = 8) -> dict[str, Outcome]:
        """Do what is missing, at most so many runs in a program."""
        keep_compiled()
        first, *others = self.seeds
        self._sweep(
            [cell.at(rate, first) for cell in self.cells.values() for rate in cell.rates], most
        )
        results = _Results(self.folder)
        best = [(cell, self._best(cell, results)) for cell in self.cells.values()]
        self._sweep([cell.at(rate, seed) for cell, rate in best for seed in others], most)
        return self.outcomes()

    def outcomes(self) -> dict[str, Outcome]:
        """What results.jsonl says of every cell."""
        results, found = _Results(self.folder), {}
        for name, cell in self.cells.items():
            rate = self._best(cell, results)
            lines = [results.line(cell.at(rate, seed)) for seed in self.seeds[1:]]
            found[name] = Outcome(rate, rate in (min(cell.rates), max(cell.rates)), lines)
        return found

    def _sweep(self, added: list[dict[str, Any]], most: int) -> None:
        sweep.sweep(sweep.configured(self.get_config, added), self.folder, most)

    def _best(self, cell: Cell, results: "_Results") -> float:
        found = [results.line(cell.at(rate, self.seeds[0]))[self.score] for rate in cell.rates]
        scores = -np.array(found) if self.score.endswith("loss") else np.array(found)
        return cell.rates[int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))]


class _Results:
    """The lines of results.jsonl, read once, by what each run overrode."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lines = {self._key(line["overrides"]): line for line in read_lines(folder)}

    def line(self, overrides: dict[str, Any]) -> dict[str, Any]:
        key = self._key(overrides)
        if key not in self._lines:
            raise LookupError(f"{self._folder}/results.jsonl lacks {overrides}; run the study")
        return self._lines[key]

    @staticmethod
    def _key(overrides: dict[str, Any]) -> str:
        return json.dumps(overrides, sort_keys=True)


def read_lines(folder: pathlib.Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    """A study's results."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def write_lines(
    folder: pathlib.Path, lines: Iterable[Mapping[str, Any]], name: str = "results.jsonl"
) -> None:
    """Write a study's results, whole."""
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def mean_and_error(values: Sequence[float] | np.ndarray, digits: int = 2) -> str:
    """The mean ± its standard error.

    >>> mean_and_error([1.0, 2.0, 3.0])
    '2.00 ± 0.58'
    """
    return f"{np.mean(values):.{digits}f} ± {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of the mean: s/√n, s² with n − 1."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def difference(values: np.ndarray, others: np.ndarray, digits: int = 2) -> str:
    """The difference of two means ± its standard error; ** where it is two of them or more.

    >>> difference(np.array([5.0, 6.0]), np.array([1.0, 2.0]))
    '+4.00 ± 0.71**'
    """
    error = np.hypot(standard_error(values), standard_error(others))
    gap = np.mean(values) - np.mean(others)
    mark = "**" if abs(gap) >= 2 * error else ""
    return f"{gap:+.{digits}f} ± {error:.{digits}f}{mark}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [header, *rows]
    first, *others = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([first, "|" + "---|" * len(header), *others])


def report(folder: pathlib.Path, tables: Mapping[str, str]) -> None:
    """Print tables, and put each into the README, between the comments "table NAME" and "/table".

    Raises:
      ValueError: it has no such place.
    """
    readme = folder / "README.md"
    text = readme.read_text()
    for name, table in tables.items():
        print(f"{name}\n{table}\n")
        head, opened, rest = text.partition(f"<!-- table {name} -->\n")
        _, closed, tail = rest.partition("<!-- /table -->")
        if not closed:
            raise ValueError(f"{readme} has no place for table {name}")
        text = f"{head}{opened}{table}\n{closed}{tail}"
    readme.write_text(text)


def plot_means(axes: Axes, xs: Sequence[float], values: Sequence[np.ndarray], **style: Any) -> None:
    """A line of means over seeds, with their standard errors."""
    means, errors = [np.mean(v) for v in values], [standard_error(v) for v in values]
    axes.errorbar(xs, means, errors, marker="o", markersize=4, capsize=2, **style)
