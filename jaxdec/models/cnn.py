"""A small convolutional network that stays fast on CPU with other weights on every node."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import blocks


class PatchConv(nnx.Module):
    """Convolution as one matrix product over patches: `nnx.Conv` with padding=kernel // 2.

    `vmap` over weights makes it a batched matrix product, where a convolution becomes a grouped
    one, which XLA runs slowly on CPU.

    >>> PatchConv(1, 4, 3, stride=2, dtype=jnp.float32, rngs=nnx.Rngs(0))(
    ...     jnp.zeros((2, 7, 8, 1))
    ... ).shape
    (2, 4, 4, 4)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.kernel = kernel
        self.stride = stride
        self.linear = nnx.Linear(
            kernel * kernel * inputs,
            outputs,
            kernel_init=nnx.initializers.he_normal(),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        patches_BxHxWxK = self._patches(x_BxHxWxC)
        *batch_and_sides, size = patches_BxHxWxK.shape
        # Two axes: with more, the batched product on CPU is slower.
        y = self.linear(patches_BxHxWxK.reshape(-1, size))
        return y.reshape(*batch_and_sides, -1)

    def _patches(self, x_BxHxWxC: jax.Array) -> jax.Array:
        """Row by row, column by column, channel by channel, as a kernel [k, k, C, outputs]."""
        height, width = x_BxHxWxC.shape[1:3]
        pad, last = self.kernel // 2, self.kernel - 1
        x = jnp.pad(x_BxHxWxC, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        bottom, right = height + 2 * pad - last, width + 2 * pad - last
        shifted = [
            x[:, i : i + bottom : self.stride, j : j + right : self.stride]
            for i in range(self.kernel)
            for j in range(self.kernel)
        ]
        return jnp.concatenate(shifted, axis=-1)


class Cnn(nnx.Module):
    """Convolutions of stride 2, then dense layers; ReLU between.

    Strides shrink the image: max pooling in their place took eight times as long on CPU.

    Args:
      input_shape: (H, W) or (H, W, C).
      classes: number of outputs.
      channels: of each convolution.
      kernel: side of the filters, odd.
      dense: units of the layer before the head.
      dtype: of the computation; parameters and logits are float32.
      rngs: of the initialization.

    Raises:
      ValueError: an even kernel.

    >>> Cnn((28, 28), 10, rngs=nnx.Rngs(0))(jnp.zeros((4, 28, 28))).shape
    (4, 10)
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        channels: Sequence[int] = (16, 32),
        kernel: int = 3,
        dense: int = 128,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        if kernel % 2 == 0:
            raise ValueError(f"{kernel=} must be odd")
        self.dtype = dtype = blocks.compute_dtype(dtype)
        widths = [blocks.image_channels(input_shape), *channels]
        self.convs = nnx.List(
            [
                PatchConv(i, o, kernel, stride=2, dtype=dtype, rngs=rngs)
                for i, o in itertools.pairwise(widths)
            ]
        )
        left = math.prod(-(-side // 2 ** len(channels)) for side in input_shape[:2])
        self.dense = nnx.Linear(left * widths[-1], dense, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(dense, classes, dtype=dtype, rngs=rngs)

    def __call__(self, batch_BxHxWxC: jax.Array) -> jax.Array:
        x = blocks.images(batch_BxHxWxC, self.dtype)
        for conv in self.convs:
            x = nnx.relu(conv(x))
        x = nnx.relu(self.dense(x.reshape(len(x), -1)))
        return self.head(x).astype(jnp.float32)
