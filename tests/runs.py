"""What two runs have in common: everything but how fast they were."""

import json
import pathlib
from typing import Any

TIMES = ("steps_per_second", "examples_per_second")


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record or summary without its timings."""
    return {name: value for name, value in record.items() if name not in TIMES}


def records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, without their timings."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [untimed(json.loads(line)) for line in lines]


def summary(folder: pathlib.Path) -> dict[str, Any]:
    """A run's summary.json, without its timings."""
    return untimed(json.loads((folder / "summary.json").read_text()))
