"""What gossip, data loading and a loop over runs cost a step, side by side in one process.

Run: python -m experiments.throughput.run   (about nine minutes on two cores)
     data: python -m jaxdec.data prepare fashion_mnist; python -m jaxdec.data prepare stdlib

Writes results.jsonl beside this file and prints the table. Each figure is a ratio of step times,
the median over rounds in which the two take turns; the spread is its interquartile range.
"""

import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from configs import default
from experiments.study import markdown, read_lines, report, write_lines
from jaxdec import run as runs
from jaxdec.sweep import Together

HERE = pathlib.Path(__file__).parent
ROUNDS = 9
MLP = {
    "data.name": "fashion_mnist",
    "model.name": "mlp",
    "model.hidden": (512, 512),
    "batch_size": 8 * 128,
}
GPT = {
    "data.name": "stdlib",
    "data.context": 256,
    "model.name": "gpt",
    "model.layers": 4,
    "model.heads": 4,
    "model.width": 128,
    "batch_size": 16,
}
ISOLATED = {"topology.name": "isolated", "allow_unstable": True}
TASKS = {"MLP 784-512-512-10, 8 × 128": (MLP, 20), "byte-GPT, 8 × 2 × 256": (GPT, 3)}


def build(fields: dict[str, Any]) -> runs.Run:
    config = default.get_config()
    config.update_from_flattened_dict({"lift": "simulate", "steps": 100_000} | fields)
    return runs.build(config)


def stepper(run: runs.Run, batches: Iterator[Any]) -> Callable[[int], float]:
    """Takes so many steps, and returns the seconds of one."""
    step, state, taken = run.train_step(), run.initial_state(), 0

    def take(count: int) -> float:
        nonlocal state, taken
        start = time.perf_counter()
        for _ in range(count):
            phase = run.phases[taken % len(run.phases)]
            state, metrics = step(state, run.placement.put_batch(next(batches)), phase=phase)
            jax.block_until_ready(metrics)
            taken += 1
        return (time.perf_counter() - start) / count

    take(2 * len(run.phases))
    return take


def ratio(dividend: Callable[[int], float], divisor: Callable[[int], float], count: int) -> dict:
    pairs = [(dividend(count), divisor(count)) for _ in range(ROUNDS)]
    ratios = np.array([above / below for above, below in pairs])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "ms": [round(1000 * float(np.median(side)), 2) for side in zip(*pairs, strict=True)],
    }


def gossip_cost(fields: dict[str, Any], count: int) -> dict:
    runs = [build(fields | extra) for extra in ({}, ISOLATED)]
    batch = next(runs[0].batches())
    return ratio(*(stepper(run, itertools.repeat(batch)) for run in runs), count)


def loading_cost(fields: dict[str, Any], count: int) -> dict:
    run = build(fields)
    cached = itertools.repeat(next(run.batches()))
    return ratio(stepper(run, run.batches()), stepper(run, cached), count)


def together_cost(fields: dict[str, Any], steps: int, members: int = 4) -> dict:
    """Seconds of `members` runs in one program over those of one after another."""

    def seconds(chosen: range, size: int) -> float:
        configs = []
        for seed in chosen:
            config = default.get_config()
            config.update_from_flattened_dict(fields | {"seed": seed, "steps": steps})
            configs.append(config)
        start = time.perf_counter()
        for first in range(0, len(configs), size):
            list(Together(configs[first : first + size]).results())
        return time.perf_counter() - start

    every = range(members)
    return ratio(lambda _: seconds(every, members), lambda _: seconds(every, 1), 1)


def tables() -> dict[str, str]:
    """The README's table, from results.jsonl."""
    rows = []
    for line in read_lines(HERE):
        low, high = line["quartiles"]
        above, below = line["ms"]
        spread = f"{line['ratio']:.3f} ({low:.3f} … {high:.3f})"
        rows.append([line["task"], line["what"], spread, f"{above:.1f} / {below:.1f}"])
    header = ["task", "ratio of step times", "median (quartiles)", "ms"]
    return {"ratios": markdown(header, rows)}


def main() -> None:
    results = []
    for task, (fields, count) in TASKS.items():
        for what, measure in {
            "gossip / without gossip": gossip_cost,
            "loaded batches / one cached batch": loading_cost,
        }.items():
            results.append({"task": task, "what": what} | measure(fields, count))
            print(json.dumps(results[-1]), flush=True)
    small = {"data.name": "digits", "model.hidden": (64,), "eval_every": 200}
    what = "4 runs together / one after another"
    results.append({"task": "MLP 64-64-10, 8 × 16, 200 steps", "what": what})
    results[-1] |= together_cost(small, steps=200)
    print(json.dumps(results[-1]), flush=True)
    write_lines(HERE, results)
    report(HERE, tables())


if __name__ == "__main__":
    main()
