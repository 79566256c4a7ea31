"""CHOCO: nodes send what is new about their models, compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec import wire
from jaxdec.algorithms import blocks
from jaxdec.gossip import Gossip


class ChocoState(NamedTuple):
    """State of `choco`."""

    copy: optax.Params  # like params, float32 at least; x̂, what the neighbours have of x
    mixing: optax.Updates  # likewise; (W − I) x̂


def choco(
    gossip: Gossip,
    learning_rate: optax.ScalarOrSchedule,
    consensus_rate: float,
    order: blocks.Order = "atc",
    compressor: str | None = None,
    keep: float | None = None,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """CHOCO-SGD: gossip on copies x̂, to which compressed differences q are added.

    With x½ = X − γ G, and x̂ = 0 at first:

    - "atc": q = Q(x½ − x̂); x̂ ← x̂ + q; X⁺ = x½ + α (W − I) x̂;
    - "awc": X⁺ = x½ + α (W − I) x̂; q = Q(X⁺ − x̂); x̂ ← x̂ + q.

    Only q travels, so a node keeps (W − I) x̂ as the sum of what (W − I) q added, and W is the same
    in every step. At a fixed point x̂ is x½ ("atc") or X ("awc"): whatever Q is, the limits are
    those of ATC-DSGD and CTA-DSGD with I + α (W − I). A large α with a coarse Q diverges: with the
    largest tenth of the entries α = 1 does and 0.3 works; a random tenth takes less.

    Args:
      gossip: the averaging; W static, symmetric, doubly stochastic.
      learning_rate: γ, a number or an optax schedule.
      consensus_rate: α in (0, 1], smaller for a coarser Q.
      order: "atc" or "awc".
      compressor: Q: "top_k", "random_k", "int8" (unbiased); None: the identity.
      keep: share of a leaf's entries that "top_k" and "random_k" send, one entry at least.
      weight_decay: λ; G ← G + λ X.
      clip_norm: largest global norm of a node's gradient; None: no clipping.

    Raises:
      ValueError: a graph that changes, a bad rate, order or compressor, or a gossip with a
        `wire_dtype` or `local_axis`.

    Source: Koloskova et al., arXiv 1902.00340 ("atc") and 1907.09356 ("awc").
    Differs from them: (W − I) x̂ is kept instead of W x̂, so that identical replicas stay so to the
    bit.

    >>> import jaxdec
    >>> gossip = jaxdec.Gossip(jaxdec.topology.complete(2))
    >>> tx = choco(gossip, 0.5, consensus_rate=0.5, compressor="top_k", keep=0.5)
    >>> def step(x):
    ...     updates, state = tx.update(0 * x, tx.init(x), x, phase=0)
    ...     return optax.apply_updates(x, updates), state.inner.copy
    >>> x, copy = jax.vmap(step, axis_name="node")(jnp.array([[1.0, 8.0], [3.0, 4.0]]))
    >>> x.tolist(), copy.tolist()
    ([[1.0, 7.0], [3.0, 5.0]], [[0.0, 8.0], [0.0, 4.0]])
    """
    blocks.check_order(order)
    form = blocks.compressor("choco", gossip, consensus_rate, compressor, keep)
    if len(gossip.topology.distinct_phases) > 1:
        raise ValueError(
            f"choco keeps (W − I) x̂ of a static graph; {gossip.topology.name} changes over "
            f"{gossip.topology.period} steps; use one such as ring, grid or symmetric_exponential"
        )

    def init_fn(params: optax.Params) -> ChocoState:
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, wire.sum_dtype(x.dtype)), params)
        return ChocoState(zeros, zeros)

    def published(models: optax.Params, state: ChocoState, phase: Any, key: Any) -> ChocoState:
        news = jax.tree.map(
            lambda x, c: (x.astype(c.dtype) - c).astype(x.dtype), models, state.copy
        )
        q, mixing = gossip.compressed(news, phase, form, key)
        return ChocoState(blocks.add(state.copy, q), blocks.add(state.mixing, mixing))

    def step_fn(
        updates: optax.Updates,
        state: ChocoState,
        params: optax.Params,
        rate: Any,
        phase: Any,
        key: Any,
    ) -> tuple[optax.Updates, ChocoState]:
        step = blocks.scale(-rate, updates)
        if order == "atc":
            state = published(optax.apply_updates(params, step), state, phase, key)
        step = blocks.add(step, blocks.scale(consensus_rate, state.mixing))
        if order == "awc":
            state = published(optax.apply_updates(params, step), state, phase, key)
        return step, state

    core = blocks.stepped("choco", init_fn, step_fn, learning_rate)
    return blocks.prepared(core, weight_decay, clip_norm)
