"""What travels: formats that make one message of a leaf, and q(leaf) of a message.

Gossip's wire formats round every entry. The compressors of `choco` and `deep_squeeze` may leave
entries out. A message is one array, so that a leaf takes one permute an exchange; keys are the same
on all nodes, so that equal leaves make equal messages.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdec import registry

DTYPES = ("bfloat16", "float16", "float32", "int8")
COMPRESSORS = ("int8", "random_k", "top_k")
BLOCK = 256
LARGEST = 127


# q(x) in the dtype of sums, from the message that any node made of this leaf with this key.
Decode = Callable[[jax.Array], jax.Array]


class Format(Protocol):
    """Q in two halves: x → message on the sender, message → q(x) on all who have it."""

    draws: ClassVar[bool]  # whether it needs a key

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Decode]:
        """One array, of a size that the shape and dtype of x decide, and what reads it."""


@dataclasses.dataclass(frozen=True)
class Floating:
    """Every entry, rounded to the nearest of a floating-point dtype; None: as it is."""

    dtype: DTypeLike | None = None
    draws: ClassVar[bool] = False

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Decode]:
        del key
        wide = sum_dtype(x.dtype)
        if self.rounds(x.dtype):
            # Of two conversions in a row alone, XLA may keep the excess precision of the first.
            wire = jnp.finfo(self.dtype)
            x = lax.reduce_precision(x, exponent_bits=wire.nexp, mantissa_bits=wire.nmant)
        message = x if self.dtype is None else x.astype(self.dtype)
        return message, lambda message: message.astype(wide)

    def rounds(self, dtype: DTypeLike) -> bool:
        """Whether values of a dtype change."""
        return self.dtype is not None and jnp.finfo(self.dtype).nmant < jnp.finfo(dtype).nmant


@dataclasses.dataclass(frozen=True)
class Int8:
    """Every entry, rounded at random to a multiple of its block's scale: E q(x) = x.

    Blocks are 256 entries of the flattened leaf. With s = max |x| / 127 over a block, and u uniform
    in [0, 1), one for each entry: q(x) = s ⌊x/s + u⌋, so that |q(x) − x| < s.

    The message of m entries is m integers and ⌈m/256⌉ float32 scales: 0.254 of float32's bytes.
    What is not finite makes its block NaN.

    >>> message, decode = Int8().encode(jnp.array([0.0, 0.5, 127.0]), jax.random.key(0))
    >>> message.dtype, message.shape
    (dtype('uint8'), (7,))
    >>> float(decode(message)[1]) in (0.0, 1.0)
    True
    """

    draws: ClassVar[bool] = True

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Decode]:
        assert key is not None
        flat = x.reshape(-1).astype(sum_dtype(x.dtype))
        blocks = jnp.pad(jnp.abs(flat), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
        scales = (jnp.max(blocks, axis=1) / LARGEST).astype(jnp.float32)
        divisors = jnp.where(scales > 0, scales, jnp.ones_like(scales))
        noise = jax.random.uniform(key, flat.shape, flat.dtype)

        def by_entry(scales: jax.Array) -> jax.Array:
            return jnp.repeat(scales.astype(flat.dtype), BLOCK)[: x.size]

        integers = jnp.floor(flat / by_entry(divisors) + noise)
        # The scale itself is rounded, so that the largest may come out just above 127.
        integers = jnp.clip(integers, -LARGEST, LARGEST).astype(jnp.int8)

        def decode(message: jax.Array) -> jax.Array:
            integers, scales = jnp.split(message, [x.size])
            q = _of_bytes(integers, jnp.int8).astype(flat.dtype)
            return (q * by_entry(_of_bytes(scales, jnp.float32))).reshape(x.shape)

        return jnp.concatenate([_bytes(integers), _bytes(scales)]), decode

    def rounds(self, dtype: DTypeLike) -> bool:
        """Whether values of a dtype change."""
        del dtype
        return True


@dataclasses.dataclass(frozen=True)
class TopK:
    """The largest entries by absolute value, and where they are; zero elsewhere.

    The message of k entries is k values of the leaf's dtype and k int32 indices.

    >>> message, decode = TopK(keep=0.5).encode(jnp.array([1.0, -4.0, 2.0, 3.0]), None)
    >>> message.nbytes, decode(message).tolist()
    (16, [0.0, -4.0, 0.0, 3.0])
    """

    keep: float  # share of entries, one at least
    draws: ClassVar[bool] = False

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Decode]:
        del key
        k = _kept(self.keep, x)
        _, indices = lax.top_k(jnp.abs(x.reshape(-1)), k)
        values = x.reshape(-1)[indices]

        def decode(message: jax.Array) -> jax.Array:
            values, indices = jnp.split(message, [k * x.dtype.itemsize])
            return _scattered(_of_bytes(values, x.dtype), _of_bytes(indices, jnp.int32), x)

        return jnp.concatenate([_bytes(values), _bytes(indices.astype(jnp.int32))]), decode


@dataclasses.dataclass(frozen=True)
class RandomK:
    """Entries drawn at random, the same on all nodes; zero elsewhere.

    The message is their values alone: every node draws the indices from the key.

    >>> message, decode = RandomK(keep=0.5).encode(jnp.arange(4.0), jax.random.key(1))
    >>> message.nbytes, decode(message).tolist()
    (8, [0.0, 0.0, 2.0, 3.0])
    """

    keep: float  # share of entries, one at least
    draws: ClassVar[bool] = True

    def encode(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Decode]:
        assert key is not None
        indices = jax.random.choice(key, x.size, (_kept(self.keep, x),), replace=False)
        return x.reshape(-1)[indices], lambda message: _scattered(message, indices, x)


def wire_format(dtype: DTypeLike) -> Floating | Int8:
    """The format that `Gossip.wire_dtype` names.

    Raises:
      ValueError: none is called so.

    >>> wire_format("bf16")
    Traceback (most recent call last):
    ValueError: wire_dtype='bf16' is not a wire format; write one of bfloat16, ...
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(
            f"wire_dtype={dtype!r} is not a wire format; "
            f"write one of {', '.join(DTYPES)}, or None for the parameters' own"
        )
    return Int8() if name == "int8" else Floating(dtype)


