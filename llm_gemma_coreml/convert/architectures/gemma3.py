"""Gemma 3: norms before and after both halves of a layer, q/k norms, grouped-query attention, gated MLP."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil import Builder as mb  # noqa: N813

from llm_gemma_coreml.convert.emit import FunctionEmitter
from llm_gemma_coreml.convert.source import ATTENTION_NORMS, FEEDFORWARD_NORMS

Var = Any


def emit_layer(emitter: FunctionEmitter, hidden: Var, layer: int, result: str) -> Var:
    """One decoder layer on the residual stream `hidden`, fp32 [S, H]; the new stream is named `result`."""
    name = f"layer_{layer}"

    def attention(normed: Var) -> Var:
        return _attention(emitter, normed, layer, f"{name}_attention")

    def mlp(normed: Var) -> Var:
        return emitter.gated_mlp(normed, layer, f"{name}_mlp")

    hidden = emitter.add_between_norms(hidden, layer, ATTENTION_NORMS, attention, f"{name}_attended")
    return emitter.add_between_norms(hidden, layer, FEEDFORWARD_NORMS, mlp, result)


def _attention(emitter: FunctionEmitter, normed: Var, layer: int, name: str) -> Var:
    """normed fp32 [S, H] -> fp16 [S, H]."""
    config, tensors = emitter.config, f"layers.{layer}"
    kv_heads, head_dim = config.kv_heads(layer), config.head_dim(layer)
    joined = emitter.linear(normed, [f"{tensors}.{part}" for part in "qkv"], f"{name}_qkv")
    sizes = [heads * head_dim for heads in (config.query_heads, kv_heads, kv_heads)]
    query, key, value = mb.split(x=joined, split_sizes=sizes, axis=-1, name=f"{name}_parts")
    query = emitter.queries(query, layer, name)
    key = emitter.keys(emitter.kv_heads(emitter.single(key), layer, f"{name}_k"), layer, name)
    value = emitter.kv_heads(value, layer, f"{name}_v")
    mixed = emitter.attention(query, key, value, layer, name)
    return emitter.linear(mixed, [f"{tensors}.o"], f"{name}_o")
