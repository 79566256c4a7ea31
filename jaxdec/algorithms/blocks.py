"""What several algorithms share: gradient preparation, schedules and tree arithmetic."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdec import wire
from jaxdec.gossip import Gossip

PyTree = Any
Decay = Literal["all", "matrices"]
Order = Literal["awc", "atc"]


def check_order(order: Order) -> None:
    """Refuse an unknown order of adapting and communicating."""
    if order not in ("awc", "atc"):
        raise ValueError(f'order={order!r} is unknown; write "awc" or "atc"')


def decay_mask(decay: Decay) -> Callable[[PyTree], PyTree] | None:
    """Which parameters of one node decay, as optax's `mask`; None: all.

    "matrices" are leaves of two axes or more: kernels and embeddings, not biases and scales.

    >>> import numpy as np
    >>> decay_mask("matrices")({"kernel": np.ones((2, 2)), "bias": np.ones(2)})
    {'bias': False, 'kernel': True}
    """
    if decay not in ("all", "matrices"):
        raise ValueError(f'decay={decay!r} is unknown; write "all" or "matrices"')
    if decay == "all":
        return None
    return lambda params: jax.tree.map(lambda x: jnp.ndim(x) >= 2, params)


def prepared(
    core: optax.GradientTransformationExtraArgs,
    weight_decay: float,
    clip_norm: float | None,
    decay: Decay = "all",
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradient, add coupled weight decay, and hand it to `core`.

    G ← G · min(1, clip_norm / ‖G‖) over all leaves of one node, then G ← G + weight_decay · X, in
    the leaves of `decay_mask`.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm} must be above 0, or None for no clipping")
    check_not_negative(weight_decay=weight_decay)
    mask = decay_mask(decay)
    blocks: list[optax.GradientTransformation] = []
    if clip_norm is not None:
        blocks.append(optax.clip_by_global_norm(clip_norm))
    if weight_decay:
        blocks.append(optax.add_decayed_weights(weight_decay, mask))
    return optax.with_extra_args_support(optax.chain(*blocks, core)) if blocks else core


class SteppedState(NamedTuple):
    """State of a `stepped` algorithm."""

    steps: jax.Array  # int32 []; steps taken
    inner: Any  # the algorithm's own


def stepped(
    name: str,
    init_fn: Callable[[optax.Params], Any],
    step_fn: Callable[..., tuple[optax.Updates, Any]],
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """A transform from a step at a given learning rate; gradients come to it like parameters.

    Args:
      name: of the algorithm, for errors.
      init_fn: parameters → the algorithm's own state.
      step_fn: (gradients, own state, parameters, γ, phase, key) → (updates, own state).
      learning_rate: γ, a number or a schedule of the steps taken.
    """

    def init(params: optax.Params) -> SteppedState:
        return SteppedState(jnp.zeros([], jnp.int32), init_fn(params))

    def update(
        updates: optax.Updates,
        state: SteppedState,
        params: optax.Params | None = None,
        *,
        phase: Any = 0,
        key: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SteppedState]:
        del extra
        need_params(name, params)
        updates = jax.tree.map(lambda g, x: jnp.asarray(g, jnp.result_type(x)), updates, params)
        rate = learning_rate(state.steps) if callable(learning_rate) else learning_rate
        updates, inner = step_fn(updates, state.inner, params, rate, phase, key)
        return updates, SteppedState(optax.safe_increment(state.steps), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def compressor(
    algorithm: str, gossip: Gossip, consensus_rate: float, name: str | None, keep: float | None
) -> wire.Format:
    """The compressor of an algorithm, once its gossip leaves the messages to it.

    Raises:
      ValueError: a rate outside (0, 1], a bad compressor, or a gossip with a format or hosts.
    """
    if not 0 < consensus_rate <= 1:
        raise ValueError(f"consensus_rate={consensus_rate} must be in (0, 1]")
    if gossip.wire_dtype is not None:
        raise ValueError(
            f"wire_dtype={gossip.wire_dtype!r} is set, but what {algorithm} sends is its "
            "compressor's; write wire_dtype=None, and compressor='int8' for bytes"
        )
    if gossip.local_axis is not None:
        raise ValueError(
            f"local_axis={gossip.local_axis!r} is set, but {algorithm} compresses every replica's "
            "own messages; write local_axis=None, over the flat topology"
        )
    return wire.compressor(name, keep)


def scale(factor: Any, tree: PyTree) -> PyTree:
    """Factor · tree, in the dtype of each leaf."""
    return jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)


def add(*trees: PyTree) -> PyTree:
    """The sum of trees of one structure, in the dtypes of the first."""
    return jax.tree.map(lambda x, *rest: x + sum(y.astype(x.dtype) for y in rest), *trees)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """A − b, in the dtypes of a."""
    return jax.tree.map(lambda x, y: x - y.astype(x.dtype), a, b)


def divisor(rate: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Whether γ is above zero in a dtype, and γ in it, or one where it is not."""
    gamma = jnp.asarray(rate, dtype)
    moves = gamma >= jnp.finfo(dtype).tiny
    return moves, jnp.where(moves, gamma, jnp.ones_like(gamma))


def zeros_like(tree: PyTree) -> PyTree:
    """Zeros of the shapes and dtypes of a tree."""
    return jax.tree.map(jnp.zeros_like, tree)


def need_params(name: str, params: PyTree | None) -> None:
    """Refuse an update without the models that it averages."""
    if params is None:
        raise ValueError(f"{name}.update averages parameters; call update(grads, state, params)")


def check_not_negative(**values: float) -> None:
    """Refuse a value that is negative or not finite."""
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value} must be 0 or more, and finite")


def check_momentum(**values: float) -> None:
    """Refuse a momentum outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be in [0, 1)")
