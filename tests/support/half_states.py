"""An attention for transformers that rounds keys and values to fp16, as the states of our packages hold them."""

from __future__ import annotations

from typing import Any

NAME = "half_states"


def register_half_states() -> str:
    """Make transformers know the attention; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def _attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    return eager_attention_forward(module, query, key.half().float(), value.half().float(), *args, **options)
