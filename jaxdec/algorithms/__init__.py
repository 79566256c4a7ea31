"""Decentralized algorithms as optax transforms, and the allreduce baselines beside them.

Each is `name(gossip, learning_rate, **hyperparameters)`, and `update(grads, state, params, *,
phase=0, key=None)` runs on one node, under one of the two lifts. What draws at random (the wire
format "int8", some compressors) needs a key, the same on all nodes and another in every step. G is
the gradient at X; γ the learning rate; β momentum; W the mixing matrix of the phase.
"""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from jaxdec import registry, wire
from jaxdec.algorithms.adam import (
    accumulated_adamw,
    decentralized_adamw,
    scale_by_accumulated_adam,
)
from jaxdec.algorithms.allreduce import allreduce
from jaxdec.algorithms.choco import choco
from jaxdec.algorithms.d2_dmsgd import d2_dmsgd
from jaxdec.algorithms.da_dmsgd import da_dmsgd
from jaxdec.algorithms.decentlam import decentlam
from jaxdec.algorithms.decentralize import awc_dmsgd, decentralize, dmsgd, dsgd
from jaxdec.algorithms.deep_squeeze import deep_squeeze
from jaxdec.algorithms.qg_dmsgd import qg_dmsgd
from jaxdec.algorithms.slowmo import slowmo
from jaxdec.gossip import Gossip, all_reduce_bytes

NAMES: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "accumulated_adamw": accumulated_adamw,
    "allreduce": allreduce,
    "awc_dmsgd": awc_dmsgd,
    "choco": choco,
    "d2_dmsgd": d2_dmsgd,
    "da_dmsgd": da_dmsgd,
    "decentlam": decentlam,
    "decentralized_adamw": decentralized_adamw,
    "deep_squeeze": deep_squeeze,
    "dmsgd": dmsgd,
    "dsgd": dsgd,
    "qg_dmsgd": qg_dmsgd,
    "slowmo": slowmo,
}


def by_name(
    name: str, gossip: Gossip, learning_rate: optax.ScalarOrSchedule, **fields: Any
) -> optax.GradientTransformationExtraArgs:
    """The algorithm that a config names.

    Args:
      name: a key of `NAMES`.
      gossip: the averaging.
      learning_rate: γ, a number or an optax schedule.
      **fields: the algorithm's hyperparameters, those set to None left out.

    Raises:
      ValueError: an unknown name, a field that the name does not take, or a bad value.

    >>> import jaxdec
    >>> gossip = jaxdec.Gossip(jaxdec.topology.ring(4))
    >>> by_name("dmsgd", gossip, learning_rate=0.1, b1=0.9)
    Traceback (most recent call last):
    ValueError: algorithm.b1 is set, but algorithm 'dmsgd' does not take it; ...
    """
    given = {field: value for field, value in fields.items() if value is not None}
    factory = registry.lookup("algorithm", NAMES, name, given, given=2)
    return factory(gossip, learning_rate, **given)


def default_of(name: str, field: str) -> Any:
    """The default of a hyperparameter; None where the algorithm has none such.

    >>> default_of("decentlam", "momentum"), default_of("dsgd", "momentum")
    (0.9, None)
    """
    parameter = inspect.signature(NAMES[name]).parameters.get(field)
    return None if parameter is None else parameter.default


def bytes_sent(
    name: str,
    gossip: Gossip,
    params: Any,
    phase: int,
    *,
    compressor: str | None = None,
    keep: float | None = None,
) -> float:
    """Bytes that a node sends in a step, the mean over nodes.

    Args:
      name: a key of `NAMES`.
      gossip: the averaging.
      params: one node's parameters.
      phase: of the step.
      compressor: of the algorithms that take one.
      keep: likewise.

    >>> import jax.numpy as jnp, jaxdec
    >>> gossip = jaxdec.Gossip(jaxdec.topology.ring(8))
    >>> [bytes_sent(name, gossip, jnp.zeros(100), 0) for name in ("dmsgd", "da_dmsgd", "allreduce")]
    [800.0, 1600.0, 700.0]
    """
    if name == "allreduce":
        return all_reduce_bytes(params, gossip.topology.n)
    if name in ("choco", "deep_squeeze"):
        return gossip.bytes_sent(params, phase, wire.compressor(compressor, keep))
    return (2 if name == "da_dmsgd" else 1) * gossip.bytes_sent(params, phase)


__all__ = [
    "NAMES",
    "accumulated_adamw",
    "allreduce",
    "awc_dmsgd",
    "by_name",
    "bytes_sent",
    "choco",
    "d2_dmsgd",
    "da_dmsgd",
    "decentlam",
    "decentralize",
    "decentralized_adamw",
    "deep_squeeze",
    "default_of",
    "dmsgd",
    "dsgd",
    "qg_dmsgd",
    "scale_by_accumulated_adam",
    "slowmo",
]
