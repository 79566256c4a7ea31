"""VGG-16 for CIFAR, with batch norm."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import blocks

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg16(nnx.Module):
    """The convolutions of VGG-16 (arXiv 1409.1556, configuration D) and one dense layer.

    Differs from the paper, as is usual for CIFAR: batch norm after each convolution, and
    512 → classes in place of three dense layers. 14,728,266 parameters at 10 classes.

    Args:
      input_shape: (H, W) or (H, W, C), H and W at least 32.
      classes: number of outputs.
      width_factor: multiplies the channels.
      dtype: of the computation; parameters, batch statistics and logits are float32.
      rngs: of the initialization.

    Raises:
      ValueError: the image is too small for five poolings.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        width_factor: float = 1.0,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        if min(input_shape[:2]) < 2 ** len(STAGES):
            raise ValueError(
                f"input_shape={tuple(input_shape)} is too small for vgg16; "
                f"its sides must be at least {2 ** len(STAGES)}, or use cnn or resnet20"
            )
        self.dtype = blocks.compute_dtype(dtype)
        inputs = blocks.image_channels(input_shape)
        stages = []
        for stage in STAGES:
            convs = []
            for channels in stage:
                outputs = blocks.divisible(channels * width_factor)
                convs.append(
                    blocks.ConvNorm(inputs, outputs, bias=True, dtype=self.dtype, rngs=rngs)
                )
                inputs = outputs
            stages.append(nnx.List(convs))
        self.stages = nnx.List(stages)
        self.head = blocks.MeanHead(inputs, classes, dtype=self.dtype, rngs=rngs)

    def __call__(self, batch_BxHxWxC: jax.Array) -> jax.Array:
        x = blocks.images(batch_BxHxWxC, self.dtype)
        for stage in self.stages:
            for conv in stage:
                x = conv(x)
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(x)
