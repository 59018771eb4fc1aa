"""Gemma 4's assistant: a few Gemma 4 layers without keys and values of their own, between two projections.

Its input is the target's embedding of a token joined with a hidden state: the target's after the final norm, later the
assistant's own output. Its layers attend to the K/V of the target's last sliding and last full layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools.converters.mil import Builder as mb  # noqa: N813

from llm_gemma_coreml.convert.architectures.gemma4 import emit_layer
from llm_gemma_coreml.convert.emit import FunctionEmitter

Var = Any


def emit_assistant(emitter: FunctionEmitter, embedding: Var, hidden: Var, sources: Mapping[str, int]) -> tuple[Var, Var]:
    """(logits fp32 [1, V], hidden_out fp32 [1, target's hidden size]) from `embedding` and `hidden`, of the latter's shape.

    sources: the target's layer whose states are read, by kind of layer.
    """
    joined = mb.concat(values=[embedding, hidden], axis=-1, name="joined")
    stream = emitter.single(emitter.linear(joined, ["pre_projection"], "pre_projection"))

    def attention(emitter: FunctionEmitter, normed: Var, layer: int, name: str) -> Var:
        return _attention(emitter, normed, layer, sources, name)

    for layer in range(emitter.config.layers):
        stream = emit_layer(emitter, stream, layer, f"layer_{layer}_hidden", attention)
    final = emitter.half(emitter.norm(stream, "final_norm", "final_hidden"))
    projected = emitter.linear(final, ["post_projection"], "post_projection")
    return emitter.logits(final), mb.cast(x=projected, dtype="fp32", name="hidden_out")


def _attention(emitter: FunctionEmitter, normed: Var, layer: int, sources: Mapping[str, int], name: str) -> Var:
    """normed fp32 [S, H] -> fp16 [S, H]."""
    tensors = f"layers.{layer}"
    query = emitter.queries(emitter.linear(normed, [f"{tensors}.q"], f"{name}_q_proj"), layer, name)
    kind = emitter.config.layer_types[layer]
    mixed = emitter.attention_to(query, sources[kind], kind, name)
    return emitter.linear(mixed, [f"{tensors}.o"], f"{name}_o")
