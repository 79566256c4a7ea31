"""Quasi-global momentum: the momentum follows the models instead of the local gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class QgDmsgdState(NamedTuple):
    """State of `qg_dmsgd`."""

    momentum: optax.Updates  # like params; m̂


def qg_dmsgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    mu: float | None = None,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """QG-DmSGD: X⁺ = W (X − γ (G + β m̂)); m̂ ← μ m̂ + (1 − μ)(X − X⁺)/γ.

    A step with γ = 0 leaves m̂ as it is.

    Args:
      gossip: the averaging; W doubly stochastic, time-varying too.
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1).
      mu: μ in [0, 1); None: β.
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Source: Lin et al., arXiv 2102.04761.
    """
    mu_ = momentum if mu is None else mu
    blocks.check_momentum(momentum=momentum, mu=mu_)

    def init_fn(params: optax.Params) -> QgDmsgdState:
        return QgDmsgdState(blocks.zeros_like(params))

    def step_fn(
        updates: optax.Updates,
        state: QgDmsgdState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, QgDmsgdState]:
        direction = blocks.add(updates, blocks.scale(momentum, state.momentum))
        step = blocks.scale(-rate, direction)
        step = blocks.add(step, gossip(optax.apply_updates(params, step), phase, key))

        def follow(m: jax.Array, u: jax.Array) -> jax.Array:
            moves, gamma = blocks.divisor(rate, m.dtype)
            return jnp.where(moves, mu_ * m - (1 - mu_) * u / gamma, m)

        return step, QgDmsgdState(jax.tree.map(follow, state.momentum, step))

    core = blocks.stepped("qg_dmsgd", init_fn, step_fn, learning_rate)
    return blocks.prepared(core, weight_decay, clip_norm)
