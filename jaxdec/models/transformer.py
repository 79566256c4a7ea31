"""The encoder-decoder of 2017, for translation."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxdec.models import attention, blocks

PAD = 0

KeysValues = tuple[jax.Array, jax.Array]  # each [B, tokens, heads, width / heads]


class Transformer(nnx.Module):
    """The transformer of "Attention is all you need" (arXiv 1706.03762).

    Each sublayer of attention or mlp is followed by its norm, x ← norm(x + sublayer(x)), as
    published; later transformers, and `Gpt`, normalize before. One embedding of width D serves
    source, target and output: x = √D embed(tokens) + sinusoids, logits = x embedᵀ. Token 0 is
    padding: no source position of it is seen. Target padding must follow the text, where
    causality hides it.

    With layers L, width D, mlp F and a vocabulary V there are VD + L(12D² + 4DF + 2F + 12D)
    parameters: at V = 37,000 63,045,632 in the base model and 214,171,648 in the big one
    (layers=6, heads=16, width=1024, mlp=4096), where the paper rounds to 65 and 213 million.

    Projections start Glorot uniform, the embedding from N(0, 1/D).

    Args:
      input_shape: (S, T), tokens of the longest source and target; sinusoids fit any.
      classes: size of the vocabulary that both languages share.
      layers: of the encoder, and of the decoder.
      heads: of the attention; a divisor of width.
      width: of x, even.
      mlp: units of the hidden layers.
      dropout: rate, after the embeddings and each sublayer; above zero a call in train mode needs
        `rngs`.
      remat: keep only what enters a layer, and compute the layer again in the backward pass.
      dtype: of the computation; parameters, norms, softmax and logits are float32.
      rngs: of the initialization.

    Raises:
      ValueError: heads that do not fit the width, or inputs that are no pairs of texts.

    >>> model = Transformer((4, 3), 50, layers=1, heads=2, width=8, mlp=16, rngs=nnx.Rngs(0))
    >>> model.eval()
    >>> source, target = jnp.array([[4, 5, 6, 0]]), jnp.array([[2, 7, 8]])
    >>> model({"source": source, "target": target}).shape
    (1, 3, 50)
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        layers: int = 6,
        heads: int = 8,
        width: int = 512,
        mlp: int = 2048,
        dropout: float = 0.1,
        remat: bool = False,
        dtype: DTypeLike = jnp.float32,
        *,
        rngs: nnx.Rngs,
    ):
        if width % heads or width % 2:
            raise ValueError(f"{width=} must be even and a multiple of {heads=}")
        if len(input_shape) != 2:
            raise ValueError(
                f"input_shape={tuple(input_shape)} must be (source tokens, target tokens)"
            )
        self.dtype = dtype = blocks.compute_dtype(dtype)
        self.remat = remat
        self.embed = nnx.Embed(
            classes, width, embedding_init=nnx.initializers.normal(width**-0.5), rngs=rngs
        )
        self.drop = nnx.Dropout(dropout)
        self.encoder = nnx.List(
            [EncoderLayer(heads, width, mlp, dropout, dtype, rngs) for _ in range(layers)]
        )
        self.decoder = nnx.List(
            [DecoderLayer(heads, width, mlp, dropout, dtype, rngs) for _ in range(layers)]
        )

    def __call__(
        self, inputs: Mapping[str, jax.Array], rngs: nnx.Rngs | jax.Array | None = None
    ) -> jax.Array:
        """Logits of the token that follows each target position.

        Args:
          inputs: "source" int32 [B, S] and "target" int32 [B, T], which starts with the
            beginning of text: its position t is answered by the label of target token t + 1.
          rngs: key of the dropout.

        Returns:
          float32 [B, T, classes].
        """
        keys = attention.split_key(attention.dropout_key(self.drop, rngs), 2)
        seen_BxS = inputs["source"] != PAD
        memory = self.encode(inputs["source"], keys[0])
        return self.decode(inputs["target"], memory, seen_BxS, keys[1])

    def encode(self, source_BxS: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """What the decoder attends to: [B, S, width]."""
        keys = attention.split_key(key, len(self.encoder) + 1)
        seen = _each_query(source_BxS != PAD, source_BxS.shape[1])
        x = self._embedded(source_BxS, jnp.arange(source_BxS.shape[1]), keys[0])
        layer_call = nnx.remat(EncoderLayer.__call__) if self.remat else EncoderLayer.__call__
        for layer, key in zip(self.encoder, keys[1:], strict=True):
            x = layer_call(layer, x, seen, key)
        return x

    def decode(
        self,
        target_BxT: jax.Array,
        memory_BxSxD: jax.Array,
        seen_BxS: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits [B, T, classes] of whole targets; `seen_BxS` is false on source padding."""
        keys = attention.split_key(key, len(self.decoder) + 1)
        batch, length = target_BxT.shape
        causal = jnp.broadcast_to(jnp.tri(length, dtype=bool), (batch, length, length))
        seen = _each_query(seen_BxS, length)
        x = self._embedded(target_BxT, jnp.arange(length), keys[0])
        layer_call = nnx.remat(_decode_whole) if self.remat else _decode_whole
        for layer, key in zip(self.decoder, keys[1:], strict=True):
            x = layer_call(layer, x, memory_BxSxD, causal, seen, key)
        return self._logits(x)

    def start(
        self, memory_BxSxD: jax.Array, length: int
    ) -> tuple[list[KeysValues], list[KeysValues]]:
        """The caches of a decoding by `step`.

        Args:
          memory_BxSxD: from `encode`.
          length: most tokens that will be decoded.

        Returns:
          The past of each layer, keys and values of target positions, zeros as yet; and each
          layer's keys and values of the memory.
        """
        sources = [layer.cross.keys_values(memory_BxSxD) for layer in self.decoder]
        shape = (len(memory_BxSxD), length, *sources[0][0].shape[2:])
        past = [(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in sources]
        return past, sources

    def step(
        self,
        token_B: jax.Array,
        position: jax.Array,
        past: Sequence[KeysValues],
        sources: Sequence[KeysValues],
        seen_BxS: jax.Array,
    ) -> tuple[jax.Array, list[KeysValues]]:
        """One position of `decode`: logits [B, classes], and the past with this position."""
        x = self._embedded(token_B[:, jnp.newaxis], position[jnp.newaxis], None)
        batch, length = past[0][0].shape[:2]
        until = jnp.broadcast_to(jnp.arange(length) <= position, (batch, 1, length))
        seen = _each_query(seen_BxS, 1)
        extended = []
        for layer, before, source in zip(self.decoder, past, sources, strict=True):
            now = layer.attention.keys_values(x)
            own = (
                before[0].at[:, position].set(now[0][:, 0]),
                before[1].at[:, position].set(now[1][:, 0]),
            )
            x = layer(x, own, source, until, seen)
            extended.append(own)
        return self._logits(x)[:, 0], extended

    def _embedded(
        self, tokens_BxT: jax.Array, positions_T: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        # Looked up in float32, so that the gradient's sums over equal tokens are float32 too.
        x = self.embed(tokens_BxT) * self.embed.features**0.5
        x += jnp.broadcast_to(sinusoids(positions_T, self.embed.features), x.shape)
        return self.drop(x, rngs=key).astype(self.dtype)

    def _logits(self, x_BxTxD: jax.Array) -> jax.Array:
        embedding = self.embed.embedding.astype(self.dtype)
        return jnp.einsum("btd,vd->btv", x_BxTxD, embedding).astype(jnp.float32)


def sinusoids(positions_T: jax.Array, width: int) -> jax.Array:
    """[T, width]: sin(t / 10000^(2i/width)) in column 2i, the cosine in column 2i + 1.

    >>> sinusoids(jnp.arange(2), 2).round(4).tolist()
    [[0.0, 1.0], [0.8414999842643738, 0.5403000116348267]]
    """
    # The frequencies in float64: float32 powers would differ between devices.
    frequencies = jnp.asarray(10_000.0 ** -(np.arange(0, width, 2) / width), jnp.float32)
    angles = jnp.outer(positions_T.astype(jnp.float32), frequencies)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(-1, width)


class EncoderLayer(nnx.Module):
    """Self-attention and mlp, each added to x and normalized."""

    def __init__(
        self, heads: int, width: int, mlp: int, dropout: float, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.attention = Attention(heads, width, dtype, rngs)
        self.attention_norm = PostNorm(width, dropout, dtype, rngs)
        self.mlp = Mlp(width, mlp, dtype, rngs)
        self.mlp_norm = PostNorm(width, dropout, dtype, rngs)

    def __call__(
        self, x_BxSxD: jax.Array, seen_BxSxS: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        keys = attention.split_key(key, 2)
        x = x_BxSxD
        attended = self.attention(x, self.attention.keys_values(x), seen_BxSxS)
        x = self.attention_norm(x, attended, keys[0])
        return self.mlp_norm(x, self.mlp(x), keys[1])


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the source, and mlp, each added to x and normalized."""

    def __init__(
        self, heads: int, width: int, mlp: int, dropout: float, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.attention = Attention(heads, width, dtype, rngs)
        self.attention_norm = PostNorm(width, dropout, dtype, rngs)
        self.cross = Attention(heads, width, dtype, rngs)
        self.cross_norm = PostNorm(width, dropout, dtype, rngs)
        self.mlp = Mlp(width, mlp, dtype, rngs)
        self.mlp_norm = PostNorm(width, dropout, dtype, rngs)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        own: KeysValues,
        source: KeysValues,
        own_seen_BxTxK: jax.Array,
        source_seen_BxTxS: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        keys = attention.split_key(key, 3)
        x = x_BxTxD
        x = self.attention_norm(x, self.attention(x, own, own_seen_BxTxK), keys[0])
        x = self.cross_norm(x, self.cross(x, source, source_seen_BxTxS), keys[1])
        return self.mlp_norm(x, self.mlp(x), keys[2])


def _decode_whole(
    layer: DecoderLayer,
    x_BxTxD: jax.Array,
    memory_BxSxD: jax.Array,
    causal_BxTxT: jax.Array,
    seen_BxTxS: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    own = layer.attention.keys_values(x_BxTxD)
    source = layer.cross.keys_values(memory_BxSxD)
    return layer(x_BxTxD, own, source, causal_BxTxT, seen_BxTxS, key)


class Attention(nnx.Module):
    """Attention of many heads, without biases."""

    def __init__(self, heads: int, width: int, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(outputs: int) -> nnx.Linear:
            # By its inputs: Glorot's for each of the square matrices that a kernel consists of.
            init = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
            return nnx.Linear(
                width, outputs, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs
            )

        self.heads = heads
        self.query = linear(width)
        self.key_value = linear(2 * width)
        self.out = linear(width)

    def keys_values(self, x_BxKxD: jax.Array) -> KeysValues:
        # Columns are ordered by head, so that a model axis may split them.
        both = self.key_value(x_BxKxD).reshape(*x_BxKxD.shape[:2], self.heads, 2, -1)
        return both[:, :, :, 0], both[:, :, :, 1]

    def __call__(
        self, x_BxQxD: jax.Array, keys_values: KeysValues, seen_BxQxK: jax.Array
    ) -> jax.Array:
        q = self.query(x_BxQxD).reshape(*x_BxQxD.shape[:2], self.heads, -1)
        return self.out(attention.attend(q, *keys_values, seen_BxQxK).reshape(x_BxQxD.shape))


class Mlp(nnx.Module):
    """Two layers with a ReLU between."""

    def __init__(self, width: int, hidden: int, dtype: DTypeLike, rngs: nnx.Rngs):
        init = nnx.initializers.glorot_uniform()
        self.up = nnx.Linear(width, hidden, kernel_init=init, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, width, kernel_init=init, dtype=dtype, rngs=rngs)

    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x_BxTxD)))


class PostNorm(nnx.Module):
    """norm(x + dropout(y)), of a sublayer's input x and output y."""

    def __init__(self, width: int, dropout: float, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, epsilon=1e-6, dtype=jnp.float32, rngs=rngs)
        self.drop = nnx.Dropout(dropout)
        self.dtype = dtype

    def __call__(self, x: jax.Array, y: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.norm(x + self.drop(y, rngs=key)).astype(self.dtype)


def _each_query(seen_BxK: jax.Array, queries: int) -> jax.Array:
    batch, keys = seen_BxK.shape
    return jnp.broadcast_to(seen_BxK[:, jnp.newaxis], (batch, queries, keys))
