"""Doubly averaged momentum SGD: the momentum is gossiped too."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class DaDmsgdState(NamedTuple):
    """State of `da_dmsgd`."""

    steps: jax.Array  # int32 []; steps taken
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
        return DaDmsgdState(jnp.zeros([], jnp.int32), blocks.zeros_like(params))

    def update_fn(
        updates: optax.Updates,
        state: DaDmsgdState,
        params: optax.Params | None = None,
        *,
        phase: Any = 0,
        **extra: Any,
    ) -> tuple[optax.Updates, DaDmsgdState]:
        del extra
        blocks.need_params("da_dmsgd", params)
        rate = blocks.scheduled(learning_rate, state.steps)
        local = blocks.add(blocks.scale(momentum, state.momentum), updates)
        mixed = blocks.add(local, gossip(local, phase))
        step = blocks.scale(-rate, mixed)
        delta = gossip(optax.apply_updates(params, step), phase)
        count = optax.safe_increment(state.steps)
        return blocks.add(step, delta), DaDmsgdState(count, mixed)

    core = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return blocks.prepared(core, weight_decay, clip_norm)
