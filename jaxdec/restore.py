"""A run's start from another run's checkpoint, with as many nodes as it has itself."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxdec import nodes, workdir
from jaxdec.checkpoint import Checkpoints
from jaxdec.config import ConfigError, differences
from jaxdec.placement import Placement
from jaxdec.state import TrainState

# How nodes of another number start.
RULES = ("mean", "nearest")


@dataclasses.dataclass(frozen=True)
class Source:
    """The checkpoint that a run starts from."""

    folder: pathlib.Path
    step: int
    nodes: int


def find(config: ConfigDict) -> Source:
    """What config.restore names, once it is known to fit. Nothing is written.

    Raises:
      ConfigError: no run is there, one of another model or algorithm, one without checkpoints, or
        one that is past config.steps; or a state that the graph of this run does not continue.
    """
    folder = pathlib.Path(config.restore)
    theirs = workdir.source_nodes(folder, config)
    if config.algorithm.name == "choco":
        _check_choco(config, folder, theirs)
    _, latest = newest(folder, f"config.restore={folder}")
    if latest >= config.steps:
        raise ConfigError(
            f"config.restore={folder} is at step {latest} already; write config.steps above it"
        )
    return Source(folder, latest, theirs)


def _check_choco(config: ConfigDict, folder: pathlib.Path, theirs: int) -> None:
    """Refuse what would leave (W − I) x̂ that of another W for good."""
    if theirs != config.nodes:
        if config.restore_rule != "mean":
            raise ConfigError(
                f"config.restore_rule={config.restore_rule!r} does not fit choco, whose nodes keep "
                "sums over their neighbours; write config.restore_rule='mean'"
            )
        return
    source = workdir.read_config(folder, f"config.restore={folder}")["topology"]
    found = differences(source, json.loads(config.to_json())["topology"], "config.topology.")
    if found:
        raise ConfigError(
            f"config.restore={folder} has another graph, {'; '.join(found)}, and choco's nodes "
            "keep sums over their neighbours; make them equal"
        )


def newest(folder: pathlib.Path, named: str) -> tuple[Checkpoints, int]:
    """The checkpoints of the run in a folder, read-only, and the step of the newest.

    Raises:
      ConfigError: there is none; the message calls the folder `named`.
    """
    if (folder / "checkpoints").is_dir():
        checkpoints = Checkpoints(folder, read_only=True)
        if (latest := checkpoints.latest_step()) is not None:
            return checkpoints, latest
    raise ConfigError(f"{named} holds no checkpoint yet; let that run write one")


def adopt(
    source: Source, like: TrainState, placement: Placement, rule: str
) -> tuple[TrainState, str]:
    """The state of a source, for the nodes of `placement`.

    Args:
      source: from `find`.
      like: a state of this run, for shapes and dtypes.
      placement: of this run's nodes.
      rule: for another number of nodes: "mean", its mean model and mean buffers to all; or
        "nearest", to node i of n that of node ⌊i · m/n⌋ of its m.

    Returns:
      The state, and in words what was done.
    """
    checkpoints = Checkpoints(source.folder, read_only=True)
    if source.nodes == placement.n:
        state, _ = checkpoints.restore(source.step, like)
        how = "every node's own state"
    else:
        state, _ = checkpoints.restore(source.step, _of_nodes(like, source.nodes))
        state = resized(state, placement.n, rule)
        how = (
            f"its {source.nodes} nodes' mean model and mean buffers, to all {placement.n}"
            if rule == "mean"
            else f"each of {placement.n} nodes from the nearest of its {source.nodes}"
        )
        stacked = placement.put((state.params, state.statistics, state.opt_state))
        state = TrainState(placement.replicate(state.step), *stacked)
    checkpoints.close()
    return state, how


def resized(state: TrainState, n: int, rule: str = "mean") -> TrainState:
    """The state for another number of nodes.

    Counters, which are equal on all nodes, are taken as they are.

    >>> one = jnp.zeros((2, 0))
    >>> state = TrainState(jnp.int32(3), jnp.array([[1.0], [3.0]]), one, jnp.array([7, 7]))
    >>> resized(state, 3).params.tolist(), resized(state, 3).opt_state.tolist()
    ([[2.0], [2.0], [2.0]], [7, 7, 7])
    >>> resized(state, 4, "nearest").params.tolist()
    [[1.0], [1.0], [3.0], [3.0]]
    """

    def leaf(x: jax.Array) -> jax.Array:
        if rule == "nearest":
            return x[np.arange(n) * len(x) // n]
        one = nodes.mean(x) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
        return nodes.stack(one, n)

    return _map_stacked(leaf, state)


def _of_nodes(state: TrainState, n: int) -> TrainState:
    """Shapes and dtypes of the state of another number of nodes, on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def leaf(x: jax.Array) -> Any:
        return jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype, sharding=here)

    state = _map_stacked(leaf, state)
    step: Any = jax.ShapeDtypeStruct((), state.step.dtype, sharding=here)
    return dataclasses.replace(state, step=step)


def _map_stacked(leaf: Any, state: TrainState) -> TrainState:
    stacked = (state.params, state.statistics, state.opt_state)
    return TrainState(state.step, *jax.tree.map(leaf, stacked))
