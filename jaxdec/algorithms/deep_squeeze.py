"""DeepSqueeze: compressed models, with what compression left out carried to the next step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec import wire
from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class DeepSqueezeState(NamedTuple):
    """State of `deep_squeeze`."""

    error: optax.Updates  # like params, float32 at least; e


def deep_squeeze(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    consensus_rate: float,
    compressor: str | None = None,
    keep: float | None = None,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DeepSqueeze: v = X − γ G + e; c = Q(v); e ← v − c; X⁺ = X − γ G + α (W − I) c.

    e = 0 at first. With the identity for Q this is ATC-DSGD with I + α (W − I).

    Args:
      gossip: the averaging; W doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      consensus_rate: α in (0, 1]; small with a coarse Q, since Q is of whole models.
      compressor: Q: "top_k", "random_k", "int8" (unbiased); None: the identity.
      keep: share of a leaf's entries that "top_k" and "random_k" send, one entry at least.
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Raises:
      ValueError: a bad rate or compressor, or a gossip with a `wire_dtype` or `local_axis`.

    Source: Tang et al., arXiv 1907.07346.

    >>> import jaxdec
    >>> gossip = jaxdec.Gossip(jaxdec.topology.complete(2))
    >>> tx = deep_squeeze(gossip, 0.5, consensus_rate=0.5, compressor="top_k", keep=0.5)
    >>> def step(x):
    ...     updates, state = tx.update(0 * x, tx.init(x), x, phase=0)
    ...     return optax.apply_updates(x, updates), state.inner.error
    >>> x, error = jax.vmap(step, axis_name="node")(jnp.array([[1.0, 8.0], [3.0, 4.0]]))
    >>> x.tolist(), error.tolist()
    ([[1.0, 7.0], [3.0, 5.0]], [[1.0, 0.0], [3.0, 0.0]])
    """
    form = blocks.compressor("deep_squeeze", gossip, consensus_rate, compressor, keep)

    def init_fn(params: optax.Params) -> DeepSqueezeState:
        return DeepSqueezeState(
            jax.tree.map(lambda x: jnp.zeros_like(x, wire.sum_dtype(x.dtype)), params)
        )

    def step_fn(
        updates: optax.Updates,
        state: DeepSqueezeState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, DeepSqueezeState]:
        step = blocks.scale(-rate, updates)
        value = blocks.add(state.error, optax.apply_updates(params, step))
        sent = jax.tree.map(lambda v, x: v.astype(x.dtype), value, params)
        c, mixing = gossip.compressed(sent, phase, form, key)
        step = blocks.add(step, blocks.scale(consensus_rate, mixing))
        return step, DeepSqueezeState(blocks.subtract(value, c))

    core = blocks.stepped("deep_squeeze", init_fn, step_fn, learning_rate)
    return blocks.prepared(core, weight_decay, clip_norm)
