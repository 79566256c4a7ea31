"""Run a config's `sweep(add)`: python -m jaxdec.sweep --config=configs/NAME.py --workdir=DIR.

Runs that differ only in seed and learning rate train together, in one program. A run's line in
DIR/results.jsonl is written once it is done; the same command does what is missing.
"""

import argparse
import functools
import hashlib
import importlib.util
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxdec import config as configs
from jaxdec import data, nodes
from jaxdec import run as runs
from jaxdec.session import keep_compiled
from jaxdec.state import AXES, TrainState

Overrides = dict[str, Any]


def read(path: str) -> list[tuple[Overrides, ConfigDict]]:
    """The runs of a config file: what each overrides, and its config.

    The file's `sweep(add)` calls `add(*arguments_of_get_config, **overrides)` for each run.

    Raises:
      ConfigError: no such file, one without `sweep`, or a run that cannot be.
    """
    spec = importlib.util.spec_from_file_location("swept", path)
    if spec is None or spec.loader is None or not pathlib.Path(path).is_file():
        raise configs.ConfigError(f"--config={path} is no config file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "sweep"):
        raise configs.ConfigError(f"--config={path} has no sweep(add); write one beside get_config")
    found: list[tuple[Overrides, ConfigDict]] = []

    def add(*arguments: str, **overrides: Any) -> None:
        get_config = functools.partial(module.get_config, *arguments)
        [(_, config)] = configured(get_config, [overrides])
        variant = zip(inspect.signature(module.get_config).parameters, arguments, strict=False)
        found.append((dict(variant) | overrides, config))

    module.sweep(add)
    return found


def configured(
    get_config: Callable[[], ConfigDict], added: Iterable[Overrides]
) -> list[tuple[Overrides, ConfigDict]]:
    """The runs that override so much of a config.

    Raises:
      ConfigError: one of them cannot run.
    """
    found = []
    for overrides in added:
        try:
            config = get_config().lock()
            config.update_from_flattened_dict(overrides)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise configs.ConfigError(f"sweep adds {overrides}: {error}") from error
        configs.validate(config)
        found.append((overrides, config))
    return found


def groups(runs: Sequence[tuple[Overrides, ConfigDict]], most: int) -> list[list[int]]:
    """Indices of the runs that train together: alike but for seed and learning rate.

    At most `most` of them at a time. Where batches differ in shape, so do those of two seeds, and
    each seed is apart.

    >>> from configs import quickstart
    >>> def run(**overrides):
    ...     config = quickstart.get_config()
    ...     config.update(overrides)
    ...     return overrides, config
    >>> groups([run(seed=0), run(seed=1, steps=9), run(seed=1)], most=8)
    [[0, 2], [1]]
    """
    alike: dict[str, list[int]] = {}
    for index, (_, config) in enumerate(runs):
        common = json.loads(config.to_json())
        common["algorithm"]["learning_rate"] = None
        if configs.batch_shapes(config) == 1:
            common["seed"] = None
        alike.setdefault(json.dumps(common, sort_keys=True), []).append(index)
    return [
        members[first : first + most]
        for members in alike.values()
        for first in range(0, len(members), most)
    ]


class Together:
    """Runs that are alike but for seed and learning rate, trained in one program on one device.

    `nodes.simulate` under a further `vmap` over runs; the learning rate is an argument.

    Args:
      members: their configs.
    """

    def __init__(self, members: Sequence[ConfigDict]):
        self._runs = []
        for config in members:
            config.lift = "simulate"
            self._runs.append(runs.build(config))
        run = self._runs[0]
        self._config = run.config
        self._rates = jnp.asarray([c.algorithm.learning_rate for c in members], jnp.float32)
        self._seeds = jnp.asarray([c.seed for c in members], jnp.int32)

        def step(
            state: TrainState, batch: data.Batch, rate: jax.Array, seed: jax.Array, *, phase: int
        ) -> Any:
            shape = configs.make_schedule(self._config, peak=1.0)
            tx = configs.make_algorithm(self._config, run.gossip, lambda t: rate * shape(t))
            node_step = runs.make_node_step(
                run.model.apply,
                tx,
                label_smoothing=self._config.label_smoothing,
                accumulate=self._config.accumulate,
                seed=seed,
            )
            return node_step(state, batch, phase=phase)

        one = nodes.simulate(step, (AXES, 0, None, None), (AXES, 0), donate_argnums=())

        @functools.partial(jax.jit, static_argnames="phase", donate_argnums=0)
        def every(state: Any, batch: Any, rate: Any, seed: Any, *, phase: int) -> Any:
            return jax.vmap(functools.partial(one, phase=phase))(state, batch, rate, seed)

        self._step = every

    def train(self) -> tuple[list[TrainState], list[dict[str, jax.Array]]]:
        """Every run's state of all nodes after its steps, and the metrics of its last step."""
        run, config = self._runs[0], self._config
        states = [each.initial_state() for each in self._runs]
        state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        sources = [each.batches() for each in self._runs]
        metrics: dict[str, jax.Array] = {}
        for step in track(range(config.steps), f"{len(self._runs)} runs", transient=True):
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *map(next, sources))
            phase = run.phases[step % len(run.phases)]
            before = metrics
            state, metrics = self._step(state, batch, self._rates, self._seeds, phase=phase)
            jax.block_until_ready(before)
        found = [jax.tree.map(lambda x, i=i: x[i], (state, metrics)) for i in range(len(states))]
        return [own for own, _ in found], [last for _, last in found]

    def results(self) -> Iterator[dict[str, Any]]:
        """Train, and give each run's scores: those of its summary.json, and its last losses."""
        config, evaluation = self._config, self._runs[0].evaluation()
        for run, state, metrics in zip(self._runs, *self.train(), strict=True):
            losses = np.asarray(metrics["train/loss_nodes"], np.float64)
            scores = evaluation(state.params, state.statistics)
            scores |= run.final_scores(evaluation, state)
            yield {
                "algorithm": config.algorithm.name,
                "topology": config.topology.name,
                "nodes": config.nodes,
                "steps": config.steps,
                "seed": run.config.seed,
                "train/loss": float(losses.mean()),
                **{name: np.asarray(value).tolist() for name, value in scores.items()},
            }


