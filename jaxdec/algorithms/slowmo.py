"""SlowMo: decentralized momentum SGD with a slow outer momentum at exact means."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class SlowmoState(NamedTuple):
    """State of `slowmo`."""

    momentum: optax.Updates  # like params; of the base steps
    slow_momentum: optax.Updates  # like params; u
    anchor: optax.Params  # like params; x₀, the model at the last mean


def slowmo(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    slow_momentum: float = 0.5,
    slow_learning_rate: float = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SlowMo over DmSGD: m ← β m + G; X⁺ = W (X − γ m); and at every exact mean x̄ = X⁺

    u ← β_s u + (x₀ − x̄)/γ; x₀ ← x₀ − α γ u; X⁺ = x₀,

    with γ the learning rate of that step; at γ = 0 its limit: x₀ ← x₀ − α (x₀ − x̄), u as it was.
    Base momentum buffers stay local and are kept across means.

    Args:
      gossip: the averaging, over `topology.with_mean(topology, every=τ)`.
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1), of the base steps.
      slow_momentum: β_s in [0, 1).
      slow_learning_rate: α.
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Raises:
      ValueError: the topology takes no exact mean.

    Source: Wang et al., arXiv 1910.00643, algorithm 1.
    """  # noqa: D415 (the recursion has two lines)
    blocks.check_momentum(momentum=momentum, slow_momentum=slow_momentum)
    blocks.check_not_negative(slow_learning_rate=slow_learning_rate)
    if gossip.topology.mean_every is None:
        raise ValueError(
            f"slowmo needs exact means, and {gossip.topology.name} takes none; write "
            "topology.with_mean(topology, every=12), or topology.mean_every=12 in a config"
        )

    def init_fn(params: optax.Params) -> SlowmoState:
        zeros = blocks.zeros_like(params)
        return SlowmoState(zeros, zeros, jax.tree.map(jnp.array, params))

    def step_fn(
        updates: optax.Updates,
        state: SlowmoState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, SlowmoState]:
        fast = blocks.add(blocks.scale(momentum, state.momentum), updates)
        step = blocks.scale(-rate, fast)
        step = blocks.add(step, gossip(optax.apply_updates(params, step), phase, key))
        mean = optax.apply_updates(params, step)
        at_mean = (phase + 1) % gossip.topology.mean_every == 0

        def slow(u: jax.Array, anchor: jax.Array, x: jax.Array) -> jax.Array:
            moves, gamma = blocks.divisor(rate, u.dtype)
            return jnp.where(at_mean & moves, slow_momentum * u + (anchor - x) / gamma, u)

        def move(u: jax.Array, anchor: jax.Array, x: jax.Array) -> jax.Array:
            moves, gamma = blocks.divisor(rate, u.dtype)
            drift = jnp.where(moves, gamma * u, anchor - x)
            return jnp.where(at_mean, anchor - slow_learning_rate * drift, anchor)

        slow_momentum_ = jax.tree.map(slow, state.slow_momentum, state.anchor, mean)
        anchor = jax.tree.map(move, slow_momentum_, state.anchor, mean)
        step = jax.tree.map(
            lambda x, new, base: jnp.where(at_mean, new - x, base), params, anchor, step
        )
        return step, SlowmoState(fast, slow_momentum_, anchor)

    core = blocks.stepped("slowmo", init_fn, step_fn, learning_rate)
    return blocks.prepared(core, weight_decay, clip_norm)
