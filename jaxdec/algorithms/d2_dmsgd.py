"""D² with momentum: no bias from heterogeneous data, on static symmetric graphs."""

from typing import Any, NamedTuple

import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class D2DmsgdState(NamedTuple):
    """State of `d2_dmsgd`."""

    momentum: optax.Updates  # like params
    correction: optax.Updates  # like params; c = X − X₋ + γ₋ m₋


def d2_dmsgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """D² on momentum: m ← β m + G; X⁺ = W (2X − X₋ − (γ m − γ₋ m₋)), X₁ = W (X₀ − γ m).

    Held with one buffer: X⁺ = W (X − γ m + c); c ← X⁺ − X + γ m, so that under a schedule each m
    keeps the learning rate of its own step. Its limit is the optimum itself.

    Args:
      gossip: the averaging; W static, symmetric, doubly stochastic, λ_min > −1/3 (`lazy` helps).
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1).
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Source: Tang et al., arXiv 1803.07068, with m in place of G.
    """
    blocks.check_momentum(momentum=momentum)

    def init_fn(params: optax.Params) -> D2DmsgdState:
        zeros = blocks.zeros_like(params)
        return D2DmsgdState(zeros, zeros)

    def step_fn(
        updates: optax.Updates,
        state: D2DmsgdState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, D2DmsgdState]:
        new_momentum = blocks.add(blocks.scale(momentum, state.momentum), updates)
        descent = blocks.scale(rate, new_momentum)
        step = blocks.subtract(state.correction, descent)
        step = blocks.add(step, gossip(optax.apply_updates(params, step), phase, key))
        return step, D2DmsgdState(new_momentum, blocks.add(step, descent))

    core = blocks.stepped("d2_dmsgd", init_fn, step_fn, learning_rate)
    return blocks.prepared(core, weight_decay, clip_norm)
