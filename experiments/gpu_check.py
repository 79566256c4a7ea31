"""Eight minutes on one accelerator: right numbers, and what gossip costs where nodes share it.

Run: python -m experiments.gpu_check --out=gpu.json   (--small for a CPU, in a minute)

1. Every algorithm, simulated nodes in float32 on this device, beside the NumPy oracle in float64.
2. Tokens a second of a Llama-style model of 20 M parameters on 4 and 8 simulated nodes with
   accumulated Adam, beside the same step without gossip, beside all-reduce, and beside a loop that
   takes the nodes one after another.

Prints tables and writes one JSON with the device, its versions and the command.
"""

import argparse
import dataclasses
import json
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxdec
from configs import default
from jaxdec import config as configs
from jaxdec import models
from jaxdec import run as runs
from tests import lifts, reference

STEPS = 20
TOLERANCE = 1e-4  # of the largest entry, after 20 steps in float32
REPEATS = 5
NODES = (4, 8)
ISOLATED = {"topology.name": "isolated", "allow_unstable": True}
SEQUENTIAL = ISOLATED | {"nodes": 1}
SMALL = {
    "model.layers": 1,
    "model.width": 64,
    "model.heads": 2,
    "data.context": 32,
    "data.vocabulary": 64,
}


def deviations() -> dict[str, float]:
    """The largest deviation of each algorithm from the oracle, over its largest entry."""
    n = 8
    A, b = reference.least_squares(n, noise=0.5)
    x0 = np.broadcast_to(np.random.default_rng(1).standard_normal(A.shape[-1]), (n, A.shape[-1]))
    found = {}
    for key, (name, fields) in lifts.ALGORITHMS.items():
        # These two need a symmetric graph, and one on which they are stable.
        graph = "ring" if name in ("d2_dmsgd", "decentlam") else "one_peer_exponential"
        topology = jaxdec.topology.by_name(graph, n)
        weights = reference.mixing_matrices(graph, n)
        ours, theirs = dict(fields), dict(fields)
        if name == "slowmo":
            topology, theirs["every"] = jaxdec.topology.with_mean(topology, every=6), 6
        tx = jaxdec.algorithms.by_name(name, jaxdec.Gossip(topology), learning_rate=1e-3, **ours)
        data = (A.astype(np.float32), b.astype(np.float32))
        ours_at = lifts.run(tx, topology, "simulate", x0.astype(np.float32), data, STEPS)
        gradient = reference.least_squares_gradient(A, b)
        expected = np.stack(
            reference.trajectory(
                name,
                lambda t, weights=weights: weights[t % len(weights)],
                x0,
                gradient,
                lambda t: 1e-3,
                STEPS,
                **theirs,
            )
        )
        found[key] = float(np.abs(ours_at - expected).max() / np.abs(expected).max())
    return found


def build(fields: dict[str, Any]) -> runs.Run:
    """A run on random tokens: its model is real, its data set an outline."""
    config = default.get_config()
    config.update_from_flattened_dict(
        {
            "lift": "simulate",
            "data.name": "tokens",
            "data.folder": "random",
            "data.vocabulary": 8192,
            "data.context": 512,
            "model.name": "gpt",
            "model.style": "llama",
            "model.layers": 6,
            "model.heads": 8,
            "model.width": 448,
            "model.dtype": "bfloat16",
        }
        | fields
    )
    run = runs.build(config, abstract=True)
    model = models.functional(configs.make_model(config, run.dataset))
    return dataclasses.replace(run, model=model)


def stepper(run: runs.Run) -> Callable[[], float]:
    """Takes a period of steps, and gives the seconds of one step."""
    step, state = run.train_step(), run.initial_state()
    rng = np.random.default_rng(0)

    def tokens(like: Any) -> np.ndarray:
        return rng.integers(0, run.config.data.vocabulary, like.shape).astype(like.dtype)

    batch = run.placement.put(jax.tree.map(tokens, run.abstract_batch()))

    def take() -> float:
        nonlocal state
        start = time.perf_counter()
        for phase in run.phases:
            state, metrics = step(state, batch, phase=phase)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / len(run.phases)

    take()
    return take


def throughput(nodes: int, windows: int, small: bool) -> dict[str, Any]:
    """Tokens a second over all nodes, of steps that take turns."""
    fields = {"nodes": nodes, "batch_size": nodes * windows} | (SMALL if small else {})
    allreduce = default.ALLREDUCE_ADAM
    built = {
        "gossip": build(fields),
        "without gossip": build(fields | ISOLATED),
        "all-reduce": build(fields | allreduce),
        "one node": build(fields | {"batch_size": windows} | SEQUENTIAL),
    }
    tokens = nodes * windows * built["gossip"].config.data.context
    takes = {name: stepper(run) for name, run in built.items()}
    seconds = {name: [] for name in takes}
    for _ in range(REPEATS):
        for name, take in takes.items():
            seconds[name].append(take())
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    medians["one after another"] = nodes * medians.pop("one node")
    leaves = jax.tree.leaves(built["gossip"].model.params)
    return {
        "nodes": nodes,
        "parameters": sum(leaf.size for leaf in leaves),
        "tokens_per_step": tokens,
        "step_s": medians,
        "tokens_per_second": {name: tokens / value for name, value in medians.items()},
        "gossip_s": medians["gossip"] - medians["without gossip"],
    }


def hardware() -> dict[str, Any]:
    """What this ran on."""
    device = jax.devices()[0]
    driver = None
    if device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device.device_kind,
        "driver": driver,
        "jax": jax.__version__,
        "jaxdec": jaxdec.__version__,
        "python": platform.python_version(),
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Both tables."""
    numbers = Table(title=f"{found['hardware']['device']}: deviation from the oracle, float32")
    numbers.add_column("algorithm")
    numbers.add_column("of the largest entry", justify="right")
    for name, value in found["deviations"].items():
        numbers.add_row(name, f"{value:.1e}")
    speed = Table(title="tokens a second")
    speed.add_column("step")
    for entry in found["throughput"]:
        speed.add_column(f"{entry['nodes']} nodes", justify="right")
    for name in found["throughput"][0]["tokens_per_second"]:
        rates = [entry["tokens_per_second"][name] for entry in found["throughput"]]
        speed.add_row(name, *(f"{rate:,.0f}" for rate in rates))
    console.print(numbers)
    console.print(speed)


def main(argv: list[str] | None = None) -> int:
    """Check. Returns 1 where an algorithm deviates too far."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_check", description=__doc__)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="gets the JSON")
    parser.add_argument("--small", action="store_true", help="a model and batches for a CPU")
    arguments = parser.parse_args(argv)
    windows = 1 if arguments.small else 16
    found = {
        "command": "python -m experiments.gpu_check" + " --small" * arguments.small,
        "hardware": hardware(),
        "deviations": deviations(),
        "throughput": [throughput(nodes, windows, arguments.small) for nodes in NODES],
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    show(Console(), found)
    far = [name for name, value in found["deviations"].items() if not value <= TOLERANCE]
    if far:
        print(f"error: {', '.join(far)} deviate by more than {TOLERANCE}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