def compressor(name: str | None, keep: float | None) -> Format:
    """The format that `choco` and `deep_squeeze` name; None: every entry as it is.

    Args:
      name: one of `COMPRESSORS`, or None.
      keep: share of a leaf's entries that "top_k" and "random_k" send, in (0, 1].

    Raises:
      ValueError: an unknown name; or a share that is missing, not in (0, 1], or not taken.

    >>> compressor("top_k", 0.1)
    TopK(keep=0.1)
    """
    if name is not None and name not in COMPRESSORS:
        raise ValueError(
            f"compressor={name!r} is unknown; {registry.suggestion(name, COMPRESSORS)}"
        )
    if name in (None, "int8"):
        if keep is not None:
            raise ValueError(
                f"keep={keep} is set, but compressor={name!r} sends every entry; write keep=None, "
                "or compressor='top_k' or 'random_k'"
            )
        return Floating() if name is None else Int8()
    if keep is None:
        raise ValueError(
            f"compressor={name!r} needs keep, the share of entries that it sends, such as 0.1"
        )
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} must be in (0, 1], a share of a leaf's entries")
    return TopK(keep) if name == "top_k" else RandomK(keep)


def message_bytes(form: Format, like: jax.ShapeDtypeStruct) -> int:
    """Bytes of the message of a leaf.

    >>> message_bytes(Int8(), jax.ShapeDtypeStruct((1000,), jnp.float32))
    1016
    """
    if math.prod(like.shape) == 0:
        return 0
    key = jax.eval_shape(jax.random.key, 0)
    message = jax.eval_shape(lambda x, key: form.encode(x, key)[0], like, key)
    return message.size * message.dtype.itemsize


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which values of a floating-point dtype are summed: float32 at least.

    >>> sum_dtype("bfloat16"), sum_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    return jnp.dtype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def _kept(keep: float, x: jax.Array) -> int:
    return max(1, round(keep * x.size))


def _scattered(values: jax.Array, indices: jax.Array, x: jax.Array) -> jax.Array:
    """A leaf like x, in the dtype of sums, with values at indices and zeros elsewhere."""
    wide = sum_dtype(x.dtype)
    return jnp.zeros(x.size, wide).at[indices].set(values.astype(wide)).reshape(x.shape)


def _bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _of_bytes(message: jax.Array, dtype: DTypeLike) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    shaped = message if width == 1 else message.reshape(-1, width)
    return lax.bitcast_convert_type(shaped, dtype)
