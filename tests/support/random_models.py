"""Tiny models of random weights whose conversion writes several packages in a few seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_gemma_coreml.convert.build import build_bundle
from llm_gemma_coreml.convert.checkpoint_config import read_config
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


def build_tiny(source: RandomSource, folder: Path, **changes: Any) -> Path:
    """The bundle `tiny` in `folder`, three layer packages and the head."""
    return build_bundle(source, "tiny", folder=folder, **(OPTIONS | changes))
