"""The trainer: the loop around a run's step, and what it writes."""

import contextlib
import functools
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from jaxdec import algorithms, hosts, plots, restore, workdir
from jaxdec import config as configs
from jaxdec.checkpoint import Checkpoints
from jaxdec.metrics import RunLog, StepClock, Window, summary_table
from jaxdec.run import Metrics, Run, build
from jaxdec.session import Sigterm, Trace, wandb_board
from jaxdec.state import TrainState


class TrainingDivergedError(RuntimeError):
    """The loss or the gradient of a node is not finite."""


class TrainingInterruptedError(RuntimeError):
    """SIGTERM came, and the state was saved."""


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
    clock = StepClock(skip=run.first_steps)
    sent = _bytes_sent(run)
    board = None
    if config.wandb is not None and is_first:
        board = wandb_board(config.wandb, folder, config.to_dict())
    first = start + run.first_steps
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
        batch = run.placement.put_batch(next(batches))
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
    fields, params = run.config.algorithm, run.model.params
    sent = functools.partial(
        algorithms.bytes_sent,
        fields.name,
        run.gossip,
        params,
        compressor=fields.compressor,
        keep=fields.keep,
    )
    return float(np.mean([sent(phase) for phase in run.phases]))


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
