"""Any optax optimizer, decentralized; and the named algorithms that are just that."""

from typing import Any

import jax
import optax

from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


def decentralize(
    inner: optax.GradientTransformation, gossip: Gossip, order: blocks.Order = "awc"
) -> optax.GradientTransformationExtraArgs:
    """Make an optax optimizer decentralized.

    With u(G; X) the update that `inner` makes of gradients G at parameters X:

    - "awc", adapt while communicating: X⁺ = W X + u(G; W X). The exchange is independent of the
      gradient and overlaps with its computation; decoupled decay acts on the mixed parameters.
    - "atc", adapt, then combine: X⁺ = W (X + u(G; X)).

    Args:
      inner: an optax optimizer; its state stays local.
      gossip: the averaging.
      order: "awc" or "atc".

    Returns:
      A transform with the state of `inner`, whose `update` takes the keywords `phase` and `key`.

    Raises:
      ValueError: an unknown order.

    >>> import jax, jax.numpy as jnp, jaxdec, optax
    >>> gossip = jaxdec.Gossip(jaxdec.topology.complete(2))
    >>> tx = decentralize(optax.sgd(0.5), gossip)
    >>> def step(x):
    ...     updates, _ = tx.update(2 * x, tx.init(x), x, phase=0)
    ...     return optax.apply_updates(x, updates)
    >>> jax.vmap(step, axis_name="node")(jnp.array([1.0, 3.0]))
    Array([ 1., -1.], dtype=float32)
    """
    blocks.check_order(order)
    inner_ = optax.with_extra_args_support(inner)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        phase: Any = 0,
        key: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        blocks.need_params("decentralize", params)
        if order == "awc":
            delta = gossip(params, phase, key)
            mixed = optax.apply_updates(params, delta)
            updates, state = inner_.update(updates, state, mixed, **extra)
        else:
            updates, state = inner_.update(updates, state, params, **extra)
            delta = gossip(optax.apply_updates(params, updates), phase, key)
        # In the dtypes of the parameters: a bfloat16 gradient must not round the mixing.
        return blocks.add(delta, updates), state

    return optax.GradientTransformationExtraArgs(inner_.init, update_fn)


def dsgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    order: blocks.Order = "atc",
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decentralized SGD: X⁺ = W (X − γ G) ("atc"), or X⁺ = W X − γ G ("awc").

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      order: "atc" or "awc".
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.
    """
    core = decentralize(optax.sgd(learning_rate), gossip, order)
    return blocks.prepared(core, weight_decay, clip_norm)


def dmsgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decentralized momentum SGD: m ← β m + G; X⁺ = W (X − γ m).

    Its limit is that of ATC-DSGD at learning rate γ/(1 − β): momentum amplifies the bias that
    heterogeneous data bring (arXiv 2104.11981).

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1).
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.
    """
    return _momentum_sgd(gossip, learning_rate, "atc", momentum, weight_decay, clip_norm)


def awc_dmsgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum SGD that adapts while communicating: m ← β m + G; X⁺ = W X − γ m.

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      momentum: β in [0, 1).
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.
    """
    return _momentum_sgd(gossip, learning_rate, "awc", momentum, weight_decay, clip_norm)


def _momentum_sgd(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    order: blocks.Order,
    momentum: float,
    weight_decay: float,
    clip_norm: float | None,
) -> optax.GradientTransformationExtraArgs:
    blocks.check_momentum(momentum=momentum)
    core = decentralize(optax.sgd(learning_rate, momentum), gossip, order)
    return blocks.prepared(core, weight_decay, clip_norm)
