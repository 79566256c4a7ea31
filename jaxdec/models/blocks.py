"""Building blocks of the image models: NHWC, parameters in float32, computed in `dtype`."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

Activation = Callable[[jax.Array], jax.Array]


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that a config names.

    Raises:
      ValueError: neither float32 nor bfloat16.

    >>> compute_dtype("bfloat16")
    dtype(bfloat16)
    """
    choices = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in choices:
        raise ValueError(f"dtype={name!r} is unknown; use {' or '.join(choices)}")
    return choices[name]


def image_channels(input_shape: Sequence[int]) -> int:
    """Channels of images [H, W], one, or [H, W, C].

    Raises:
      ValueError: another number of axes.

    >>> image_channels((28, 28)), image_channels((32, 32, 3))
    (1, 3)
    """
    if len(input_shape) not in (2, 3):
        raise ValueError(f"input_shape={tuple(input_shape)} must be (height, width[, channels])")
    return 1 if len(input_shape) == 2 else input_shape[2]


def images(batch: jax.Array, dtype: DTypeLike) -> jax.Array:
    """[B, H, W] or [B, H, W, C] → [B, H, W, C] in dtype."""
    batch = batch if batch.ndim == 4 else batch[..., jnp.newaxis]
    return batch.astype(dtype)


def divisible(channels: float, by: int = 8) -> int:
    """The multiple of `by` nearest to `channels`, and at least 90% of it, as in MobileNet.

    >>> divisible(32 * 0.5), divisible(24 * 0.75), divisible(3)
    (16, 24, 8)
    """
    rounded = max(by, int(channels + by / 2) // by * by)
    return rounded if rounded >= 0.9 * channels else rounded + by


class ConvNorm(nnx.Module):
    """Convolution, batch norm, activation; padded so that stride 1 keeps the size.

    He initialization by the outputs that an input reaches. Statistics and normalization are
    float32; the running ones are BatchStat, moved by 0.1 a batch after `train()` and used after
    `eval()`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        stride: int = 1,
        *,
        groups: int = 1,
        activation: Activation | None = nnx.relu,
        bias: bool = False,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            strides=stride,
            padding=kernel // 2,
            feature_group_count=groups,
            use_bias=bias,
            kernel_init=nnx.initializers.variance_scaling(2.0 * groups, "fan_out", "normal"),
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(
            outputs, momentum=0.9, scale_init=scale_init, dtype=jnp.float32, rngs=rngs
        )
        self.activation = activation

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = self.conv(x_BxHxWxC)
        x = self.norm(x).astype(x.dtype)
        return x if self.activation is None else self.activation(x)


class SqueezeExcite(nnx.Module):
    """Scales each channel by a gate computed from the means of all (arXiv 1709.01507)."""

    def __init__(
        self,
        channels: int,
        squeezed: int,
        activation: Activation,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.reduce = nnx.Linear(channels, squeezed, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(squeezed, channels, dtype=dtype, rngs=rngs)
        self.activation = activation

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        means = jnp.mean(x_BxHxWxC, axis=(1, 2))
        gate = nnx.sigmoid(self.expand(self.activation(self.reduce(means))))
        return x_BxHxWxC * gate[:, jnp.newaxis, jnp.newaxis]


class InvertedResidual(nnx.Module):
    """Widen 1×1, filter each channel, narrow 1×1; added to the input where shapes allow.

    Args:
      inputs: channels.
      outputs: channels.
      kernel: side of the depthwise filter.
      stride: of the depthwise filter.
      expansion: the depthwise filter sees inputs × expansion channels; at 1 nothing is widened.
      activation: after the first two convolutions; none follows the last.
      squeezed: channels inside a squeeze-and-excite before the last convolution; 0: without.
      dtype: of the computation.
      rngs: of the initialization.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        stride: int = 1,
        *,
        expansion: int,
        activation: Activation,
        squeezed: int = 0,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        hidden = inputs * expansion
        layers: list[nnx.Module] = []
        if expansion != 1:
            layers.append(
                ConvNorm(inputs, hidden, 1, activation=activation, dtype=dtype, rngs=rngs)
            )
        layers.append(
            ConvNorm(
                hidden,
                hidden,
                kernel,
                stride,
                groups=hidden,
                activation=activation,
                dtype=dtype,
                rngs=rngs,
            )
        )
        if squeezed:
            layers.append(SqueezeExcite(hidden, squeezed, activation, dtype=dtype, rngs=rngs))
        layers.append(ConvNorm(hidden, outputs, 1, activation=None, dtype=dtype, rngs=rngs))
        self.layers = nnx.List(layers)
        self.residual = stride == 1 and inputs == outputs

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = x_BxHxWxC
        for layer in self.layers:
            x = layer(x)
        return x_BxHxWxC + x if self.residual else x


class MeanHead(nnx.Module):
    """Logits, float32, from the mean over the image."""

    def __init__(self, channels: int, classes: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.linear = nnx.Linear(channels, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        return self.linear(jnp.mean(x_BxHxWxC, axis=(1, 2))).astype(jnp.float32)
