"""A plain fp32 forward pass of Gemma in NumPy, one layer's weights in memory at a time.

It measures (calibration, reports) and serves as an oracle; it is not how models are run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.source import SLIDING, Float32, ModelConfig

Observer = Callable[[str, Float32], None]
"""Called with the canonical name of a linear and its input [tokens, K]."""


class Weights(Protocol):
    """Where the forward pass takes its tensors from: a `Source`, or one that changes them on the way."""

    config: ModelConfig

    def tensor(self, name: str) -> Float32: ...


def embed(rows: Float32, config: ModelConfig) -> Float32:
    """Embedding rows [tokens, hidden], scaled as the first layer expects them."""
    return rows * np.float32(config.embedding_multiplier)


def run_layers(weights: Weights, hidden: Float32, observe: Observer | None = None) -> Float32:
    """All layers over one sequence that starts at position 0.

    hidden: [tokens, hidden size], from `embed`. Returns the final norm's output, same shape.
    """
    config = weights.config
    for layer in range(config.layers):
        hidden = run_layer(weights, layer, hidden, observe)
    return _norm(hidden, weights.tensor("final_norm"), config)


def run_layer(weights: Weights, layer: int, hidden: Float32, observe: Observer | None = None) -> Float32:
    """One decoder layer over [tokens, hidden size]."""
    config, prefix = weights.config, f"layers.{layer}."

    def norm(name: str, values: Float32) -> Float32:
        return _norm(values, weights.tensor(prefix + name), config)

    def linear(name: str, values: Float32) -> Float32:
        if observe is not None:
            observe(prefix + name, values)
        product: Float32 = values @ weights.tensor(prefix + name).T
        return product

    attended = linear("o", _attention(config, layer, norm("input_norm", hidden), linear, norm))
    hidden = hidden + norm("post_attention_norm", attended)
    inner = norm("pre_feedforward_norm", hidden)
    inner = linear("down", _gelu(linear("gate", inner)) * linear("up", inner))
    hidden = hidden + norm("post_feedforward_norm", inner)
    return hidden * weights.tensor(prefix + "layer_scalar") if config.layer_scalar else hidden


_Named = Callable[[str, Float32], Float32]


def _attention(config: ModelConfig, layer: int, hidden: Float32, linear: _Named, norm: _Named) -> Float32:
    tokens, dim, kv_heads = len(hidden), config.head_dim(layer), config.kv_heads(layer)
    sliding = config.layer_types[layer] == SLIDING
    group = config.query_heads // kv_heads
    query = norm("q_norm", linear("q", hidden).reshape(tokens, config.query_heads, dim))
    raw_key = linear("k", hidden).reshape(tokens, kv_heads, dim)
    shared = config.value_is_key_full and not sliding
    value = raw_key if shared else linear("v", hidden).reshape(tokens, kv_heads, dim)
    if config.value_norm:
        value = _norm(value, None, config)
    cos, sin = _rotation(config, sliding, tokens)
    query, key = _rotate(query, cos, sin), _rotate(norm("k_norm", raw_key), cos, sin)
    position = np.arange(tokens)
    visible = position[None, :] <= position[:, None]
    if sliding:
        visible &= position[None, :] > position[:, None] - config.sliding_window
    mixed = np.empty((tokens, config.query_heads, dim), np.float32)
    for head in range(config.query_heads):
        scores = query[:, head] @ key[:, head // group].T * np.float32(config.query_scale)
        scores = np.where(visible, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, head] = scores @ value[:, head // group] / scores.sum(axis=1, keepdims=True)
    return mixed.reshape(tokens, -1)


def _rotation(config: ModelConfig, sliding: bool, tokens: int) -> tuple[Float32, Float32]:
    dim = config.head_dim_sliding if sliding else config.head_dim_full
    live = dim // 2 if sliding else config.live_frequencies_full
    theta = config.rope_theta_sliding if sliding else config.rope_theta_full
    frequencies = np.zeros(dim // 2)
    frequencies[:live] = theta ** (-2.0 * np.arange(live) / dim)
    positions = np.arange(tokens) / (1.0 if sliding else config.rope_scaling_full)
    angles = positions[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(heads: Float32, cos: Float32, sin: Float32) -> Float32:
    first, second = np.split(heads, 2, axis=2)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)


def _norm(values: Float32, weight: Float32 | None, config: ModelConfig) -> Float32:
    mean_square = np.mean(np.square(values), axis=-1, keepdims=True)
    scaled: Float32 = values / np.sqrt(mean_square + np.float32(config.rms_norm_epsilon))
    return scaled if weight is None else scaled * weight


def _gelu(values: Float32) -> Float32:
    inner = np.float32(np.sqrt(2 / np.pi)) * (values + np.float32(0.044715) * values**3)
    gated: Float32 = np.float32(0.5) * values * (1 + np.tanh(inner))
    return gated


def softcap(logits: NDArray[np.float32], config: ModelConfig) -> Float32:
    """The family's cap on logits, if it has one."""
    if config.final_softcap is None:
        return logits
    cap = np.float32(config.final_softcap)
    capped: Float32 = np.tanh(logits / cap) * cap
    return capped
