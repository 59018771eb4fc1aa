"""Shapes of published Gemma models, for bundles of random weights: what their `config.json` files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_gemma_coreml.convert.checkpoint_config import read_assistant_config, read_config
from llm_gemma_coreml.convert.source import ModelConfig
from llm_gemma_coreml.errors import SourceError

VOCABULARY = 262144
"""Pieces of Gemma's tokenizers; some checkpoints pad their embedding beyond it."""


def _gemma3(
    layers: int, hidden: int, wide: int, heads: tuple[int, int], window: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": window,
        "max_position_embeddings": context,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        **more,
    }


def _gemma4(model_type: str, layers: int, hidden: int, wide: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "num_global_key_value_heads": heads[2],
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
    }


_LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-3-270m": _gemma3(18, 640, 2048, (4, 1), 512, 32768),
    "gemma-3-1b": _gemma3(26, 1152, 6912, (4, 1), 512, 32768),
    "gemma-3-4b": _gemma3(34, 2560, 10240, (8, 4), 1024, 131072, **_LINEAR),
    "gemma-3-12b": _gemma3(48, 3840, 15360, (16, 8), 1024, 131072, **_LINEAR),
    "gemma-4-12b": _gemma4("gemma4_unified_text", 48, 3840, 15360, (16, 8, 1)),
    "gemma-4-31b": _gemma4("gemma4_text", 60, 5376, 21504, (32, 16, 4)),
}
_ASSISTANTS: dict[str, dict[str, Any]] = {
    "gemma-4-12b": {
        "model_type": "gemma4_unified_assistant",
        "backbone_hidden_size": 3840,
        "text_config": _gemma4("gemma4_unified_text", 4, 1024, 8192, (16, 8, 1))
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "final_logit_softcapping": None},
    }
}
RANDOM_MODELS = tuple(_CONFIGS)


def random_config(name: str) -> ModelConfig:
    """The configuration of the model of that name. Raises SourceError for another name than RANDOM_MODELS."""
    document = _CONFIGS.get(name)
    if document is None:
        raise SourceError(f"There is no shape of a model {name!r} to fill with random weights: {', '.join(RANDOM_MODELS)}.")
    return read_config(Path(name), document, name, "BF16")


def random_assistant_config(name: str) -> ModelConfig:
    """The configuration of the assistant of the model of that name. Raises SourceError if the shape of none is known."""
    document = _ASSISTANTS.get(name)
    if document is None:
        raise SourceError(f"The shape of an assistant of {name!r} is not known, only of: {', '.join(_ASSISTANTS)}.")
    return read_assistant_config(Path(name), document, f"{name}-assistant", "BF16")
