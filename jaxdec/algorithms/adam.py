"""Decentralized Adam, and Adam whose moments accumulate over a window of steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec.algorithms import blocks
from jaxdec.algorithms.blocks import Decay
from jaxdec.algorithms.decentralize import decentralize
from jaxdec.gossip import Gossip


class AccumulatedAdamState(NamedTuple):
    """State of `scale_by_accumulated_adam`."""

    steps: jax.Array  # int32 []; steps taken
    mu: optax.Updates  # like params; M, first moment of the windows' means
    nu: optax.Updates  # like params; V, second moment of the windows' means
    window_mean: optax.Updates  # like params; b, the open window's gradients over its length


def scale_by_accumulated_adam(
    window: int = 1, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Adam's direction, with moments that remember means over windows of s steps.

    Step t, k = ⌊t/s⌋ + 1, M = V = b = 0 at first:

    m = β₁ M + (1 − β₁) g;  v = β₂ V + (1 − β₂) g²;
    u = (m / (1 − β₁ᵏ)) / (√(v / (1 − β₂ᵏ)) + ε);  b ← b + g/s;
    at a window's end: M ← β₁ M + (1 − β₁) b;  V ← β₂ V + (1 − β₂) b²;  b ← 0.

    The square of a window's mean has less of the variance of small local batches than the mean of
    squares. window = 1 is Adam.

    Args:
      window: s, steps a window; grows with the number of nodes (4 at 8 nodes, 8 at 16).
      b1: β₁ in [0, 1).
      b2: β₂ in [0, 1).
      eps: ε, outside the root.

    Returns:
      A transform from gradients to u.

    Raises:
      ValueError: a window below 1, or a decay outside [0, 1).

    Source: arXiv 2410.11998.

    >>> import jax.numpy as jnp
    >>> tx = scale_by_accumulated_adam(window=2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for gradient in (1.0, -1.0, 2.0):
    ...     update, state = tx.update(jnp.asarray(gradient), state)
    ...     print(f"{update:.3f}")
    1.000
    -1.000
    0.744
    """
    if window < 1:
        raise ValueError(f"window={window} must be at least 1; 1 is Adam")
    blocks.check_momentum(b1=b1, b2=b2)
    blocks.check_not_negative(eps=eps)

    def init_fn(params: optax.Params) -> AccumulatedAdamState:
        zeros = blocks.zeros_like(params)
        return AccumulatedAdamState(jnp.zeros([], jnp.int32), zeros, zeros, zeros)

    def update_fn(
        updates: optax.Updates, state: AccumulatedAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AccumulatedAdamState]:
        del params
        k = state.steps // window + 1
        closes = (state.steps + 1) % window == 0

        bias1, bias2 = 1 - b1**k, 1 - b2**k

        def direction(g: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
            m = (b1 * mu + (1 - b1) * g) / bias1.astype(g.dtype)
            v = (b2 * nu + (1 - b2) * g * g) / bias2.astype(g.dtype)
            return m / (jnp.sqrt(v) + eps)

        def close(decay: float, power: int, moment: jax.Array, mean: jax.Array) -> jax.Array:
            return jnp.where(closes, decay * moment + (1 - decay) * mean**power, moment)

        mean = jax.tree.map(lambda b, g: b + g / window, state.window_mean, updates)
        new_state = AccumulatedAdamState(
            steps=optax.safe_increment(state.steps),
            mu=jax.tree.map(lambda mu, b: close(b1, 1, mu, b), state.mu, mean),
            nu=jax.tree.map(lambda nu, b: close(b2, 2, nu, b), state.nu, mean),
            window_mean=jax.tree.map(lambda b: jnp.where(closes, jnp.zeros_like(b), b), mean),
        )
        return jax.tree.map(direction, updates, state.mu, state.nu), new_state

    return optax.GradientTransformation(init_fn, update_fn)


def decentralized_adamw(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    order: blocks.Order = "awc",
    weight_decay: float = 0.0,
    decay: Decay = "all",
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decentralized AdamW ("awc"): X⁺ = (1 − γ λ) W X − γ m̂ / (√v̂ + ε).

    The gradient is taken at the unmixed X, so that mixing runs beside it; moments stay local.
    weight_decay = 0 is decentralized Adam.

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      b1: β₁ in [0, 1).
      b2: β₂ in [0, 1).
      eps: ε, outside the root.
      order: "awc", or "atc": X⁺ = W ((1 − γ λ) X − γ m̂ / (√v̂ + ε)).
      weight_decay: λ, decoupled.
      decay: which parameters: "all", or "matrices", leaves of two axes or more.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Source: arXiv 2410.11998.
    """
    blocks.check_momentum(b1=b1, b2=b2)
    blocks.check_not_negative(eps=eps)
    direction = optax.scale_by_adam(b1, b2, eps)
    return _adamw(direction, gossip, learning_rate, order, weight_decay, decay, clip_norm)


def accumulated_adamw(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    window: int = 4,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    order: blocks.Order = "awc",
    weight_decay: float = 0.0,
    decay: Decay = "all",
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decentralized AdamW with accumulated moments: see `scale_by_accumulated_adam`.

    Parameters move and gossip at every step; only the moments' memory is windowed.

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      window: s, steps a window; 1 is `decentralized_adamw`.
      b1: β₁ in [0, 1).
      b2: β₂ in [0, 1).
      eps: ε, outside the root.
      order: "awc" or "atc".
      weight_decay: λ, decoupled; in "awc" it acts on the mixed parameters.
      decay: which parameters: "all", or "matrices", leaves of two axes or more.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Source: arXiv 2410.11998.
    """
    direction = scale_by_accumulated_adam(window, b1, b2, eps)
    return _adamw(direction, gossip, learning_rate, order, weight_decay, decay, clip_norm)


def _adamw(
    direction: optax.GradientTransformation,
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    order: blocks.Order,
    weight_decay: float,
    decay: Decay,
    clip_norm: float | None,
) -> optax.GradientTransformationExtraArgs:
    blocks.check_not_negative(weight_decay=weight_decay)
    inner = optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, blocks.decay_mask(decay)),
        optax.scale_by_learning_rate(learning_rate),
    )
    return blocks.prepared(decentralize(inner, gossip, order), 0.0, clip_norm)
