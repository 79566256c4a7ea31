"""DecentLaM: momentum SGD without the bias that momentum adds at large batches."""

from typing import Any, NamedTuple

import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class DecentlamState(NamedTuple):
    """State of `decentlam`."""

    velocity: optax.Updates  # like params; v = γ m


def decentlam(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    nesterov: bool = False,
    lars: bool = False,
    order: blocks.Order = "atc",
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DecentLaM: v ← β v + X − W (X − γ G); X⁺ = X − v.

    At constant γ this is X⁺ = W (X − γ G) + β (X − X₋), heavy ball outside W, whose limit is that
    of ATC-DSGD at γ, whatever β. Not every W is stable at every β: see `analysis.check`.

    With order="awc", v ← β v + X − W X + γ G: gossip does not wait for the gradient, and overlaps
    with it. At a fixed point v = 0, so (I − W) X = −γ G: the limit is that of CTA-DSGD at γ,
    whatever β. An eigenvalue t of W acts as t − γ h on a mode of curvature h, where "atc" has
    t (1 − γ h): a graph near the edge of stability takes a smaller γ.

    Args:
      gossip: the averaging; W symmetric, best positive definite.
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1).
      nesterov: X⁺ = X − (β v + X − W (X − γ G)) with the new v.
      lars: scale each leaf's G (decay included) by 0.001 ‖X‖/‖G‖.
      order: "atc", the paper's, or "awc".
      weight_decay: λ; G ← G + λ X, before gossip.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Raises:
      ValueError: an unknown order, or a momentum outside [0, 1).

    Source: Yuan et al., arXiv 2104.11981, algorithm 2.
    Differs from it under a schedule: v = γ m is stored instead of m, so that no step divides by
    γ; a warm-up may start at zero, and a falling γ does not shrink what v holds. "awc" is ours.

    >>> import jax, jax.numpy as jnp, jaxdec, optax
    >>> tx = decentlam(jaxdec.Gossip(jaxdec.topology.complete(2)), learning_rate=0.5)
    >>> def step(x):
    ...     updates, _ = tx.update(2 * x, tx.init(x), x, phase=0)
    ...     return optax.apply_updates(x, updates)
    >>> jax.vmap(step, axis_name="node")(jnp.array([1.0, 3.0]))
    Array([0., 0.], dtype=float32)
    """
    blocks.check_momentum(momentum=momentum)
    blocks.check_order(order)

    def init_fn(params: optax.Params) -> DecentlamState:
        return DecentlamState(blocks.zeros_like(params))

    def step_fn(
        updates: optax.Updates,
        state: DecentlamState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, DecentlamState]:
        step = blocks.scale(-rate, updates)
        sent = optax.apply_updates(params, step) if order == "atc" else params
        step = blocks.add(step, gossip(sent, phase, key))
        # step = W (X − γ G) − X, or W X − γ G − X; the update −v is its heavy ball.
        velocity = blocks.subtract(blocks.scale(momentum, state.velocity), step)
        moved = blocks.scale(-1.0, velocity)
        if nesterov:
            moved = blocks.subtract(step, blocks.scale(momentum, velocity))
        return moved, DecentlamState(velocity)

    core = blocks.stepped("decentlam", init_fn, step_fn, learning_rate)
    if lars:
        core = optax.with_extra_args_support(
            optax.chain(optax.scale_by_trust_ratio(trust_coefficient=0.001), core)
        )
    return blocks.prepared(core, weight_decay, clip_norm)
