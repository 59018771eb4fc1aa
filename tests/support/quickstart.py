"""The real quick-start bundle for tests, and transformers with the very weights that it stands for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from support.half_states import register_half_states
from support.tiny_models import fill_reference

from llm_gemma_coreml.convert.quickstart import open_quickstart

DATA = Path(__file__).parent.parent / "data"


def prose() -> str:
    """Public-domain prose (see data/README.md), several sources one after the other."""
    names = ("document_declaration.txt", "prose_alice.txt", "prose_holmes.txt")
    return "\n".join((DATA / name).read_text(encoding="utf-8") for name in names)


@cache
def reference_model(bits: int = 8) -> Any:
    """Gemma 3 270M in transformers, fp32, with the dequantised weights of a bundle of that many bits."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    source = open_quickstart()
    config = source.config
    settings = Gemma3TextConfig(
        vocab_size=config.vocabulary_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads_full,
        head_dim=config.head_dim_full,
        sliding_window=config.sliding_window,
        layer_types=[f"{kind}_attention" for kind in config.layer_types],
        query_pre_attn_scalar=round(config.query_scale**-2),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta_full},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_theta_sliding},
        },
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.rms_norm_epsilon,
        attn_implementation=register_half_states(),
    )
    model = fill_reference(Gemma3ForCausalLM(settings), source, bits)
    source.close()
    return model


def reference_hidden(model: Any, ids: list[int]) -> Any:
    """Rows after the final norm, fp32 torch tensor [len(ids), hidden size], of the whole text at once."""
    import torch

    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0]
