"""What a config means: its topology, gossip, algorithm and schedule; and every rule across fields.

All errors are `ConfigError`: they name the field, the value, and what to write instead.
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from ml_collections import ConfigDict

from jaxdec import algorithms, analysis, compiler, data, models, registry
from jaxdec import topology as topologies
from jaxdec.gossip import Gossip
from jaxdec.topology import Topology

MODES = ("train", "evaluate")
MESH_AXES = ("node", "local", "data")
LIFTS = ("auto", "simulate", "mesh")
SCHEDULES = ("constant", "cosine", "inverse_sqrt", "steps")
RESTORE_RULES = ("mean", "nearest")
SLOWMO_MEAN_EVERY = 12


class ConfigError(ValueError):
    """A config that cannot run; the message names the field, the value and the remedy."""


@contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config: {error}") from error


@contextmanager
def _complete() -> Iterator[None]:
    """Names a field that the code inside reads and the config lacks."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        missing = error.args[0] if isinstance(error, AttributeError) else error
        if not isinstance(missing, KeyError):
            raise
        raise ConfigError(
            f"config lacks the field {missing}; start from configs/default.py, which has every "
            "field, and override them one by one"
        ) from error


def make_topology(config: ConfigDict) -> Topology:
    """The topology of a run, its exact means included."""
    fields = config.topology.to_dict()
    name = fields.pop("name")
    if fields["mean_every"] is None and config.algorithm.name == "slowmo":
        fields["mean_every"] = SLOWMO_MEAN_EVERY
    elif fields["mean_every"] is not None and fields["mean_every"] > config.steps:
        raise ConfigError(
            f"config.topology.mean_every={fields['mean_every']} is never reached in config.steps="
            f"{config.steps}; write at most that, or None for no exact means"
        )
    with _as_config_error():
        return topologies.by_name(name, config.nodes, **fields)


def make_gossip(config: ConfigDict, topology: Topology, platform: str = "cpu") -> Gossip:
    """The gossip of a run over a topology: by host, where a mesh has several replicas a host.

    Args:
      config: of the run.
      topology: of the run.
      platform: of a mesh's devices, which decides in how many buckets a model travels there.
    """
    is_mesh = lift_of(config) == "mesh"
    by_host = is_mesh and mesh_sizes(config)["local"] > 1
    with _as_config_error():
        return Gossip(
            topology,
            wire_dtype=config.wire_dtype,
            local_axis="local" if by_host else None,
            buckets=compiler.BUCKETS.get(platform, 0) if is_mesh else 0,
        )


def make_schedule(config: ConfigDict, peak: float | None = None) -> optax.Schedule:
    """The learning rate by step t: a linear warm-up from zero to γ, and then by name.

    "constant": γ; "cosine": along half a cosine to `end` · γ; "inverse_sqrt": γ √(warmup/t);
    "steps": a tenth of what it was, from each of `boundaries` on.

    Args:
      config: of the run.
      peak: γ; None: config.algorithm.learning_rate.
    """
    fields = config.schedule
    peak = config.algorithm.learning_rate if peak is None else peak
    warmup = fields.warmup_steps
    after: optax.Schedule
    match fields.name:
        case "cosine":
            after = optax.cosine_decay_schedule(peak, config.steps - warmup, fields.end)
        case "inverse_sqrt":
            after = functools.partial(_inverse_sqrt, peak, warmup)
        case "steps":
            drops = {boundary - warmup: 0.1 for boundary in fields.boundaries}
            after = optax.piecewise_constant_schedule(peak, drops)
        case _:
            after = optax.constant_schedule(peak)
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _inverse_sqrt(peak: float, warmup: int, count: Any) -> Any:
    return peak * jnp.sqrt(warmup / jnp.maximum(count + warmup, warmup))


