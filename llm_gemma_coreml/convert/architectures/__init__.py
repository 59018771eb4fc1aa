"""What distinguishes the families: how one decoder layer is put together from the blocks of convert/emit.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm_gemma_coreml.errors import SourceError

LayerEmitter = Callable[[Any, Any, int, str], Any]
"""(FunctionEmitter, residual stream fp32 [S, H], layer, name of the result) -> residual stream."""


def layer_emitter(family: str) -> LayerEmitter:
    """The function that emits one decoder layer of that family. Raises SourceError for an unknown one."""
    if family == "gemma3":
        from llm_gemma_coreml.convert.architectures import gemma3

        return gemma3.emit_layer
    if family == "gemma4":
        from llm_gemma_coreml.convert.architectures import gemma4

        return gemma4.emit_layer
    raise SourceError(f"Models of the family {family!r} cannot be converted; gemma3 and gemma4 can.")
