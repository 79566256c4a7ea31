"""Data parallelism, the baseline: any optimizer on the gradient averaged over all nodes."""

from typing import Any, Literal

import jax
import optax
from jax import lax

from jaxdec.algorithms import blocks
from jaxdec.algorithms.blocks import Decay
from jaxdec.gossip import Gossip


def mean_gradients(gossip: Gossip) -> optax.GradientTransformation:
    """Replace the gradients by their mean over the axes that hold replicas: one psum.

    >>> import jax, jax.numpy as jnp, jaxdec
    >>> tx = mean_gradients(jaxdec.Gossip(jaxdec.topology.complete(2)))
    >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="node")(jnp.array([1.0, 3.0]))
    Array([2., 2.], dtype=float32)
    """

    def update_fn(updates: optax.Updates, state: optax.OptState, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: lax.pmean(g, gossip.axes), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def allreduce(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    optimizer: Literal["momentum", "lars", "lamb", "adamw"] = "momentum",
    momentum: float | None = None,
    b1: float | None = None,
    b2: float | None = None,
    eps: float | None = None,
    weight_decay: float = 0.0,
    decay: Decay = "all",
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Synchronous data parallelism: one model, its gradient the mean over all nodes.

    Args:
      gossip: only its axes are used.
      learning_rate: γ, a number or an optax schedule.
      optimizer: "momentum" (m ← β m + G + λ X), "lars", "lamb" or "adamw".
      momentum: β of "momentum" and "lars"; None: 0.9.
      b1: first moment's decay of "lamb" and "adamw"; None: 0.9.
      b2: second moment's decay of "lamb" and "adamw"; None: 0.999.
      eps: of "lamb" (None: 1e-6) and "adamw" (None: 1e-8).
      weight_decay: λ; coupled for "momentum", inside the trust ratio for "lars" and "lamb",
        decoupled for "adamw".
      decay: which parameters: "all", or "matrices", leaves of two axes or more.
      clip_norm: largest global norm of the mean gradient; None: no clipping.

    Raises:
      ValueError: an unknown optimizer, or a field that the optimizer does not take.
    """
    adaptive = {"b1": b1, "b2": b2, "eps": eps}
    takes = {
        "momentum": {"momentum"},
        "lars": {"momentum"},
        "lamb": set(adaptive),
        "adamw": set(adaptive),
    }
    if optimizer not in takes:
        raise ValueError(f"optimizer={optimizer!r} is unknown; write one of {', '.join(takes)}")
    given = {k: v for k, v in {"momentum": momentum, **adaptive}.items() if v is not None}
    for name in given.keys() - takes[optimizer]:
        raise ValueError(
            f"allreduce with optimizer={optimizer!r} does not take {name}; "
            f"it takes: {', '.join(sorted(takes[optimizer]))}"
        )
    blocks.check_not_negative(weight_decay=weight_decay, eps=given.get("eps", 0.0))
    beta = given.pop("momentum", 0.9)
    blocks.check_momentum(momentum=beta)
    coupled_decay = 0.0
    mask = blocks.decay_mask(decay)
    match optimizer:
        case "momentum":
            inner = optax.sgd(learning_rate, beta)
            coupled_decay = weight_decay
        case "lars":
            inner = optax.lars(learning_rate, weight_decay, mask, momentum=beta)
        case "lamb":
            inner = optax.lamb(learning_rate, **given, weight_decay=weight_decay, mask=mask)
        case _:
            inner = optax.adamw(learning_rate, **given, weight_decay=weight_decay, mask=mask)
    core = blocks.prepared(optax.with_extra_args_support(inner), coupled_decay, clip_norm, decay)
    return optax.with_extra_args_support(optax.chain(mean_gradients(gossip), core))
