"""The trainer: one node's step, written once, and the loop around it."""

import dataclasses
import functools
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict
from rich.console import Console

from jaxdec import algorithms, data, models, nodes, plots, workdir
from jaxdec import config as configs
from jaxdec.checkpoint import Checkpoints, resized, with_nodes
from jaxdec.evaluate import Apply, classification, evaluate
from jaxdec.metrics import RunLog, summary_table
from jaxdec.state import AXES, TrainState

Metrics = dict[str, jax.Array]


class TrainingDivergedError(RuntimeError):
    """The loss of a node is not finite."""


class TrainingInterruptedError(RuntimeError):
    """SIGTERM came, and the state was saved."""


def make_node_step(
    apply: Apply, tx: optax.GradientTransformationExtraArgs, label_smoothing: float = 0.0
) -> Callable[..., tuple[TrainState, Metrics]]:
    """One node's training step: (state, batch, phase=) → (state, metrics). Lift it with `nodes`."""
    loss_fn = functools.partial(classification, apply, label_smoothing=label_smoothing)
    loss_and_gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def node_step(state: TrainState, batch: Any, *, phase: int) -> tuple[TrainState, Metrics]:
        (loss, accuracy), grads = loss_and_gradient(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, phase=phase)
        params = optax.apply_updates(state.params, updates)
        return (
            TrainState(state.step + 1, params, opt_state),
            {"train/loss_nodes": loss, "train/accuracy_nodes": accuracy},
        )

    return node_step


def train_and_evaluate(config: ConfigDict, folder: str | pathlib.Path) -> dict[str, Any]:
    """Run a config and write its outputs.

    Args:
      config: a complete config, see configs/default.py.
      folder: gets config.json, metrics.jsonl, TensorBoard events, checkpoints/, plots/ and
        summary.json. One that holds this very run is continued from its newest checkpoint; once
        finished, it is left as it is.

    Returns:
      The summary.

    Raises:
      ConfigError: the config cannot run, or the folder holds another run.
      CheckpointError: a checkpoint could not be written or read.
      TrainingDivergedError: the loss of a node is not finite.
      TrainingInterruptedError: SIGTERM came; the same call continues the run.
    """
    console = Console()
    folder = pathlib.Path(folder)
    configs.validate(config)
    dataset = data.load(config.data.name)
    parts = configs.make_partition(config, dataset)
    model = configs.make_model(config, dataset.train_inputs.shape[1:], dataset.classes)
    source = None if config.restore is None else _source(config)
    finished = workdir.claim(folder, config)
    if finished is not None:
        console.print(f"{folder} holds this run, finished; nothing to do")
        console.print(summary_table(finished))
        return finished

    topology = configs.make_topology(config)
    gossip = configs.make_gossip(config, topology)
    tx = configs.make_algorithm(config, gossip)
    phases = configs.phases(config, topology)
    apply, params = models.functional(model)
    console.print(
        f"{config.algorithm.name} on {topology.name}: {config.nodes} nodes, lift "
        f"{configs.lift_of(config)}, {len(set(phases))} executables, "
        f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters a node → {folder}"
    )
    sent = [algorithms.bytes_sent(config.algorithm.name, gossip, params, phase) for phase in phases]

    lift, place, replicate = _placement(config)
    params = place(nodes.stack(params, config.nodes))
    opt_state = lift(tx.init, donate_argnums=())(params)
    state = TrainState(replicate(jnp.zeros([], jnp.int32)), params, opt_state)
    node_step = make_node_step(apply, tx, config.label_smoothing)
    train_step = lift(node_step, in_axes=(AXES, 0), out_axes=(AXES, 0))
    test = {"inputs": dataset.test_inputs, "labels": dataset.test_labels}

    checkpoints = Checkpoints(folder)
    window: list[dict[str, list[float]]] = []
    if (latest := checkpoints.latest_step()) is not None:
        state, window = checkpoints.restore(latest, state)
        console.print(f"continuing from the checkpoint of step {latest}")
    elif source is not None:
        state = _adopted(config, source, state, place, replicate, console)
    start = int(state.step)
    batch_size = config.batch_size // config.nodes
    batches = data.prefetched(
        data.NodeBatches(dataset, parts, batch_size, config.seed, config.steps), start
    )

    clock = _StepClock(skip=len(phases))
    pending: Metrics | None = None
    with (
        _Sigterm() as terminated,
        RunLog(folder, config.steps, config.log_every, console, start, window) as log,
    ):
        for step in range(start, config.steps):
            batch = place(next(batches))
            state, metrics = train_step(state, batch, phase=phases[step % len(phases)])
            # The metrics of step k − 1 are fetched once step k is dispatched: the device never
            # waits for the host, and the host is never far ahead.
            if pending is not None:
                log.train_step(step, _finite(jax.device_get(pending), step))
            pending = metrics
            clock.step()
            last = step + 1 == config.steps or terminated.is_set()
            evaluates = (step + 1) % config.eval_every == 0 or step + 1 == config.steps
            saves = last or (step + 1) % config.checkpoint_every == 0
            if not (evaluates or saves):
                continue
            log.train_step(step + 1, _finite(jax.device_get(pending), step + 1))
            pending = None
            clock.pause()
            if evaluates:
                log.evaluation(step + 1, jax.device_get(evaluate(apply, state.params, test)))
            if saves:
                checkpoints.save(step + 1, state, log.window)
            if terminated.is_set():
                checkpoints.close()
                raise TrainingInterruptedError(
                    f"SIGTERM at step {step + 1}; the state is saved in {folder}, "
                    "and the same command continues"
                )
        checkpoints.close()
        evaluated = log.last_evaluation()
    summary = {
        "algorithm": config.algorithm.name,
        "topology": config.topology.name,
        "nodes": config.nodes,
        "lift": configs.lift_of(config),
        "steps": config.steps,
        "seed": config.seed,
        "steps_per_second": clock.steps_per_second,
        **evaluated,
        "bytes_sent_per_node_per_step": float(np.mean(sent)),
        "executables": len(set(phases)),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    plots.save_run(folder / "plots", topology, log.history)
    workdir.write_json(folder / "summary.json", summary)
    console.print(summary_table(summary))
    return summary


def _placement(config: ConfigDict) -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    """The lift, and how stacked and replicated arrays are put where it wants them."""
    if configs.lift_of(config) == "simulate":
        return nodes.simulate, jax.device_put, jax.device_put
    mesh = nodes.make_mesh(node=config.nodes)
    return (
        functools.partial(nodes.on_mesh, mesh=mesh),
        functools.partial(nodes.shard, mesh=mesh),
        functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec())),
    )


