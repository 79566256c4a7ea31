"""Decentralized algorithms as optax transforms, and the allreduce baselines beside them.

Each is `name(gossip, learning_rate, **hyperparameters)`, and `update(grads, state, params, *,
phase=0)` runs on one node, under one of the two lifts. G is the gradient at X; γ the learning
rate; β momentum; W the mixing matrix of the phase.
"""

from collections.abc import Callable
from typing import Any

import optax

from jaxdec import registry
from jaxdec.algorithms.adam import (
    accumulated_adamw,
    decentralized_adamw,
    scale_by_accumulated_adam,
)
from jaxdec.algorithms.allreduce import allreduce
from jaxdec.algorithms.d2_dmsgd import d2_dmsgd
from jaxdec.algorithms.da_dmsgd import da_dmsgd
from jaxdec.algorithms.decentlam import decentlam
from jaxdec.algorithms.decentralize import awc_dmsgd, decentralize, dmsgd, dsgd
from jaxdec.algorithms.qg_dmsgd import qg_dmsgd
from jaxdec.algorithms.slowmo import slowmo
from jaxdec.gossip import Gossip

NAMES: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "accumulated_adamw": accumulated_adamw,
    "allreduce": allreduce,
    "awc_dmsgd": awc_dmsgd,
    "d2_dmsgd": d2_dmsgd,
    "da_dmsgd": da_dmsgd,
    "decentlam": decentlam,
    "decentralized_adamw": decentralized_adamw,
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


__all__ = [
    "NAMES",
    "accumulated_adamw",
    "allreduce",
    "awc_dmsgd",
    "by_name",
    "d2_dmsgd",
    "da_dmsgd",
    "decentlam",
    "decentralize",
    "decentralized_adamw",
    "dmsgd",
    "dsgd",
    "qg_dmsgd",
    "scale_by_accumulated_adam",
    "slowmo",
]