def make_algorithm(
    config: ConfigDict, gossip: Gossip, schedule: optax.Schedule | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run, at its own schedule or another."""
    fields = config.algorithm.to_dict()
    name = fields.pop("name")
    del fields["learning_rate"]
    schedule = make_schedule(config) if schedule is None else schedule
    with _as_config_error():
        return algorithms.by_name(name, gossip, learning_rate=schedule, **fields)


# Validation opens a set, and so does the run right after it.
_load = functools.lru_cache(maxsize=2)(data.load)


def make_dataset(config: ConfigDict, *, abstract: bool = False) -> data.Dataset:
    """The data set of a run; abstract: its shapes and sizes, see `data.outline`."""
    fields = config.data.to_dict()
    name, folder = fields.pop("name"), fields.pop("data_dir")
    del fields["partition"], fields["alpha"]
    given = {field: value for field, value in fields.items() if value is not None}
    with _as_config_error():
        return data.outline(name, **given) if abstract else _load(name, folder, **given)


def make_model(config: ConfigDict, dataset: data.Dataset, *, abstract: bool = False) -> nnx.Module:
    """The freshly initialized model of a run; abstract: shapes in place of its arrays."""
    fields = config.model.to_dict()
    name = fields.pop("name")

    def initialized() -> nnx.Module:
        rngs = nnx.Rngs(config.seed)
        return models.by_name(name, dataset.input_shape, dataset.classes, rngs=rngs, **fields)

    with _as_config_error():
        return nnx.eval_shape(initialized) if abstract else initialized()


def make_partition(config: ConfigDict, dataset: data.Dataset) -> Any:
    """The training examples of each node: [nodes] index arrays."""
    with _as_config_error():
        return data.split(
            config.data.partition,
            dataset.train.groups,
            config.nodes,
            config.seed,
            alpha=config.data.alpha,
        )


def make_batches(
    config: ConfigDict, dataset: Any, parts: Any, nodes: Sequence[int] | None = None
) -> data.Batches:
    """The training batches of some nodes; None: of all."""
    batch_size = config.batch_size // config.nodes
    shares = config.accumulate * mesh_sizes(config)["data"]
    with _as_config_error():
        return dataset.batches(parts, batch_size, config.seed, config.steps, nodes, shares)


def batch_shapes(config: ConfigDict, *, abstract: bool = False) -> int:
    """How many shapes the training batches of a run have."""
    dataset = make_dataset(config, abstract=abstract)
    return make_batches(config, dataset, make_partition(config, dataset)).distinct_shapes


def lift_of(config: ConfigDict) -> str:
    """Either "mesh", where there are devices enough for one node each, or "simulate".

    Several processes are always a mesh.
    """
    if config.lift != "auto":
        return config.lift
    if jax.process_count() > 1:
        return "mesh"
    needed = math.prod(mesh_sizes(config).values())
    return "mesh" if 1 < needed <= jax.device_count() else "simulate"


def mesh_sizes(config: ConfigDict) -> dict[str, int]:
    """How many devices a mesh has along each axis: "node", "local" and "data".

    Raises:
      ConfigError: an unknown axis, a size below 1, or replicas that are not config.nodes.
    """
    given = {axis: size for axis, size in config.mesh.items() if size is not None}
    for axis, size in given.items():
        if axis not in MESH_AXES:
            raise ConfigError(
                f"config.mesh.{axis}={size} is no axis; {registry.suggestion(axis, MESH_AXES)}"
            )
        if size < 1:
            raise ConfigError(f"config.mesh.{axis}={size} must be at least 1")
    local = given.get("local", 1)
    node = given.get("node", config.nodes // local)
    if node * local != config.nodes:
        raise ConfigError(
            f"config.mesh has node={node} × local={local} replicas, and config.nodes="
            f"{config.nodes}; write config.nodes={node * local}, or a local that divides it"
        )
    return {"node": node, "local": local, "data": given.get("data", 1)}


def compiler_options(config: ConfigDict, platform: str) -> compiler.Options:
    """XLA's options for a mesh of a platform's devices, the config's own included."""
    with _as_config_error():
        return compiler.options(platform, config.compiler_options)


def phases(config: ConfigDict, topology: Topology) -> tuple[int, ...]:
    """The static phase of each step of a period: one executable for each that differs."""
    if config.algorithm.name == "allreduce":
        return (0,)
    return tuple(topology.phase(step) for step in range(topology.period))


@_complete()
def validate(
    config: ConfigDict, *, abstract: bool = False, devices: Sequence[jax.Device] | None = None
) -> None:
    """Check every rule before anything is compiled or written.

    Args:
      config: a complete config.
      abstract: leave out that its data set is there and whole.
      devices: that a mesh may have; None: all of JAX's.

    Raises:
      ConfigError: the first rule that does not hold.
    """
    for field in (
        "nodes",
        "steps",
        "batch_size",
        "log_every",
        "eval_every",
        "eval_batch",
        "checkpoint_every",
        "accumulate",
        "max_executables",
    ):
        if config[field] < 1:
            raise ConfigError(f"config.{field}={config[field]} must be at least 1")
    for field in ("seed", "recalibrate_batches", "profile_steps"):
        if config[field] < 0:
            raise ConfigError(f"config.{field}={config[field]} must be 0 or more")
    if config.eval_examples is not None and config.eval_examples < 1:
        raise ConfigError(
            f"config.eval_examples={config.eval_examples} must be at least 1, or None for all"
        )
    topology = make_topology(config)
    sizes = mesh_sizes(config)
    if sizes["local"] > 1 and (topology.outer is None or topology.local != sizes["local"]):
        raise ConfigError(
            f"config.mesh.local={sizes['local']} needs a graph between hosts of as many replicas, "
            f"and {topology.name} is not; write config.topology.name='hierarchical' or "
            f"'alternating_exponential_ring', with config.topology.local={sizes['local']}"
        )
    parts = config.nodes * config.accumulate * sizes["data"]
    if config.batch_size % parts:
        over = f"config.nodes={config.nodes}"
        over += f" × config.accumulate={config.accumulate}" if config.accumulate > 1 else ""
        over += f" × config.mesh.data={sizes['data']}" if sizes["data"] > 1 else ""
        nearest = max(1, round(config.batch_size / parts)) * parts
        raise ConfigError(
            f"config.batch_size={config.batch_size} does not divide over {over}; write a "
            f"multiple, such as {nearest}"
        )
    for field, value, choices in (
        ("mode", config.mode, MODES),
        ("lift", config.lift, LIFTS),
        ("schedule.name", config.schedule.name, SCHEDULES),
        ("data.name", config.data.name, data.NAMES),
        ("restore_rule", config.restore_rule, RESTORE_RULES),
    ):
        if value not in choices:
            raise ConfigError(
                f"config.{field}={value!r} is unknown; {registry.suggestion(value, choices)}"
            )
    if not 0 <= config.schedule.warmup_steps < config.steps:
        raise ConfigError(
            f"config.schedule.warmup_steps={config.schedule.warmup_steps} must be in "
            f"[0, config.steps) = [0, {config.steps})"
        )
    if config.schedule.name == "inverse_sqrt" and config.schedule.warmup_steps == 0:
        raise ConfigError(
            "config.schedule.name='inverse_sqrt' falls from the end of the warm-up; write "
            "config.schedule.warmup_steps above 0"
        )
    if not 0 <= config.schedule.end <= 1:
        raise ConfigError(f"config.schedule.end={config.schedule.end} must be in [0, 1]")
    boundaries = tuple(config.schedule.boundaries)
    bounds = (config.schedule.warmup_steps, *boundaries, config.steps)
    if any(left >= right for left, right in itertools.pairwise(bounds)):
        raise ConfigError(
            f"config.schedule.boundaries={boundaries} must rise between config.schedule."
            f"warmup_steps={bounds[0]} and config.steps={config.steps}"
        )
    if not 0 <= config.algorithm.learning_rate < float("inf"):
        raise ConfigError(
            f"config.algorithm.learning_rate={config.algorithm.learning_rate} must be 0 or more, "
            "and finite"
        )
    if not 0 <= config.label_smoothing < 1:
        raise ConfigError(f"config.label_smoothing={config.label_smoothing} must be in [0, 1)")
    count = jax.device_count() if devices is None else len(devices)
    needed = math.prod(sizes.values())
    if config.lift == "mesh" and needed > count:
        each = f" × config.mesh.data={sizes['data']}" if sizes["data"] > 1 else ""
        raise ConfigError(
            f"config.lift='mesh' puts config.nodes={config.nodes}{each} on as many devices, and "
            f"{count} are here; write config.lift='simulate', or on CPU set "
            f"JAX_NUM_CPU_DEVICES={needed}"
        )
    if jax.process_count() > 1:
        _check_processes(config)
    compiler_options(config, platform="")
    if not config.watchdog_seconds > 0:
        raise ConfigError(f"config.watchdog_seconds={config.watchdog_seconds} must be above 0")
    make_algorithm(config, make_gossip(config, topology))
    shapes = batch_shapes(config, abstract=abstract)
    rounds = len(set(phases(config, topology)))
    if rounds * shapes > config.max_executables:
        batches = f", times {shapes} shapes of batches" if shapes > 1 else ""
        raise ConfigError(
            f"{topology.name} has {rounds} distinct rounds{batches}, and each compiles a step: "
            f"more than config.max_executables={config.max_executables}; shorten its period, or "
            f"write config.max_executables={rounds * shapes}"
        )
    _check_stability(config, topology)  # of many nodes it takes a while, so last


def _check_processes(config: ConfigDict) -> None:
    if config.lift == "simulate":
        raise ConfigError(
            f"config.lift='simulate' is one process's, and this run has {jax.process_count()}; "
            "write config.lift='mesh', or start one process"
        )
    each = collections.Counter(device.process_index for device in jax.devices())
    if len(set(each.values())) > 1:
        raise ConfigError(
            f"the {len(each)} processes have {', '.join(str(each[i]) for i in sorted(each))} "
            "devices; give each as many as the others, by CUDA_VISIBLE_DEVICES, or on CPU "
            "JAX_NUM_CPU_DEVICES"
        )
    data = mesh_sizes(config)["data"]
    if each[0] % data:
        raise ConfigError(
            f"config.mesh.data={data} devices share a replica, and a process has {each[0]}; write "
            "a divisor of these"
        )
    if config.nodes * data != jax.device_count():
        raise ConfigError(
            f"config.nodes={config.nodes} is one a device, and {len(each)} processes have "
            f"{each[0]} devices each; write config.nodes={jax.device_count() // data}"
        )


def _check_stability(config: ConfigDict, topology: Topology) -> None:
    if config.allow_unstable:
        return
    algorithm = config.algorithm
    try:
        analysis.check(
            algorithm.name,
            topology,
            algorithm.momentum,
            mu=algorithm.mu,
            nesterov=bool(algorithm.nesterov),
        )
    except ValueError as error:
        raise ConfigError(
            f"config: {error}; or config.allow_unstable=True to run it all the same"
        ) from error


def differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields in which two nested configs differ, as "field: ours against theirs".

    >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    ['b.c: 2 against 3']
    """
    found = []
    for key in sorted(ours.keys() | theirs.keys()):
        left, right = ours.get(key), theirs.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(f"{prefix}{key}: {left} against {right}")
    return found
