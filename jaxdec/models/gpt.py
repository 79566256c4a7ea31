"""GPT-2, and the same decoder with Llama's layers."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import attention, blocks

STYLES = ("gpt2", "llama")


class Gpt(nnx.Module):
    """A decoder of pre-norm blocks whose head is its embedding (tied).

    x ← embed(tokens); x ← x + attention(norm(x)), x ← x + mlp(norm(x)) in each block;
    logits = norm(x) embedᵀ.

    "gpt2": LayerNorm, learned positions, GELU (tanh), biases; 124,439,808 parameters with 1024
    tokens and a vocabulary of 50257. "llama": RMSNorm, rotary positions, SwiGLU, no biases.

    Weights start from N(0, 0.02²), those that write into x from N(0, 0.02² / 2·layers).

    Args:
      input_shape: (T,), the context: learned positions are its length.
      classes: size of the vocabulary.
      layers: number of blocks.
      heads: of the attention; a divisor of width.
      width: of x.
      style: "gpt2" or "llama".
      dropout: rate, after the embedding, the attention weights, attention and mlp; above zero a
        call in train mode needs `rngs`.
      remat: keep only what enters a block, and compute the block again in the backward pass.
      dtype: of the computation; parameters, norms, softmax and logits are float32.
      rngs: of the initialization.

    Raises:
      ValueError: an unknown style, heads that do not fit the width, or inputs that are no texts.

    >>> model = Gpt((8,), 100, layers=1, heads=2, width=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 100)
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
        style: str = "gpt2",
        dropout: float = 0.0,
        remat: bool = False,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        if style not in STYLES:
            raise ValueError(f"{style=} is unknown; choices: {', '.join(STYLES)}")
        if width % heads or (style == "llama" and width // heads % 2):
            even = "an even multiple" if style == "llama" else "a multiple"
            raise ValueError(f"{width=} must be {even} of {heads=} for style {style!r}")
        if len(input_shape) != 1:
            raise ValueError(f"input_shape={tuple(input_shape)} must be (tokens,)")
        (self.context,) = input_shape
        self.dtype = blocks.compute_dtype(dtype)
        self.remat = remat
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(classes, width, embedding_init=init, rngs=rngs)
        self.positions = (
            nnx.Embed(self.context, width, embedding_init=init, rngs=rngs)
            if style == "gpt2"
            else None
        )
        self.drop = nnx.Dropout(dropout)
        self.blocks = nnx.List(
            [
                Block(heads, width, layers, style, dropout, dtype=self.dtype, rngs=rngs)
                for _ in range(layers)
            ]
        )
        self.norm = _norm(style, width, rngs)

    def __call__(
        self, tokens_BxT: jax.Array, rngs: nnx.Rngs | jax.Array | None = None
    ) -> jax.Array:
        length = tokens_BxT.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit input_shape=({self.context},)")
        key = attention.dropout_key(self.drop, rngs)
        keys = attention.split_key(key, len(self.blocks) + 1)
        # Looked up in float32, so that the gradient's sums over equal tokens are float32 too.
        x = self.embed(tokens_BxT)
        if self.positions is not None:
            x += jnp.broadcast_to(self.positions(jnp.arange(length)), x.shape)
        x = self.drop(x, rngs=keys[0]).astype(self.dtype)
        apply_block = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for block, key in zip(self.blocks, keys[1:], strict=True):
            x = apply_block(block, x, key)
        x = self.norm(x).astype(self.dtype)
        logits = jnp.einsum("btd,vd->btv", x, self.embed.embedding.astype(self.dtype))
        return logits.astype(jnp.float32)


class Block(nnx.Module):
    """Attention and mlp, each reading a norm of x and adding to x."""

    def __init__(
        self,
        heads: int,
        width: int,
        layers: int,
        style: str,
        dropout: float,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        def linear(inputs: int, outputs: int, std: float = 0.02) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=style == "gpt2",
                kernel_init=nnx.initializers.normal(std),
                dtype=dtype,
                rngs=rngs,
            )

        residual_std = 0.02 / math.sqrt(2 * layers)
        self.heads = heads
        self.rotary = style == "llama"
        self.dtype = dtype
        self.attention_norm = _norm(style, width, rngs)
        self.qkv = linear(width, 3 * width)
        self.attention_out = linear(width, width, residual_std)
        self.mlp_norm = _norm(style, width, rngs)
        hidden = 4 * width if style == "gpt2" else -(-8 * width // 3 // 64) * 64
        self.gate = linear(width, hidden) if style == "llama" else None
        self.up = linear(width, hidden)
        self.down = linear(hidden, width, residual_std)
        self.drop = nnx.Dropout(dropout)

    def __call__(self, x_BxTxD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        keys = attention.split_key(key, 3)
        x = x_BxTxD
        attended = self._attention(self.attention_norm(x).astype(self.dtype), keys[0])
        x += self.drop(attended, rngs=keys[1])
        return x + self.drop(self._mlp(self.mlp_norm(x).astype(self.dtype)), rngs=keys[2])

    def _attention(self, x_BxTxD: jax.Array, key: jax.Array | None) -> jax.Array:
        batch, length, width = x_BxTxD.shape
        # Columns are ordered by head, so that a model axis may split them.
        qkv = self.qkv(x_BxTxD).reshape(batch, length, self.heads, 3, -1)
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        causal = jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
        attended = attention.attend(q, k, v, causal, functools.partial(self.drop, rngs=key))
        return self.attention_out(attended.reshape(batch, length, width))

    def _mlp(self, x_BxTxD: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(nnx.gelu(self.up(x_BxTxD), approximate=True))
        return self.down(nnx.silu(self.gate(x_BxTxD)) * self.up(x_BxTxD))


def rotate(x_BxTxHxD: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary positions (arXiv 2104.09864): products of rotated q and k see only their distance.

    Pair (x_i, x_{i+D/2}) at position t turns by t · base^(−2i/D).

    >>> q = rotate(jnp.ones((1, 4, 1, 2)))
    >>> [f"{jnp.vdot(q[0, t + 1], q[0, t]):.4f}" for t in range(3)]
    ['1.0806', '1.0806', '1.0806']
    """
    length, half = x_BxTxHxD.shape[1], x_BxTxHxD.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half)
    angles = jnp.outer(jnp.arange(length), frequencies).reshape(1, length, 1, half)
    shape = (*x_BxTxHxD.shape[:-1], half)
    cos, sin = (jnp.broadcast_to(f(angles), shape) for f in (jnp.cos, jnp.sin))
    first, second = x_BxTxHxD[..., :half], x_BxTxHxD[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x_BxTxHxD.dtype)


def _norm(style: str, width: int, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    norm = nnx.LayerNorm if style == "gpt2" else nnx.RMSNorm
    return norm(width, epsilon=1e-5, dtype=jnp.float32, rngs=rngs)
