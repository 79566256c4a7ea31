"""What travels: formats that make one message of a leaf, and q(leaf) of a message.

Gossip's wire formats round every entry. The compressors of `choco` and `deep_squeeze` may leave
entries out. A message is one array, so that a leaf takes one permute an exchange; keys are the same
on all nodes, so that equal leaves make equal messages.
"""

import dataclasses
import math
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


class Format(Protocol):
    """Q in two halves: x → message on the sender, message → q(x) on all who have it."""

    draws: ClassVar[bool]  # whether it needs a key

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """One array, of a size that the shape and dtype of x decide."""

    def decode(
        self, message: jax.Array, like: jax.ShapeDtypeStruct, key: jax.Array | None
    ) -> jax.Array:
        """q(x) in the dtype of sums, for x of the shape and dtype of `like`."""


@dataclasses.dataclass(frozen=True)
class Floating:
    """Every entry, rounded to the nearest of a floating-point dtype; None: as it is."""

    dtype: DTypeLike | None = None
    draws: ClassVar[bool] = False

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        del key
        if self.dtype is None:
            return x
        if self.rounds(x.dtype):
            # Of two conversions in a row alone, XLA may keep the excess precision of the first.
            wire = jnp.finfo(self.dtype)
            x = lax.reduce_precision(x, exponent_bits=wire.nexp, mantissa_bits=wire.nmant)
        return x.astype(self.dtype)

    def decode(
        self, message: jax.Array, like: jax.ShapeDtypeStruct, key: jax.Array | None
    ) -> jax.Array:
        del key
        return message.astype(sum_dtype(like.dtype))

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

    >>> x = jnp.array([0.0, 0.5, 127.0])
    >>> message = Int8().encode(x, jax.random.key(0))
    >>> message.dtype, message.shape
    (dtype('uint8'), (7,))
    >>> float(Int8().decode(message, x, None)[1]) in (0.0, 1.0)
    True
    """

    draws: ClassVar[bool] = True

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        assert key is not None
        flat = x.reshape(-1).astype(sum_dtype(x.dtype))
        blocks = jnp.pad(jnp.abs(flat), (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
        scales = (jnp.max(blocks, axis=1) / LARGEST).astype(jnp.float32)
        divisors = jnp.where(scales > 0, scales, jnp.ones_like(scales)).astype(flat.dtype)
        noise = jax.random.uniform(key, flat.shape, flat.dtype)
        integers = jnp.floor(flat / _by_entry(divisors, flat.size) + noise)
        # The scale itself is rounded, so that the largest may come out just above 127.
        integers = jnp.clip(integers, -LARGEST, LARGEST).astype(jnp.int8)
        return jnp.concatenate([_bytes(integers), _bytes(scales)])

    def decode(
        self, message: jax.Array, like: jax.ShapeDtypeStruct, key: jax.Array | None
    ) -> jax.Array:
        del key
        size, wide = math.prod(like.shape), sum_dtype(like.dtype)
        integers = _of_bytes(message[:size], jnp.int8).astype(wide)
        scales = _of_bytes(message[size:], jnp.float32).astype(wide)
        return (integers * _by_entry(scales, size)).reshape(like.shape)

    def rounds(self, dtype: DTypeLike) -> bool:
        """Whether values of a dtype change."""
        del dtype
        return True


@dataclasses.dataclass(frozen=True)
class TopK:
    """The largest entries by absolute value, and where they are; zero elsewhere.

    The message of k entries is k values of the leaf's dtype and k int32 indices.

    >>> x = jnp.array([1.0, -4.0, 2.0, 3.0])
    >>> TopK(keep=0.5).decode(TopK(keep=0.5).encode(x, None), x, None)
    Array([ 0., -4.,  0.,  3.], dtype=float32)
    """

    keep: float  # share of entries, one at least
    draws: ClassVar[bool] = False

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        del key
        flat = x.reshape(-1)
        _, indices = lax.top_k(jnp.abs(flat), _kept(self.keep, x))
        return jnp.concatenate([_bytes(flat[indices]), _bytes(indices.astype(jnp.int32))])

    def decode(
        self, message: jax.Array, like: jax.ShapeDtypeStruct, key: jax.Array | None
    ) -> jax.Array:
        del key
        values, indices = jnp.split(message, [message.size - 4 * _kept(self.keep, like)])
        return _scattered(_of_bytes(values, like.dtype), _of_bytes(indices, jnp.int32), like)


@dataclasses.dataclass(frozen=True)
class RandomK:
    """Entries drawn at random, the same on all nodes; zero elsewhere.

    The message is their values alone: every node draws the indices from the key.

    >>> x = jnp.array([1.0, -4.0, 2.0, 3.0])
    >>> key = jax.random.key(0)
    >>> RandomK(keep=0.5).encode(x, key).shape
    (2,)
    >>> int((RandomK(keep=0.5).decode(RandomK(keep=0.5).encode(x, key), x, key) == x).sum())
    2
    """

    keep: float  # share of entries, one at least
    draws: ClassVar[bool] = True

    def encode(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return x.reshape(-1)[self._indices(x, key)]

    def decode(
        self, message: jax.Array, like: jax.ShapeDtypeStruct, key: jax.Array | None
    ) -> jax.Array:
        return _scattered(message, self._indices(like, key), like)

    def _indices(self, like: jax.ShapeDtypeStruct | jax.Array, key: jax.Array | None) -> jax.Array:
        assert key is not None
        size = math.prod(like.shape)
        return jax.random.choice(key, size, (_kept(self.keep, like),), replace=False)


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
    message = jax.eval_shape(form.encode, like, key)
    return message.size * message.dtype.itemsize


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which values of a floating-point dtype are summed: float32 at least.

    >>> sum_dtype("bfloat16"), sum_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    return jnp.dtype(dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32)


def _kept(keep: float, like: jax.ShapeDtypeStruct | jax.Array) -> int:
    return max(1, round(keep * math.prod(like.shape)))


def _by_entry(blocks: jax.Array, size: int) -> jax.Array:
    return jnp.repeat(blocks, BLOCK)[:size]


def _scattered(values: jax.Array, indices: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    wide = sum_dtype(like.dtype)
    zeros = jnp.zeros(math.prod(like.shape), wide)
    return zeros.at[indices].set(values.astype(wide)).reshape(like.shape)


def _bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _of_bytes(message: jax.Array, dtype: DTypeLike) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    shaped = message if width == 1 else message.reshape(-1, width)
    return lax.bitcast_convert_type(shaped, dtype)