@dataclasses.dataclass(frozen=True)
class _Source:
    """The checkpoint that a run starts from."""

    folder: pathlib.Path
    step: int
    nodes: int


def _source(config: ConfigDict) -> _Source:
    """What config.restore names, once it is known to fit; nothing is written."""
    folder = pathlib.Path(config.restore)
    theirs = workdir.source_nodes(folder, config)
    found = (folder / "checkpoints").is_dir()
    latest = Checkpoints(folder, read_only=True).latest_step() if found else None
    if latest is None:
        raise configs.ConfigError(
            f"config.restore={folder} holds no checkpoint yet; let that run write one"
        )
    if latest >= config.steps:
        raise configs.ConfigError(
            f"config.restore={folder} is at step {latest} already; write config.steps above it"
        )
    return _Source(folder, latest, theirs)


def _adopted(
    config: ConfigDict,
    source: _Source,
    like: TrainState,
    place: Any,
    replicate: Any,
    console: Console,
) -> TrainState:
    """The state of another run, for as many nodes as this run has."""
    theirs = source.nodes
    checkpoints = Checkpoints(source.folder, read_only=True)
    state, _ = checkpoints.restore(source.step, with_nodes(like, theirs))
    checkpoints.close()
    how = "every node's own state"
    if theirs != config.nodes:
        state = resized(state, config.nodes)
        how = f"its {theirs} nodes' mean model and mean buffers, to all {config.nodes}"
    console.print(f"starting at step {source.step} from {source.folder}: {how}")
    return TrainState(replicate(state.step), place(state.params), place(state.opt_state))


def _finite(metrics: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    bad = np.flatnonzero(~np.isfinite(metrics["train/loss_nodes"]))
    if len(bad):
        raise TrainingDivergedError(
            f"the loss of node {', '.join(map(str, bad))} is not finite at step {step}; "
            "lower config.algorithm.learning_rate, or warm up for longer"
        )
    return metrics


class _Sigterm:
    """An event that SIGTERM sets, while inside; elsewhere than the main thread, it never does."""

    def __enter__(self) -> threading.Event:
        self._event = threading.Event()
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._before = signal.signal(signal.SIGTERM, self._set)
        return self._event

    def __exit__(self, *_: object) -> None:
        if self._in_main:
            signal.signal(signal.SIGTERM, self._before)

    def _set(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._event.set()


class _StepClock:
    """Steps a second, once each round is compiled; evaluations are left out.

    A run of no more steps than rounds is timed with its compilation.
    """

    def __init__(self, skip: int):
        self._skip = skip
        self._all = 0
        self._start = self._resumed = time.perf_counter()
        self._running = False
        self._counted = 0
        self._seconds = 0.0

    def step(self) -> None:
        self._all += 1
        if self._running:
            self._counted += 1
        elif self._all > self._skip:
            self._running, self._resumed = True, time.perf_counter()

    def pause(self) -> None:
        if self._running:
            self._seconds += time.perf_counter() - self._resumed
        self._running = False

    @property
    def steps_per_second(self) -> float:
        if self._counted:
            return self._counted / self._seconds
        return self._all / (time.perf_counter() - self._start)
