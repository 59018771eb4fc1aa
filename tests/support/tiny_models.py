"""Tiny random Gemma 3 models: a checkpoint, its bundle, and transformers with the weights that the bundle has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints as tiny

from llm_gemma_coreml.convert.build import build_bundle
from llm_gemma_coreml.convert.quantise import quantised_tensor
from llm_gemma_coreml.convert.source import PROJECTIONS, Source, open_source

CONTEXTS = (256, 512)
WIDTHS = (1, 2, 4, 8, 128)
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def gemma3_config(
    layers: int = 6, kv_heads: int = 1, window: int = 8, context: int = 4096, head_dim: int = 32
) -> dict[str, Any]:
    """config.json of a Gemma 3 with four query heads and every sixth layer a full one."""
    return tiny.tiny_gemma3_config() | {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "sliding_window": window,
        "max_position_embeddings": context,
        "head_dim": head_dim,
    }


def gemma3_checkpoint(path: Path, seed: int = 3, **config: int) -> Path:
    """Write a random checkpoint (safetensors, tokenizer.json) into `path`; `config` as for gemma3_config."""
    settings = gemma3_config(**config)
    model = tiny.random_transformers_model(settings, seed)
    tensors = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return tiny.write_checkpoint(path, settings, tensors)


def gemma3_bundle(folder: Path, checkpoint: Path, name: str = "tiny", **options: Any) -> Path:
    """Build the bundle `name` in `folder`; `options` as for build_bundle, with small contexts by default."""
    return build_bundle(checkpoint, name, folder=folder, **({"contexts": CONTEXTS, "widths": WIDTHS, "bits": 8} | options))


def reference_model(checkpoint: Path, bits: int = 8) -> Any:
    """The transformers model, fp32, with the weights that a bundle of that many bits stands for.

    bits 4 quantises without importance: give build_bundle bits 8 or 16, or compare loosely.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((checkpoint / "config.json").read_text())
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "eager"
    source = open_source(checkpoint)
    model = fill_reference(AutoModelForCausalLM.from_config(config), source, bits)
    source.close()
    return model


def fill_reference(model: Any, source: Source, bits: int) -> Any:
    """Give a transformers model the dequantised weights of `source`."""
    import torch

    state = {name: torch.from_numpy(value) for name, value in _reference_tensors(source, bits).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.eval()


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits fp32 [len(ids), vocabulary] of the whole text at once, by transformers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def _reference_tensors(source: Source, bits: int) -> dict[str, np.ndarray]:
    norms = {
        "input_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
    tensors = {
        "model.embed_tokens.weight": quantised_tensor(source, "embedding", 8).dequantise(),
        "model.norm.weight": source.tensor("final_norm") - 1,
    }
    for layer in range(source.config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for part in PROJECTIONS:
            if bits == 16:
                weight = source.tensor(ours + part).astype(np.float16).astype(np.float32)
            else:
                weight = quantised_tensor(source, ours + part, bits).dequantise()
            tensors[f"{theirs}{_MODULES[part]}.weight"] = weight
        for norm, module in norms.items():
            tensors[f"{theirs}{module}.weight"] = source.tensor(ours + norm) - 1
    return tensors
