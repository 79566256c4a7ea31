"""The trainer: one node's step, written once, and the loop around it."""

import contextlib
import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict
from rich.console import Console

from jaxdec import algorithms, data, hosts, models, nodes, plots, restore, translate, workdir
from jaxdec import config as configs
from jaxdec.checkpoint import Checkpoints
from jaxdec.evaluate import Apply, Evaluation, token_scores
from jaxdec.gossip import Gossip
from jaxdec.metrics import RunLog, StepClock, Window, summary_table
from jaxdec.placement import Placement
from jaxdec.session import Sigterm, Trace, wandb_board
from jaxdec.state import AXES, TrainState
from jaxdec.topology import Topology

Metrics = dict[str, jax.Array]


class TrainingDivergedError(RuntimeError):
    """The loss or the gradient of a node is not finite."""


class TrainingInterruptedError(RuntimeError):
    """SIGTERM came, and the state was saved."""


def make_node_step(
    apply: Apply,
    tx: optax.GradientTransformationExtraArgs,
    *,
    label_smoothing: float = 0.0,
    accumulate: int = 1,
    seed: int | jax.Array = 0,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """One node's training step: (state, batch, phase=) → (state, metrics). Lift it with `nodes`.

    Args:
      apply: of `models.functional`.
      tx: the algorithm.
      label_smoothing: of the loss.
      accumulate: equal parts that a node's batch is taken in, one after another, to save memory.
      seed: of dropout.
    """

    def loss_fn(
        params: Any, statistics: Any, part: data.Batch, count: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        logits, statistics = apply(params, statistics, part["inputs"], key=key)
        loss, correct = token_scores(logits, part["labels"], label_smoothing)
        return loss / count, (correct / count, statistics)

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def node_step(
        state: TrainState, batch: data.Batch, *, phase: int
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        key = jax.random.fold_in(key, jax.lax.axis_index("node"))
        count = jnp.maximum(jnp.sum(batch["labels"] >= 0), 1).astype(jnp.float32)
        if accumulate == 1:
            (loss, (accuracy, statistics)), grads = gradient(
                state.params, state.statistics, batch, count, key
            )
        else:
            parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

            def body(carry: Any, part: Any) -> Any:
                sums, statistics = carry
                (loss, (accuracy, statistics)), grads = gradient(
                    state.params, statistics, part[0], count, part[1]
                )
                return (jax.tree.map(jnp.add, sums, (loss, accuracy, grads)), statistics), None

            zero = jnp.zeros_like(count)
            zeros = (zero, zero, jax.tree.map(jnp.zeros_like, state.params))
            ((loss, accuracy, grads), statistics), _ = jax.lax.scan(
                body, (zeros, state.statistics), (parts, jax.random.split(key, accumulate))
            )
        updates, opt_state = tx.update(grads, state.opt_state, state.params, phase=phase)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "train/loss_nodes": loss,
            "train/accuracy_nodes": accuracy,
            "train/gradient_norm_nodes": optax.tree.norm(grads),
        }
        return TrainState(state.step + 1, params, statistics, opt_state), metrics

    return node_step


@dataclasses.dataclass(frozen=True)
class Run:
    """What a config stands for, built; nothing is written or compiled yet."""

    config: ConfigDict
    dataset: data.Dataset
    parts: Sequence[np.ndarray]  # [nodes] indices of training examples
    topology: Topology
    gossip: Gossip
    tx: optax.GradientTransformationExtraArgs
    phases: tuple[int, ...]  # the static phase of each step of a period
    model: models.Functional
    placement: Placement

    def initial_state(self) -> TrainState:
        """The same model on every node, placed."""
        params, statistics = self.placement.spread((self.model.params, self.model.statistics))
        opt_state = self.placement.lift(self.tx.init, donate_argnums=())(params)
        step = self.placement.replicate(np.zeros([], np.int32))
        return TrainState(step, params, statistics, opt_state)

    def train_step(self) -> jax.stages.Wrapped:
        """The lifted step: (state, batch, phase=) → (state, metrics)."""
        step = make_node_step(
            self.model.apply,
            self.tx,
            label_smoothing=self.config.label_smoothing,
            accumulate=self.config.accumulate,
            seed=self.config.seed,
        )
        return self.placement.lift(step, in_axes=(AXES, 0), out_axes=(AXES, 0))

    def abstract_state(self) -> TrainState:
        """The shapes, dtypes and placement of `initial_state`; nothing is allocated."""
        params, statistics = self.placement.abstract((self.model.params, self.model.statistics))
        init = self.placement.lift(self.tx.init, donate_argnums=())
        opt_state = self.placement.abstract_stacked(jax.eval_shape(init, params))
        step: Any = jax.ShapeDtypeStruct((), np.int32, sharding=self.placement.replicated)
        return TrainState(step, params, statistics, opt_state)

    @property
    def batch_shapes(self) -> int:
        """How many shapes batches have: one, but for sentence pairs."""
        return self._all_batches.distinct_shapes

    def abstract_batch(self, shape: int = 0) -> data.Batch:
        """The shapes, dtypes and placement of a step's batch, of one of `batch_shapes`."""
        return self.placement.abstract(self._all_batches.abstract(shape))

    def lower(self, phase: int, shape: int = 0) -> jax.stages.Lowered:
        """The training step of a phase for the placement's devices, traced and not compiled.

        Its batch has one of `batch_shapes`; those of sentence pairs are sorted by length.

        For other devices, which need not be here:
        `dataclasses.replace(run, placement=Placement(nodes, mesh)).lower(phase)`.
        """
        batch = self.abstract_batch(shape)
        return self.train_step().lower(self.abstract_state(), batch, phase=phase)

    def batches(self, start: int = 0) -> Iterator[data.Batch]:
        """The batches of this process's nodes, from step `start` on."""
        return data.prefetched(self._node_batches(self.placement.own), start)

    def evaluation(self) -> Evaluation:
        """The evaluation on the test split, with batch statistics as the config says."""
        pooled = (
            jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._all_batches[step])
            for step in range(self.config.recalibrate_batches)
        )
        test, most = self.dataset.test, self.config.eval_examples
        return Evaluation(
            self.model.apply,
            self.placement,
            test if most is None else data.EvenlySpaced(test, most),
            self.config.eval_batch,
            pooled if jax.tree.leaves(self.model.statistics) else (),
        )

    @property
    def executables(self) -> int:
        """Compiled steps: one for each distinct round, and shape of a batch."""
        return len(set(self.phases)) * self.batch_shapes

    def final_scores(self, evaluation: Evaluation, state: TrainState) -> dict[str, Any]:
        """What takes too long to be scored along the way: BLEU of the mean model's translations."""
        if not isinstance(self.dataset, data.Translation):
            return {}
        model: Any = nnx.eval_shape(lambda: configs.make_model(self.config, self.dataset))
        mean, _ = evaluation.mean_model(state.params, state.statistics)
        return {"eval/bleu": translate.evaluate(self.dataset, translate.searcher(model), mean)}

    @functools.cached_property
    def _all_batches(self) -> data.Batches:
        return self._node_batches(None)

    def _node_batches(self, of_nodes: Sequence[int] | None) -> data.Batches:
        return configs.make_batches(self.config, self.dataset, self.parts, of_nodes)


def build(config: ConfigDict, *, abstract: bool = False) -> Run:
    """Validate a config and build what it stands for.

    Args:
      config: a complete config.
      abstract: neither read the data set nor allocate the model: shapes and sizes stand for them,
        and all the run can do is `lower`.

    Raises:
      ConfigError: it cannot run.
    """
    configs.validate(config, abstract=abstract)
    dataset = configs.make_dataset(config, abstract=abstract)
    topology = configs.make_topology(config)
    gossip = configs.make_gossip(config, topology)
    is_mesh = configs.lift_of(config) == "mesh"
    return Run(
        config=config,
        dataset=dataset,
        parts=configs.make_partition(config, dataset),
        topology=topology,
        gossip=gossip,
        tx=configs.make_algorithm(config, gossip),
        phases=configs.phases(config, topology),
        model=models.functional(configs.make_model(config, dataset, abstract=abstract)),
        placement=Placement(config.nodes, nodes.make_mesh(node=config.nodes) if is_mesh else None),
    )


def evaluate_checkpoint(config: ConfigDict, folder: str | pathlib.Path) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run, of this model and algorithm; writes nothing.

    Returns:
      "step" and the scores, as `Evaluation` gives them.

    Raises:
      ConfigError: no such run is there, or it has no checkpoint or another number of nodes.
      CheckpointError: the checkpoint cannot be read.
    """
    folder = pathlib.Path(folder)
    run = build(config)
    theirs = workdir.source_nodes(folder, config, field="--workdir")
    if theirs != config.nodes:
        raise configs.ConfigError(f"--workdir={folder} is a run of config.nodes={theirs}; write it")
    checkpoints, step = restore.newest(folder, f"--workdir={folder}")
    state, _ = checkpoints.restore(step, run.initial_state())
    evaluation = run.evaluation()
    scores = evaluation(state.params, state.statistics) | run.final_scores(evaluation, state)
    return {"step": step} | {name: np.asarray(v).tolist() for name, v in scores.items()}


def train_and_evaluate(config: ConfigDict, folder: str | pathlib.Path) -> dict[str, Any]:
    """Run a config and write its outputs; with config.mode "evaluate", `evaluate_checkpoint`.

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
      TrainingDivergedError: a loss or gradient is not finite; the checkpoints before it are kept.
      TrainingInterruptedError: SIGTERM came; the same call continues the run.
    """
    is_first = jax.process_index() == 0
    console = Console(quiet=not is_first)
    folder = pathlib.Path(folder)
    if config.mode == "evaluate":
        scores = evaluate_checkpoint(config, folder)
        console.print(summary_table(scores))
        return scores
    run = build(config)
    source = None if config.restore is None else restore.find(config)
    finished = hosts.on_first(lambda: workdir.claim(folder, config), configs.ConfigError)
    workdir.check_shared(folder)
    if finished is not None:
        console.print(f"{folder} holds this run, finished; nothing to do")
        console.print(summary_table(finished))
        return finished
    params = run.model.params
    console.print(
        f"{config.algorithm.name} on {run.topology.name}: {config.nodes} nodes, lift "
        f"{configs.lift_of(config)}, {run.executables} executables, "
        f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters a node → {folder}"
    )

    state = run.initial_state()
    checkpoints = Checkpoints(folder)
    entries: list[dict[str, list[float]]] = []
    if (latest := checkpoints.latest_step()) is not None:
        state, entries = checkpoints.restore(latest, state)
        console.print(f"continuing from the checkpoint of step {latest}")
    elif source is not None:
        state, how = restore.adopt(source, state, run.placement, config.restore_rule)
        console.print(f"starting at step {source.step} from {source.folder}: {how}")
    start = int(state.step)
    window = Window(run.placement, entries)
    clock = StepClock(skip=len(run.phases))
    sent = _bytes_sent(run)
    board = None
    if config.wandb is not None and is_first:
        board = wandb_board(config.wandb, folder, config.to_dict())
    first = start + run.executables
    with (
        Sigterm() as terminated,
        contextlib.closing(checkpoints),
        Trace(folder / "profile", first, config.profile_steps) as trace,
        RunLog(folder, config.steps, console, start, board, quiet=not is_first) as log,
    ):
        for step in _loop(run, state, start, checkpoints, window, clock, log, sent, terminated):
            hosts.taken(step)
            trace.step(step)
        evaluated = log.last_evaluation()
    summary = {
        "algorithm": config.algorithm.name,
        "topology": config.topology.name,
        "nodes": config.nodes,
        "lift": configs.lift_of(config),
        "steps": config.steps,
        "seed": config.seed,
        "steps_per_second": clock.steps_per_second,
        "examples_per_second": clock.steps_per_second * config.batch_size,
        **evaluated,
        "bytes_sent_per_node_per_step": sent,
        "executables": run.executables,
        "processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    if is_first:
        plots.save_run(folder / "plots", run.topology, log.history)
        workdir.write_json(folder / "summary.json", summary)
    console.print(summary_table(summary))
    return summary


def _loop(
    run: Run,
    state: TrainState,
    start: int,
    checkpoints: Checkpoints,
    window: Window,
    clock: StepClock,
    log: RunLog,
    sent: float,
    terminated: threading.Event,
) -> Iterator[int]:
    """Trains; yields the steps taken, after each."""
    config = run.config
    train_step, evaluation = run.train_step(), run.evaluation()
    batches = run.batches(start)
    pending: Metrics | None = None
    for step in range(start, config.steps):
        batch = run.placement.put_own(next(batches))
        state, metrics = train_step(state, batch, phase=run.phases[step % len(run.phases)])
        # The metrics of step k − 1 are fetched once step k is dispatched: the device never
        # waits for the host, and the host is never far ahead.
        if pending is not None:
            window.add(pending)
        pending = metrics
        clock.step()
        log.advance()
        taken = step + 1
        ends = taken == config.steps
        logs = ends or taken % config.log_every == 0
        evaluates = ends or taken % config.eval_every == 0
        # Several processes agree to stop where they meet anyway.
        stops = hosts.any_of(terminated.is_set()) if logs or jax.process_count() == 1 else False
        saves = ends or stops or taken % config.checkpoint_every == 0
        yield taken
        if not (logs or evaluates or saves):
            continue
        window.add(pending)
        pending = None
        clock.pause()
        entries = _finite(window.entries(), taken)
        if logs:
            log.training(taken, entries, clock.lap() * config.batch_size)
            window.clear()
        if evaluates:
            scores = evaluation(state.params, state.statistics)
            if ends:
                scores |= run.final_scores(evaluation, state)
            log.evaluation(taken, scores | {"bytes_sent_per_node": sent * taken})
        if saves:
            checkpoints.save(taken, state, window.entries())
        if stops:
            raise TrainingInterruptedError(
                f"SIGTERM at step {taken}; the state is saved, and the same command continues"
            )


def _bytes_sent(run: Run) -> float:
    """Bytes that a node sends in a step, the mean over nodes and a period."""
    name, params = run.config.algorithm.name, run.model.params
    return float(
        np.mean([algorithms.bytes_sent(name, run.gossip, params, phase) for phase in run.phases])
    )


def _finite(entries: list[dict[str, list[float]]], taken: int) -> list[dict[str, list[float]]]:
    """The metrics of the newest of `taken` steps, all of them finite."""
    for step, entry in enumerate(entries, taken - len(entries) + 1):
        for what in ("loss", "gradient_norm"):
            bad = np.flatnonzero(~np.isfinite(entry[f"train/{what}_nodes"]))
            if len(bad):
                raise TrainingDivergedError(
                    f"the {what.replace('_', ' ')} of node {', '.join(map(str, bad))} is not "
                    f"finite at step {step}; lower config.algorithm.learning_rate, or warm up for "
                    "longer; the checkpoints before it are kept"
                )
    return entries
