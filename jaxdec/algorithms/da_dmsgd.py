"""Doubly averaged momentum SGD: the momentum is gossiped too."""

from typing import Any, NamedTuple

import jax
import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class DaDmsgdState(NamedTuple):
    """State of `da_dmsgd`."""

    momentum: optax.Updates  # like params


def da_dmsgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Doubly averaged momentum SGD: m ← W (β m + G); X⁺ = W (X − γ m). Two models on the wire.

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1).
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.
    """
    blocks.check_momentum(momentum=momentum)

    def init_fn(params: optax.Params) -> DaDmsgdState:
        return DaDmsgdState(blocks.zeros_like(params))

    def step_fn(
        updates: optax.Updates,
        state: DaDmsgdState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, DaDmsgdState]:
        first, second = (None, None) if key is None else jax.random.split(key)
        local = blocks.add(blocks.scale(momentum, state.momentum), updates)
        mixed = blocks.add(local, gossip(local, phase, first))
        step = blocks.scale(-rate, mixed)
        delta = gossip(optax.apply_updates(params, step), phase, second)
        return blocks.add(step, delta), DaDmsgdState(mixed)

    core = blocks.stepped("da_dmsgd", init_fn, step_fn, learning_rate)
    return blocks.prepared(core, weight_decay, clip_norm)
