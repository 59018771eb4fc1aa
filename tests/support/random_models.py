"""Tiny models of random weights whose conversion writes several packages in a few seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_gemma_coreml.convert.build import build_bundle
from llm_gemma_coreml.convert.checkpoint_config import read_assistant_config, read_config
from llm_gemma_coreml.convert.random_source import RandomSource
from llm_gemma_coreml.convert.source import ModelConfig

LAYERS = 6
OPTIONS: dict[str, Any] = {"contexts": (256,), "widths": (1, 8), "layers_per_package": 2, "bits": 4}


def tiny_config(family: str = "gemma3") -> ModelConfig:
    """Six layers, the sixth a full one, and a vocabulary that just holds the bytes."""
    document: dict[str, Any] = {
        "model_type": f"{family}_text",
        "vocab_size": 320,
        "num_hidden_layers": LAYERS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 40,
        "max_position_embeddings": 4096,
        "query_pre_attn_scalar": 32,
    }
    if family == "gemma4":
        document |= {
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        }
    return read_config(Path("tiny"), document, "tiny", "BF16")


def tiny_assistant_config() -> ModelConfig:
    """Of an assistant of the tiny Gemma 4: two layers that read the K/V of its last two."""
    target = tiny_config("gemma4")
    text: dict[str, Any] = {
        "model_type": "gemma4_unified_text",
        "vocab_size": target.vocabulary_size,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": target.query_heads,
        "num_key_value_heads": target.kv_heads_sliding,
        "num_global_key_value_heads": target.kv_heads_full,
        "head_dim": target.head_dim_sliding,
        "global_head_dim": target.head_dim_full,
        "attention_k_eq_v": True,
        "sliding_window": target.sliding_window,
        "final_logit_softcapping": None,
    }
    document = {"model_type": "gemma4_unified_assistant", "backbone_hidden_size": target.hidden_size, "text_config": text}
    return read_assistant_config(Path("tiny"), document, "tiny-assistant", "BF16")


def build_tiny(source: RandomSource, folder: Path, **changes: Any) -> Path:
    """The bundle `tiny` in `folder`, three layer packages and the head."""
    return build_bundle(source, "tiny", folder=folder, **(OPTIONS | changes))
