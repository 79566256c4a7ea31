"""What two runs have in common: everything but how fast they were."""

import json
import math
import pathlib
from typing import Any

import jax
from flax import nnx

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


class SmallNorm(nnx.Module):
    """A dense model with batch statistics: convolutions take long to compile."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(math.prod(input_shape), 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(16, classes, rngs=rngs)

    def __call__(self, batch: jax.Array) -> jax.Array:
        x = self.first(batch.reshape(len(batch), -1))
        return self.last(nnx.relu(self.norm(x)))
