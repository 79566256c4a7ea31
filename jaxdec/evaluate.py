"""What a run is judged by: the mean model, every node's own, and how far they are apart."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdec import nodes

Apply = Callable[[Any, jax.Array], jax.Array]
Batch = dict[str, jax.Array]


def classification(
    apply: Apply, params: Any, batch: Batch, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy and accuracy of one model on one batch.

    Args:
      apply: (params, inputs) → logits.
      params: one model's.
      batch: inputs [examples, ...], labels [examples].
      label_smoothing: α in [0, 1); the target is (1 − α) one-hot + α/classes.
    """
    logits = apply(params, batch["inputs"])
    one_hot = jax.nn.one_hot(batch["labels"], logits.shape[-1], dtype=logits.dtype)
    loss = optax.softmax_cross_entropy(logits, optax.smooth_labels(one_hot, label_smoothing))
    return loss.mean(), jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])


@functools.partial(jax.jit, static_argnums=0)
def evaluate(apply: Apply, params: Any, batch: Batch) -> dict[str, jax.Array]:
    """Evaluate the mean model, and each node's own, on a test set.

    Args:
      apply: (params of one model, inputs) → logits.
      params: stacked over nodes, under either lift.
      batch: inputs [examples, ...], labels [examples].

    Returns:
      "eval/loss" and "eval/accuracy" of the mean model, "eval/loss_nodes" and
      "eval/accuracy_nodes" [nodes], and "consensus_distance".
    """
    loss, accuracy = classification(apply, nodes.mean(params), batch)
    each = functools.partial(classification, apply, batch=batch)
    loss_nodes, accuracy_nodes = jax.vmap(each)(params)
    return {
        "eval/loss": loss,
        "eval/accuracy": accuracy,
        "eval/loss_nodes": loss_nodes,
        "eval/accuracy_nodes": accuracy_nodes,
        "consensus_distance": consensus_distance(params),
    }


def consensus_distance(params: Any) -> jax.Array:
    """√(Σ_i ‖x_i − x̄‖² / n): the root mean square distance of a node from the mean model.

    >>> consensus_distance({"x": jnp.array([[0.0, 0.0], [6.0, 8.0]])})
    Array(5., dtype=float32)
    """

    def squared(x: jax.Array) -> jax.Array:
        return jnp.sum((x - jnp.mean(x, axis=0, keepdims=True)) ** 2) / len(x)

    return jnp.sqrt(sum(map(squared, jax.tree.leaves(params))))
