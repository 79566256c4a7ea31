"""Flax NNX models, used as pure functions of their parameters."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxdec import registry
from jaxdec.models.cnn import Cnn
from jaxdec.models.efficientnet import EfficientNetB0
from jaxdec.models.gpt import Gpt
from jaxdec.models.mlp import Mlp
from jaxdec.models.mobilenet import MobileNetV2
from jaxdec.models.resnet import ResNet, ResNet20
from jaxdec.models.transformer import Transformer
from jaxdec.models.vgg import Vgg16

NAMES: dict[str, Callable[..., nnx.Module]] = {
    "cnn": Cnn,
    "efficientnet_b0": EfficientNetB0,
    "gpt": Gpt,
    "mlp": Mlp,
    "mobilenet_v2": MobileNetV2,
    "resnet": ResNet,
    "resnet20": ResNet20,
    "transformer": Transformer,
    "vgg16": Vgg16,
}


def by_name(
    name: str, input_shape: tuple[int, ...], classes: int, *, rngs: nnx.Rngs, **fields: Any
) -> nnx.Module:
    """The model that a config names.

    Args:
      name: a key of `NAMES`.
      input_shape: of one example.
      classes: number of outputs.
      rngs: of the initialization.
      **fields: the model's own, those set to None left out.

    Raises:
      ValueError: an unknown name, or a field that the name does not take.

    >>> by_name("mlp", (8, 8), 10, rngs=nnx.Rngs(0), hidden=(4,)).layers[1].kernel.shape
    (4, 10)
    """
    given = {field: value for field, value in fields.items() if value is not None}
    factory = registry.lookup("model", NAMES, name, {**given, "rngs": rngs}, given=2)
    return factory(input_shape, classes, rngs=rngs, **given)


class Functional(NamedTuple):
    """A model as a pure function."""

    # (params, statistics, inputs, *, key=None) → (outputs, statistics); with a key: as in training,
    # where dropout draws from it and batch statistics move; without: as in evaluation.
    apply: Callable[..., tuple[jax.Array, Any]]
    params: Any
    statistics: Any  # what is neither trained nor gossiped: running batch statistics


def functional(model: nnx.Module) -> Functional:
    """The pure function of a model's parameters, and its values as they are.

    >>> import jax.numpy as jnp
    >>> apply, params, statistics = functional(Mlp((2,), 3, hidden=(), rngs=nnx.Rngs(0)))
    >>> logits, statistics = apply(params, statistics, jnp.ones((1, 2)))
    >>> logits.shape
    (1, 3)
    """
    graph, params, statistics = nnx.split(model, nnx.Param, nnx.Not(nnx.Param))  # type: ignore[misc]
    draws = "rngs" in inspect.signature(type(model).__call__).parameters

    def apply(params: Any, statistics: Any, inputs: Any, *, key: Any = None) -> Any:
        called = nnx.merge(graph, params, statistics, copy=True)
        if key is None:
            called.eval()
            outputs = called(inputs)
        else:
            called.train()
            outputs = called(inputs, rngs=key) if draws else called(inputs)
        return outputs, nnx.state(called, nnx.Not(nnx.Param))

    return Functional(apply, params, statistics)


__all__ = [
    "NAMES",
    "Cnn",
    "EfficientNetB0",
    "Functional",
    "Gpt",
    "Mlp",
    "MobileNetV2",
    "ResNet",
    "ResNet20",
    "Transformer",
    "Vgg16",
    "by_name",
    "functional",
]
