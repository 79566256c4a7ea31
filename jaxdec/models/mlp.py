"""A multilayer perceptron."""

from collections.abc import Sequence

import jax
from flax import nnx


class Mlp(nnx.Module):
    """Flattens its input; ReLU between dense layers.

    >>> import jax.numpy as jnp
    >>> Mlp((8, 8), 10, hidden=(32,), rngs=nnx.Rngs(0))(jnp.zeros((4, 8, 8))).shape
    (4, 10)
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        hidden: Sequence[int] = (128, 128),
        *,
        rngs: nnx.Rngs,
    ):
        if not all(isinstance(width, int) and width > 0 for width in hidden):
            raise ValueError(f"model.hidden={hidden} must hold widths, integers above 0")
        widths = [*hidden, classes]
        inputs = [_size(input_shape), *hidden]
        self.layers = nnx.List(
            [nnx.Linear(i, o, rngs=rngs) for i, o in zip(inputs, widths, strict=True)]
        )

    def __call__(self, batch_BxD: jax.Array) -> jax.Array:
        x = batch_BxD.reshape(len(batch_BxD), -1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
