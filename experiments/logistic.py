"""A non-convex problem that studies of convergence share: regularized logistic regression."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdec


def examples(
    nodes: int, seed: int, *, by_label: bool = False, count: int = 4096, dim: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """Features [nodes, count/nodes, dim] and labels ±1 [nodes, count/nodes], of a noisy line.

    Args:
      nodes: a divisor of `count`.
      seed: of the draw, the same for any number of nodes.
      by_label: sort them, so that most nodes see one label alone; otherwise they are IID.
      count: of examples.
      dim: of the features.
    """
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((count, dim))
    labels = np.sign(features @ rng.standard_normal(dim) + rng.logistic(size=count))
    if by_label:
        order = np.argsort(labels, kind="stable")
        features, labels = features[order], labels[order]
    return features.reshape(nodes, -1, dim), labels.reshape(nodes, -1)


def loss(x: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean log(1 + exp(−y ⟨a, x⟩)) + 0.1 Σ x²/(1 + x²)."""
    return jnp.mean(jax.nn.softplus(-labels * (features @ x))) + 0.1 * jnp.sum(x**2 / (1 + x**2))


def mean_squared_gradient(tx: Any, data: Any, steps: int, seed: int, phases: int = 1) -> float:
    """Train on one example a node a step; the mean over steps of ‖∇f(x̄)‖², x̄ the mean model.

    Args:
      tx: the algorithm.
      data: features and labels, from `examples`.
      steps: a multiple of `phases`.
      seed: of the examples drawn.
      phases: the topology's period.
    """

    def run(features: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, jax.lax.axis_index("node"))

        def period(first: jax.Array, carry: Any) -> Any:
            x, state, total = carry
            for phase in range(phases):
                draw = jax.random.fold_in(key, first * phases + phase)
                row = jax.random.randint(draw, (1,), 0, len(features))
                mean = jax.lax.pmean(x, "node")
                full = jax.lax.pmean(jax.grad(loss)(mean, features, labels), "node")
                gradient = jax.grad(loss)(x, features[row], labels[row])
                updates, state = tx.update(gradient, state, x, phase=phase)
                x, total = x + updates, total + jnp.sum(full**2) / steps
            return x, state, total

        x = jnp.zeros_like(features, shape=features.shape[1:])
        start = (x, tx.init(x), jnp.zeros_like(x, shape=()))
        return jax.lax.fori_loop(0, steps // phases, period, start)[2]

    lifted = jaxdec.nodes.simulate(run, (0, 0, None), donate_argnums=())
    features, labels = map(jnp.asarray, data)
    return float(lifted(features, labels, jax.random.key(seed))[0])
