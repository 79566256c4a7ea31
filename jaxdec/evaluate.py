"""What a run is judged by: the mean model, every node's own, and how far they are apart."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdec import nodes
from jaxdec.data import Batch, Examples
from jaxdec.placement import Placement

Apply = Callable[..., tuple[jax.Array, Any]]


def token_scores(
    logits: jax.Array, labels: jax.Array, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Summed cross-entropy, and how many of the labels have the largest logit.

    Args:
      logits: float32 [..., classes].
      labels: int32 [...]; negative ones are padding, and count for nothing.
      label_smoothing: α in [0, 1); the target is (1 − α) one-hot + α/classes.

    >>> loss, correct = token_scores(jnp.array([[0.0, 0.0], [9.0, 0.0]]), jnp.array([1, -1]))
    >>> f"{loss:.3f}", int(correct)
    ('0.693', 0)
    """
    counted = labels >= 0
    safe = jnp.where(counted, labels, 0)
    log_p = jax.nn.log_softmax(logits)
    of_label = jnp.take_along_axis(log_p, safe[..., jnp.newaxis], axis=-1)[..., 0]
    loss = -(1 - label_smoothing) * of_label
    if label_smoothing:
        loss -= label_smoothing * jnp.mean(log_p, axis=-1)
    correct = counted & (jnp.argmax(logits, axis=-1) == labels)
    return jnp.sum(jnp.where(counted, loss, 0.0)), jnp.sum(correct)


def chunks(examples: Examples, size: int) -> Iterator[Batch]:
    """A split in order, in batches of one size; the last is filled up with labels of −1.

    >>> from jaxdec.data import load
    >>> [batch["labels"].shape for batch in chunks(load("digits").test, 200)]
    [(200,), (200,)]
    """
    for first in range(0, len(examples), size):
        positions = np.arange(first, first + size)
        batch = examples.take(np.minimum(positions, len(examples) - 1))
        batch["labels"] = np.array(batch["labels"])
        batch["labels"][positions >= len(examples)] = -1
        yield batch


class Evaluation:
    """Evaluates a run's state: the mean model, and each node's own.

    The mean model has the mean of all nodes' batch statistics; or, given training batches, fresh
    ones that it gathers there itself.

    Args:
      apply: of `models.functional`.
      placement: of the nodes.
      examples: the split to evaluate on.
      batch_size: examples at a time.
      recalibration: training batches, without a node axis; none: the mean of the statistics.
    """

    def __init__(
        self,
        apply: Apply,
        placement: Placement,
        examples: Examples,
        batch_size: int,
        recalibration: Iterable[Batch] = (),
    ):
        self._placement = placement
        self._examples = examples
        self._batch_size = min(batch_size, len(examples))
        self._recalibration = list(recalibration)

        def scores(params: Any, statistics: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
            logits, _ = apply(params, statistics, batch["inputs"])
            return token_scores(logits, batch["labels"])

        def recalibrated(params: Any, statistics: Any, batch: Batch) -> Any:
            return apply(params, statistics, batch["inputs"], key=jax.random.key(0))[1]

        self._scores = jax.jit(scores)
        self._recalibrate = jax.jit(recalibrated)
        self._node_scores = placement.lift(scores, in_axes=(0, 0, None), donate_argnums=())
        self._mean = jax.jit(nodes.mean, out_shardings=placement.replicated)
        self._distance = jax.jit(consensus_distance, out_shardings=placement.replicated)

    def mean_model(self, params: Any, statistics: Any) -> tuple[Any, Any]:
        """Parameters and batch statistics of the mean model, from stacked ones."""
        mean, statistics = self._mean((params, statistics))
        for batch in self._recalibration:
            batch = self._placement.replicate(batch)
            statistics = self._recalibrate(mean, statistics, batch)
        return mean, statistics

    def __call__(self, params: Any, statistics: Any) -> dict[str, np.ndarray]:
        """Scores of stacked parameters and batch statistics.

        Returns:
          "eval/loss", a label, and "eval/accuracy" of the mean model; "eval/loss_nodes" and
          "eval/accuracy_nodes" [nodes]; and "consensus_distance".
        """
        mean = self.mean_model(params, statistics)
        count, of_mean, of_nodes = 0, [], []
        for batch in chunks(self._examples, self._batch_size):
            count += int((batch["labels"] >= 0).sum())
            batch = self._placement.replicate(batch)
            of_mean.append(self._scores(*mean, batch))
            of_nodes.append(self._node_scores(params, statistics, batch))
        fetch = functools.partial(jax.tree.map, self._placement.fetch)
        loss, accuracy = np.sum(fetch(of_mean), axis=0) / count
        loss_nodes, accuracy_nodes = np.sum(fetch(of_nodes), axis=0) / count
        return {
            "eval/loss": loss,
            "eval/accuracy": accuracy,
            "eval/loss_nodes": loss_nodes,
            "eval/accuracy_nodes": accuracy_nodes,
            "consensus_distance": self._placement.fetch(self._distance(params)),
        }


def consensus_distance(params: Any) -> jax.Array:
    """√(Σ_i ‖x_i − x̄‖² / n): the root mean square distance of a node from the mean model.

    >>> consensus_distance({"x": jnp.array([[0.0, 0.0], [6.0, 8.0]])})
    Array(5., dtype=float32)
    """

    def squared(x: jax.Array) -> jax.Array:
        return jnp.sum((x - jnp.mean(x, axis=0, keepdims=True)) ** 2) / len(x)

    return jnp.sqrt(sum(map(squared, jax.tree.leaves(params))))
