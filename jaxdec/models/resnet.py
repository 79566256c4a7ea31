"""Residual networks: ResNet-20 for CIFAR, ResNet-18, -34 and -50 for ImageNet."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import blocks
from jaxdec.models.blocks import ConvNorm

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


class Residual(nnx.Module):
    """relu(layers(x) + shortcut(x))."""

    def __init__(self, layers: Sequence[nnx.Module], shortcut: nnx.Module | None):
        self.layers = nnx.List(layers)
        self.shortcut = shortcut

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = x_BxHxWxC
        for layer in self.layers:
            x = layer(x)
        return nnx.relu(x + (x_BxHxWxC if self.shortcut is None else self.shortcut(x_BxHxWxC)))


class PadShortcut(nnx.Module):
    """Every stride-th pixel, with zeros for the new channels: He et al.'s option A."""

    def __init__(self, new_channels: int, stride: int):
        self.new_channels = new_channels
        self.stride = stride

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x = x_BxHxWxC[:, :: self.stride, :: self.stride]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.new_channels)))


class ResNet20(nnx.Module):
    """ResNet-20 for CIFAR (arXiv 1512.03385, section 4.2): 0.27 M parameters, 32×32 images.

    Its shortcuts have no parameters (option A), as in the paper: 269,722 at 10 classes.

    Args:
      input_shape: (H, W) or (H, W, C).
      classes: number of outputs.
      width: channels of the first stage; the next two have twice and four times as many.
      count: residual blocks of each stage; n of them make ResNet-(6n + 2).
      dtype: of the computation; parameters, batch statistics and logits are float32.
      rngs: of the initialization.

    >>> model = ResNet20((8, 8, 3), 10, width=4, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8, 8, 3))).shape
    (2, 10)
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        width: int = 16,
        count: int = 3,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = blocks.compute_dtype(dtype)
        conv = functools.partial(ConvNorm, dtype=self.dtype, rngs=rngs)
        self.stem = conv(blocks.image_channels(input_shape), width)
        residuals: list[nnx.Module] = []
        inputs = width
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers = [conv(inputs, outputs, 3, stride), conv(outputs, outputs, activation=None)]
                shortcut = PadShortcut(outputs - inputs, stride) if inputs != outputs else None
                residuals.append(Residual(layers, shortcut))
                inputs = outputs
        self.residuals = nnx.List(residuals)
        self.head = blocks.MeanHead(inputs, classes, dtype=self.dtype, rngs=rngs)

    def __call__(self, batch_BxHxWxC: jax.Array) -> jax.Array:
        x = self.stem(blocks.images(batch_BxHxWxC, self.dtype))
        for residual in self.residuals:
            x = residual(x)
        return self.head(x)


class ResNet(nnx.Module):
    """ResNet-18, -34 or -50 (arXiv 1512.03385, table 1) with projection shortcuts (option B).

    Differs from the paper: a bottleneck strides in its 3×3 convolution ("v1.5"), and the last
    batch norm of a residual starts at zero, so that blocks start as the identity, as large
    batches need (arXiv 1706.02677).

    Args:
      input_shape: (H, W) or (H, W, C).
      classes: number of outputs.
      depth: 18, 34 or 50.
      width: channels of the first stage, inside its blocks.
      small_input: for CIFAR: a 3×3 stem of stride 1 without pooling, in place of 7×7 of stride 2
        with pooling.
      zero_scale: start the last scale of each residual at zero, not one.
      dtype: of the computation; parameters, batch statistics and logits are float32.
      rngs: of the initialization.

    Raises:
      ValueError: another depth.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        depth: int = 50,
        width: int = 64,
        small_input: bool = False,
        zero_scale: bool = True,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        if depth not in STAGES:
            raise ValueError(f"{depth=} must be one of {', '.join(map(str, STAGES))}")
        self.dtype = blocks.compute_dtype(dtype)
        conv = functools.partial(ConvNorm, dtype=self.dtype, rngs=rngs)
        last = functools.partial(
            conv,
            activation=None,
            scale_init=nnx.initializers.zeros if zero_scale else nnx.initializers.ones,
        )
        channels = blocks.image_channels(input_shape)
        self.stem = conv(channels, width) if small_input else conv(channels, width, 7, 2)
        self.pool = not small_input
        residuals: list[nnx.Module] = []
        inputs = width
        for stage, count in enumerate(STAGES[depth]):
            inner = width * 2**stage
            outputs = inner * 4 if depth >= 50 else inner
            for block in range(count):
                stride = 2 if stage and not block else 1
                if depth >= 50:
                    layers = [
                        conv(inputs, inner, 1),
                        conv(inner, inner, 3, stride),
                        last(inner, outputs, 1),
                    ]
                else:
                    layers = [conv(inputs, inner, 3, stride), last(inner, inner)]
                project = stride != 1 or inputs != outputs
                shortcut = conv(inputs, outputs, 1, stride, activation=None) if project else None
                residuals.append(Residual(layers, shortcut))
                inputs = outputs
        self.residuals = nnx.List(residuals)
        self.head = blocks.MeanHead(inputs, classes, dtype=self.dtype, rngs=rngs)

    def __call__(self, batch_BxHxWxC: jax.Array) -> jax.Array:
        x = self.stem(blocks.images(batch_BxHxWxC, self.dtype))
        if self.pool:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for residual in self.residuals:
            x = residual(x)
        return self.head(x)
