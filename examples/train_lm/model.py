"""A small decoder-only transformer in Flax nnx: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The attention function is an argument of the call, so that the very same weights can run on jax_fa4, on jax.nn with a
dense mask, or (to show what goes wrong) on plain causal attention that ignores where documents end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

import jax_fa4

VOCABULARY = 256  # a token is a byte

# (query (B, T, N, D), key (B, T, K, D), value (B, T, K, D), segment_ids (B, T)) -> (B, T, N, D)
AttentionFunction = Callable[[jax.Array, jax.Array, jax.Array, ArrayLike], jax.Array]
Angles = tuple[jax.Array, jax.Array]  # cosine and sine of each position's rotations, (B, T, 1, head_dim / 2) float32


def packed_attention(implementation: str | None = None) -> AttentionFunction:
    """Causal attention within each document, by jax_fa4."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: ArrayLike) -> jax.Array:
        return jax_fa4.attention(
            query, key, value, segment_ids=segment_ids, is_causal=True, implementation=implementation
        )

    return attend


def dense_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: ArrayLike) -> jax.Array:
    """The same in jax.nn: a (B, 1, T, T) mask is made and every score is computed, then most are thrown away."""
    ids = jnp.asarray(segment_ids)
    same_document = ids[:, None, :, None] == ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=same_document, is_causal=True)


def leaking_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: ArrayLike) -> jax.Array:
    """Plain causal attention: documents later in a row see the earlier ones."""
    del segment_ids
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer."""

    layers: int = 4
    width: int = 128
    query_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    hidden_width: int = 384  # of the gated MLP
    dtype: str = "float32"  # of activations; parameters stay float32


def rotary_angles(positions: ArrayLike, head_dim: int) -> Angles:
    """The rotations of positions (B, T)."""
    frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.asarray(positions)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(heads: jax.Array, angles: Angles) -> jax.Array:
    """Rotary embedding of `heads` (B, T, heads, head_dim): the two halves of a head are real and imaginary parts."""
    cosine, sine = (part.astype(heads.dtype) for part in angles)
    real, imaginary = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([real * cosine - imaginary * sine, real * sine + imaginary * cosine], axis=-1)


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        heads = config.query_heads + 2 * config.kv_heads
        self.project_in = nnx.Linear(
            config.width, heads * config.head_dim, use_bias=False, dtype=config.dtype, rngs=rngs
        )
        self.project_out = nnx.Linear(
            config.query_heads * config.head_dim, config.width, use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(
        self, inputs: jax.Array, segment_ids: ArrayLike, angles: Angles, attention: AttentionFunction
    ) -> jax.Array:
        """(B, T, width) to (B, T, width)."""
        config = self.config
        batch, length, _ = inputs.shape
        heads = self.project_in(inputs).reshape(batch, length, -1, config.head_dim)
        query, key, value = jnp.split(heads, [config.query_heads, config.query_heads + config.kv_heads], axis=2)
        context = attention(rotate(query, angles), rotate(key, angles), value, segment_ids)
        return self.project_out(context.reshape(batch, length, -1))


class GatedMLP(nnx.Module):
    """SwiGLU: one half of the hidden layer gates the other."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.project_in = nnx.Linear(
            config.width, 2 * config.hidden_width, use_bias=False, dtype=config.dtype, rngs=rngs
        )
        self.project_out = nnx.Linear(config.hidden_width, config.width, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """(B, T, width) to (B, T, width)."""
        gate, value = jnp.split(self.project_in(inputs), 2, axis=-1)
        return self.project_out(nnx.silu(gate) * value)


class Block(nnx.Module):
    """Attention, then the MLP, each on normalised inputs and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(
        self, stream: jax.Array, segment_ids: ArrayLike, angles: Angles, attention: AttentionFunction
    ) -> jax.Array:
        """(B, T, width) to (B, T, width)."""
        stream = stream + self.attention(self.attention_norm(stream), segment_ids, angles, attention)
        return stream + self.mlp(self.mlp_norm(stream))


class Transformer(nnx.Module):
    """Bytes in, logits of the next byte out; input and output embeddings are one table."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(VOCABULARY, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.final_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(
        self, tokens: ArrayLike, segment_ids: ArrayLike, positions: ArrayLike, attention: AttentionFunction
    ) -> jax.Array:
        """Logits (B, T, 256) of each next byte, from tokens, ids and positions of shape (B, T)."""
        return self.from_embeddings(self.embedding(jnp.asarray(tokens)), segment_ids, positions, attention)

    def from_embeddings(
        self, stream: jax.Array, segment_ids: ArrayLike, positions: ArrayLike, attention: AttentionFunction
    ) -> jax.Array:
        """The same from embeddings (B, T, width), which can be differentiated where bytes can not."""
        angles = rotary_angles(positions, self.config.head_dim)
        for block in self.blocks:
            stream = block(stream, segment_ids, angles, attention)
        return self.embedding.attend(self.final_norm(stream))
