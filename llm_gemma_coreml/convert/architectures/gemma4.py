"""Gemma 4 (dense text): normed values, K and V from one projection in full layers, a scalar on each layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil import Builder as mb  # noqa: N813

from llm_gemma_coreml.convert.emit import FunctionEmitter
from llm_gemma_coreml.convert.source import FULL

Var = Any
Attention = Callable[[FunctionEmitter, Var, int, str], Var]
"""(emitter, normed stream fp32 [S, H], layer, name) -> fp16 [S, H]."""


def emit_layer(
    emitter: FunctionEmitter, hidden: Var, layer: int, result: str, attention: Attention | None = None
) -> Var:
    """One decoder layer on the residual stream `hidden`, fp32 [S, H]; the new stream is named `result`."""
    tensors, name = f"layers.{layer}", f"layer_{layer}"
    normed = emitter.norm(hidden, f"{tensors}.input_norm", f"{name}_input_norm")
    attended = emitter.single((attention or _attention)(emitter, normed, layer, f"{name}_attention"))
    attended = emitter.norm(attended, f"{tensors}.post_attention_norm", f"{name}_post_attention_norm")
    hidden = emitter.add_residual(hidden, attended, f"{name}_attended")
    normed = emitter.norm(hidden, f"{tensors}.pre_feedforward_norm", f"{name}_pre_feedforward_norm")
    fed = emitter.single(emitter.gated_mlp(normed, layer, f"{name}_mlp"))
    fed = emitter.norm(fed, f"{tensors}.post_feedforward_norm", f"{name}_post_feedforward_norm")
    hidden = emitter.add_residual(hidden, fed, f"{name}_fed")
    return emitter.scaled(hidden, f"{tensors}.layer_scalar", result)


def _attention(emitter: FunctionEmitter, normed: Var, layer: int, name: str) -> Var:
    """normed fp32 [S, H] -> fp16 [S, H]."""
    config = emitter.config
    kind, tensors = config.layer_types[layer], f"layers.{layer}"
    kv_heads, head_dim = config.kv_heads(layer), config.head_dim(layer)
    group = config.query_heads // kv_heads
    value_is_key = kind == FULL and config.value_is_key_full
    parts = "qk" if value_is_key else "qkv"
    joined = emitter.linear(normed, [f"{tensors}.{part}" for part in parts], f"{name}_{parts}")
    heads = [config.query_heads, kv_heads, kv_heads][: len(parts)]
    query, *rest = mb.split(x=joined, split_sizes=[each * head_dim for each in heads], axis=-1, name=f"{name}_parts")

    query = emitter.heads(emitter.single(query), [-1, kv_heads, group, head_dim], [1, 2, 0, 3], f"{name}_q")
    query = emitter.norm(query, f"{tensors}.q_norm", f"{name}_q_norm", factor=emitter.query_factor(layer))
    query = emitter.half(emitter.rotary(query, kind, f"{name}_q_rotary"))

    raw = [
        emitter.heads(emitter.single(each), [-1, kv_heads, head_dim], [1, 0, 2], f"{name}_{part}")
        for part, each in zip(parts[1:], rest, strict=True)
    ]
    key = emitter.norm(raw[0], f"{tensors}.k_norm", f"{name}_k_norm")
    key = emitter.half(emitter.rotary(key, kind, f"{name}_k_rotary"))

    # Where there is no projection of its own, the value is the key as projected: before its norm, never rotated.
    value = emitter.half(emitter.norm(raw[-1], None, f"{name}_v_norm"))
    mixed = emitter.attention(query, key, value, layer, name)
    return emitter.linear(mixed, [f"{tensors}.o"], f"{name}_o")
