"""Gemma 4 (dense text): normed values, K and V from one projection in full layers, a scalar on each layer's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil import Builder as mb  # noqa: N813

from llm_gemma_coreml.convert.emit import FunctionEmitter
from llm_gemma_coreml.convert.source import ATTENTION_NORMS, FEEDFORWARD_NORMS, FULL

Var = Any
Attention = Callable[[FunctionEmitter, Var, int, str], Var]
"""(emitter, normed stream fp32 [S, H], layer, name) -> fp16 [S, H]."""


def emit_layer(
    emitter: FunctionEmitter, hidden: Var, layer: int, result: str, attention: Attention | None = None
) -> Var:
    """One decoder layer on the residual stream `hidden`, fp32 [S, H]; the new stream is named `result`.

    attention: in place of the layer's own.
    """
    name = f"layer_{layer}"

    def attend(normed: Var) -> Var:
        return (attention or _attention)(emitter, normed, layer, f"{name}_attention")

    def mlp(normed: Var) -> Var:
        return emitter.gated_mlp(normed, layer, f"{name}_mlp")

    hidden = emitter.add_between_norms(hidden, layer, ATTENTION_NORMS, attend, f"{name}_attended")
    hidden = emitter.add_between_norms(hidden, layer, FEEDFORWARD_NORMS, mlp, f"{name}_fed")
    return emitter.scaled(hidden, f"layers.{layer}.layer_scalar", result)


def _attention(emitter: FunctionEmitter, normed: Var, layer: int, name: str) -> Var:
    """normed fp32 [S, H] -> fp16 [S, H]."""
    config, tensors = emitter.config, f"layers.{layer}"
    kv_heads, head_dim = config.kv_heads(layer), config.head_dim(layer)
    parts = "qk" if config.value_is_key_full and config.layer_types[layer] == FULL else "qkv"
    joined = emitter.linear(normed, [f"{tensors}.{part}" for part in parts], f"{name}_{parts}")
    sizes = [heads * head_dim for heads in (config.query_heads, kv_heads, kv_heads)][: len(parts)]
    query, *rest = mb.split(x=joined, split_sizes=sizes, axis=-1, name=f"{name}_parts")
    query = emitter.queries(query, layer, name)
    raw = [
        emitter.kv_heads(emitter.single(x), layer, f"{name}_{part}") for part, x in zip(parts[1:], rest, strict=True)
    ]
    key = emitter.keys(raw[0], layer, name)
    # Without a projection of its own the value is the key as projected: before its norm, never rotated.
    value = emitter.half(emitter.norm(raw[-1], None, f"{name}_v_norm"))
    mixed = emitter.attention(query, key, value, layer, name)
    return emitter.linear(mixed, [f"{tensors}.o"], f"{name}_o")
