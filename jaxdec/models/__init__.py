"""Flax NNX models, used as pure functions of their parameters."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxdec import registry
from jaxdec.models.mlp import Mlp

NAMES: dict[str, Callable[..., nnx.Module]] = {"mlp": Mlp}

Apply = Callable[[Any, jax.Array], jax.Array]


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


def functional(model: nnx.Module) -> tuple[Apply, Any]:
    """A model as (apply, params), with apply(params, batch) pure.

    >>> import jax.numpy as jnp
    >>> apply, params = functional(Mlp((2,), 3, hidden=(), rngs=nnx.Rngs(0)))
    >>> apply(params, jnp.ones((1, 2))).shape
    (1, 3)
    """
    graph, params = nnx.split(model, nnx.Param)

    def apply(params: Any, batch: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(batch)

    return apply, params


__all__ = ["NAMES", "Mlp", "by_name", "functional"]
