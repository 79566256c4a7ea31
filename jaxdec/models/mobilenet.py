"""MobileNetV2."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import blocks

# Of each stage: expansion, channels, blocks, stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nnx.Module):
    """MobileNetV2 (arXiv 1801.04381, table 2): 3,504,872 parameters at 1000 classes.

    Without dropout before the head, so that the loss is a function of parameters and batch.

    Args:
      input_shape: (H, W) or (H, W, C).
      classes: number of outputs.
      width_factor: multiplies the channels, but never shrinks the last 1280.
      small_input: for CIFAR: a stem of stride 1, not 2.
      dtype: of the computation; parameters, batch statistics and logits are float32.
      rngs: of the initialization.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        width_factor: float = 1.0,
        small_input: bool = False,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = blocks.compute_dtype(dtype)
        common: dict[str, Any] = dict(activation=nnx.relu6, dtype=self.dtype, rngs=rngs)
        inputs = blocks.divisible(32 * width_factor)
        layers: list[nnx.Module] = [
            blocks.ConvNorm(
                blocks.image_channels(input_shape),
                inputs,
                stride=1 if small_input else 2,
                **common,
            )
        ]
        for expansion, channels, count, first_stride in STAGES:
            outputs = blocks.divisible(channels * width_factor)
            for block in range(count):
                stride = 1 if block else first_stride
                layers.append(
                    blocks.InvertedResidual(
                        inputs, outputs, stride=stride, expansion=expansion, **common
                    )
                )
                inputs = outputs
        outputs = blocks.divisible(1280 * max(1.0, width_factor))
        layers.append(blocks.ConvNorm(inputs, outputs, 1, **common))
        self.layers = nnx.List(layers)
        self.head = blocks.MeanHead(outputs, classes, dtype=self.dtype, rngs=rngs)

    def __call__(self, batch_BxHxWxC: jax.Array) -> jax.Array:
        x = blocks.images(batch_BxHxWxC, self.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
