"""What the language models share: the attention's products and the keys of a call's dropout."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx


def attend(
    q_BxQxHxD: jax.Array,
    k_BxKxHxD: jax.Array,
    v_BxKxHxD: jax.Array,
    seen_BxQxK: jax.Array,
    drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """softmax(q kᵀ / √D) v in each head; scores and softmax in float32.

    Args:
      q_BxQxHxD: queries.
      k_BxKxHxD: keys.
      v_BxKxHxD: values.
      seen_BxQxK: bool; which keys a query sees. One that sees none gets the mean of all values.
      drop: applied to the weights.

    Returns:
      [B, Q, H, D] in v's dtype.

    >>> q = k = jnp.zeros((1, 2, 1, 1))
    >>> v = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    >>> attend(q, k, v, jnp.tri(2, dtype=bool)[jnp.newaxis]).ravel().tolist()
    [1.0, 2.0]
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", q_BxQxHxD, k_BxKxHxD, preferred_element_type=jnp.float32)
    seen = jnp.broadcast_to(seen_BxQxK[:, jnp.newaxis], scores.shape)
    # Finite, so that no row is NaN where a text is all padding.
    unseen = jnp.finfo(jnp.float32).min
    scores = jnp.where(seen, scores / math.sqrt(q_BxQxHxD.shape[-1]), unseen)
    weights = drop(nnx.softmax(scores)).astype(v_BxKxHxD.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v_BxKxHxD)


def dropout_key(drop: nnx.Dropout, rngs: nnx.Rngs | jax.Array | None) -> jax.Array | None:
    """The key of one call of a model.

    Raises:
      ValueError: none was passed, and `drop` would draw.

    >>> dropout_key(nnx.Dropout(0.0), None) is None
    True
    """
    if rngs is None and drop.rate and not drop.deterministic:
        raise ValueError(
            f"dropout={drop.rate} draws at each call: pass rngs=jax.random.key(...), "
            "or nnx.Rngs, or call model.eval() first"
        )
    return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs


def split_key(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """`count` keys, or as many times None.

    >>> split_key(None, 2)
    [None, None]
    """
    return [None] * count if key is None else list(jax.random.split(key, count))
