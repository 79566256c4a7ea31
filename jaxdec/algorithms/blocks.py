"""What several algorithms share: gradient preparation, schedules and tree arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def prepared(
    core: optax.GradientTransformationExtraArgs, weight_decay: float, clip_norm: float | None
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradient, add coupled weight decay, and hand it to `core`.

    G ← G · min(1, clip_norm / ‖G‖) over all leaves of one node, then G ← G + weight_decay · X.
    """
    blocks: list[optax.GradientTransformation] = []
    if clip_norm is not None:
        blocks.append(optax.clip_by_global_norm(clip_norm))
    if weight_decay:
        blocks.append(optax.add_decayed_weights(weight_decay))
    return optax.with_extra_args_support(optax.chain(*blocks, core)) if blocks else core


def scheduled(learning_rate: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """The learning rate of step `count`."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def scale(factor: Any, tree: PyTree) -> PyTree:
    """Factor · tree, in the dtype of each leaf."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def add(*trees: PyTree) -> PyTree:
    """The sum of trees of one structure, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: x + sum(y.astype(x.dtype) for y in rest), *trees)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """A − b, in the dtypes of a."""
    return jax.tree.map(lambda x, y: x - y.astype(x.dtype), a, b)


def zeros_like(tree: PyTree) -> PyTree:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(jnp.zeros_like, tree)


def need_params(name: str, params: PyTree | None) -> None:
    """Refuse an update without the models that it averages."""
    if params is None:
        raise ValueError(f"{name}.update averages parameters; call update(grads, state, params)")


def check_momentum(**values: float) -> None:
    """Refuse a momentum outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be in [0, 1)")