def sweep(
    runs: Sequence[tuple[Overrides, ConfigDict]], folder: pathlib.Path, most: int = 8
) -> list[dict[str, Any]]:
    """Do the runs that folder/results.jsonl lacks. Returns their lines, in the order of runs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    done = _lines(path)
    keys = [_key(config) for _, config in runs]
    missing = [index for index, key in enumerate(keys) if key not in done]
    for members in groups([runs[index] for index in missing], most):
        chosen = [missing[member] for member in members]
        together = Together([runs[index][1] for index in chosen])
        for index, result in zip(chosen, together.results(), strict=True):
            line = {"key": keys[index], "overrides": runs[index][0]} | result
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            done[keys[index]] = line
    return [done[key] for key in keys]


def _key(config: ConfigDict) -> str:
    fields = json.loads(config.to_json())
    del fields["lift"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _lines(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The finished runs; a line that was cut short is of one that was not."""
    found = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[line["key"]] = line
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """What the runs overrode, and how they ended."""
    names = list(dict.fromkeys(name for line in lines for name in line["overrides"]))
    scores = [name for name in ("eval/loss", "eval/accuracy") if name in lines[0]]
    found = Table(*(name.rpartition(".")[2] for name in names), *scores, "consensus")
    for line in lines:
        values = [str(line["overrides"].get(name, "")) for name in names]
        found.add_row(*values, *(f"{line[name]:.4g}" for name in (*scores, "consensus_distance")))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns 2, after one line on stderr, where it could not."""
    parser = argparse.ArgumentParser(prog="python -m jaxdec.sweep", description=__doc__)
    parser.add_argument("--config", required=True, help="a file of configs/ with sweep(add)")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="gets results.jsonl")
    parser.add_argument("--together", type=int, default=8, help="most runs in one program")
    arguments = parser.parse_args(argv)
    keep_compiled()
    try:
        lines = sweep(read(arguments.config), arguments.workdir, arguments.together)
    except configs.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
