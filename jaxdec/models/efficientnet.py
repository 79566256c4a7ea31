"""EfficientNet-B0."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import blocks

# Of each stage: expansion, kernel, stride of the first block, channels, blocks.
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class EfficientNetB0(nnx.Module):
    """EfficientNet-B0 (arXiv 1905.11946, table 1): 5,288,548 parameters at 1000 classes.

    Without dropout and stochastic depth, so that the loss is a function of parameters and batch.

    Args:
      input_shape: (H, W) or (H, W, C).
      classes: number of outputs.
      width_factor: multiplies the channels.
      depth_factor: multiplies the blocks of each stage, rounded up.
      small_input: for CIFAR: a stem of stride 1, not 2.
      dtype: of the computation; parameters, batch statistics and logits are float32.
      rngs: of the initialization.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        width_factor: float = 1.0,
        depth_factor: float = 1.0,
        small_input: bool = False,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = blocks.compute_dtype(dtype)
        common: dict[str, Any] = dict(activation=nnx.silu, dtype=self.dtype, rngs=rngs)
        inputs = blocks.divisible(32 * width_factor)
        layers: list[nnx.Module] = [
            blocks.ConvNorm(
                blocks.image_channels(input_shape),
                inputs,
                stride=1 if small_input else 2,
                **common,
            )
        ]
        for expansion, kernel, first_stride, channels, count in STAGES:
            outputs = blocks.divisible(channels * width_factor)
            for block in range(math.ceil(count * depth_factor)):
                layers.append(
                    blocks.InvertedResidual(
                        inputs,
                        outputs,
                        kernel,
                        1 if block else first_stride,
                        expansion=expansion,
                        squeezed=max(1, inputs // 4),
                        **common,
                    )
                )
                inputs = outputs
        layers.append(blocks.ConvNorm(inputs, 4 * inputs, 1, **common))
        self.layers = nnx.List(layers)
        self.head = blocks.MeanHead(4 * inputs, classes, dtype=self.dtype, rngs=rngs)

    def __call__(self, batch_BxHxWxC: jax.Array) -> jax.Array:
        x = blocks.images(batch_BxHxWxC, self.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
