"""Tiny random Gemma 4 models: checkpoints, bundles, and transformers with the very weights that a bundle's packages hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints as tiny
from support.half_states import register_half_states
from support.sessions import all_logits, forever, hidden_rows, open_runner

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.bundle.program import Constant
from llm_gemma_coreml.convert.build import build_bundle
from llm_gemma_coreml.engine.session import Session

TOKENS = 640
"""Past a window of 100 and the wrap of its ring, and across both promotions."""
CONTEXTS = (256, 512, 1024)
WIDTHS = (1, 8, 128)
MODULES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "pre_feedforward_norm": "pre_feedforward_layernorm.weight",
    "post_feedforward_norm": "post_feedforward_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "layer_scalar": "layer_scalar",
}


def config(layers: str = "ssfsf", **changes: Any) -> dict[str, Any]:
    """config.json of a Gemma 4 text model with every feature of the 12B and odd sizes.

    layers: "s" for a sliding and "f" for a full layer. changes: other settings of the file.
    """
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    return {
        "model_type": "gemma4_unified_text",
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 1,
        "head_dim": 48,
        "global_head_dim": 80,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 100,
        "layer_types": [kinds[layer] for layer in layers],
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
    } | changes


def checkpoint(path: Path, settings: Mapping[str, Any], seed: int = 3, dtype: str = "float32") -> Path:
    """Write a checkpoint with random weights of that configuration, stored as the torch type `dtype`."""
    import torch
    from safetensors.torch import save_file

    model = tiny.random_transformers_model(settings, seed)
    with torch.no_grad():
        model.model.norm.weight.mul_(8)  # logits so large that the cap on them matters
    model.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(dict(settings)))
    (path / "tokenizer.json").write_text(tiny.tokenizer_json(), encoding="utf-8")
    return path


def bundle(folder: Path, source: Path, name: str = "tiny", **options: Any) -> Path:
    """Build the bundle `name` in `folder`; `options` as for build_bundle, with small contexts by default."""
    return build_bundle(source, name, folder=folder, **({"contexts": CONTEXTS, "widths": WIDTHS, "bits": 16} | options))


def package_tensors(bundle: Path) -> dict[str, np.ndarray]:
    """Every weight that the packages of a bundle hold, dequantised to fp32, under its name in transformers."""
    manifest = load_manifest(bundle)
    constants = _constants(bundle)
    tensors = package_linears(bundle) | {"model.norm.weight": constants["final_norm"].value()}
    for layer in range(len(manifest.layer_types)):
        for name in MODULES:
            if "norm" in name or name == "layer_scalar":
                value = constants[f"layers_{layer}_{name}"].value()
                tensors |= {f"model.layers.{layer}.{MODULES[name]}": value} if len(value) else {}
    return {name: np.array(value, np.float32) for name, value in tensors.items()}


def package_linears(bundle: Path) -> dict[str, np.ndarray]:
    """The embedding and the linear weights that the packages hold, dequantised to fp32, under their names in transformers."""
    manifest = load_manifest(bundle)
    constants = _constants(bundle)
    tensors = {"model.embed_tokens.weight": _linear(constants, "embedding")}
    for layer, kind in enumerate(manifest.layer_types):
        ours, theirs = f"layer_{layer}_", f"model.layers.{layer}."
        heads, dims = (
            (manifest.kv_heads_sliding, manifest.head_dim_sliding)
            if kind == "sliding"
            else (manifest.kv_heads_full, manifest.head_dim_full)
        )
        parts = "qkv" if f"{ours}attention_qkv_values" in constants else "qk"
        attention = _linear(constants, f"{ours}attention_{parts}")
        cuts = [manifest.query_heads * dims, (manifest.query_heads + heads) * dims]
        own = dict(zip("qkv", np.split(attention, cuts), strict=False))
        own |= dict(zip(("gate", "up"), np.split(_linear(constants, f"{ours}mlp_gate_up"), 2), strict=True))
        own |= {"o": _linear(constants, f"{ours}attention_o"), "down": _linear(constants, f"{ours}mlp_down")}
        tensors |= {theirs + MODULES[name]: value for name, value in own.items() if len(value)}
    return tensors


_WEIGHT_OPERATIONS = {
    "constexpr_blockwise_shift_scale": {"data": "values", "scale": "scales"},
    "constexpr_lut_to_dense": {"indices": "values", "lut": "tables"},
}


def _constants(bundle: Path) -> dict[str, Constant]:
    """Constants of the packages' default functions by name; parts of compressed weights as NAME_values, _scales, _tables."""
    manifest = load_manifest(bundle)
    constants: dict[str, Constant] = {}
    for name in [*(package.path for package in manifest.layer_packages), manifest.head_package]:
        package = open_package(bundle / name)
        function = package.functions[package.default_function]
        constants |= function.constants
        for operation in function.operations:
            for argument, part in _WEIGHT_OPERATIONS.get(operation.type, {}).items():
                (constant,) = operation.inputs[argument]
                assert isinstance(constant, Constant)
                constants[f"{operation.name.removesuffix('_weight')}_{part}"] = constant
    return constants


def _linear(constants: Mapping[str, Constant], name: str) -> np.ndarray:
    stored = constants[f"{name}_values"].value()
    tables = constants.get(f"{name}_tables")
    if tables is not None:
        from coremltools.converters.mil.mil.ops.defs.iOS18.compression import constexpr_lut_to_dense

        return constexpr_lut_to_dense.decompress(stored, tables.value(), None).astype(np.float32)
    values = stored.astype(np.float32)
    scales = constants.get(f"{name}_scales")
    if scales is None:
        return values
    blocks = values.reshape(*scales.type.shape, -1)
    return (blocks * scales.value().astype(np.float32)[..., None]).reshape(values.shape)


def reference_model(settings: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str = "float32") -> Any:
    """transformers' model in fp32 with these weights; keys and values are rounded to fp16, the type of the states.

    dtype: in which the checkpoint's weights are stored; the embedding's multiplier is rounded to it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    others = {name: value for name, value in settings.items() if name != "model_type"}
    config = AutoConfig.for_model(settings["model_type"], **others)
    config._attn_implementation = register_half_states()
    model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()}, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    multiplier = model.model.embed_tokens.embed_scale
    multiplier.copy_(multiplier.to(getattr(torch, dtype)))
    return model.eval()


def reference_logits(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Logits fp32 [len(ids), vocabulary] of the whole text at once, by transformers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float().numpy()


def random_ids(count: int = TOKENS, seed: int = 0) -> list[int]:
    """Random token ids, the first of them `<bos>`."""
    return [2, *np.random.default_rng(seed).integers(0, tiny.VOCABULARY, count - 1).tolist()]


@dataclass(frozen=True)
class Pair:
    """A bundle, and transformers with the weights that it holds."""

    bundle: Path
    settings: Mapping[str, Any]
    dtype: str
    """In which the checkpoint's weights are stored."""
    tensors: Mapping[str, np.ndarray]

    @cached_property
    def reference(self) -> np.ndarray:
        """transformers' logits [TOKENS, vocabulary] of `random_ids()`."""
        return self.changed_reference()

    def changed_reference(
        self, settings: Mapping[str, Any] = {}, tensors: Mapping[str, np.ndarray] = {}, dtype: str | None = None
    ) -> np.ndarray:
        """The same with other settings, weights or rounding of the embedding's multiplier."""
        model = reference_model({**self.settings, **settings}, {**self.tensors, **tensors}, dtype or self.dtype)
        return reference_logits(model, random_ids())

    def portable_logits(self, exact: bool = True) -> np.ndarray:
        """Logits of the same ids by the portable runtime, in calls of 128 rows."""
        runner = open_runner(self.bundle, exact=exact)
        session = Session(runner)
        hidden = hidden_rows(session, random_ids(), forever(128))
        assert session.promotions == len(runner.rungs) - 1
        logits = all_logits(runner, hidden)
        runner.close()
        return logits


def convert(folder: Path, settings: Mapping[str, Any], dtype: str = "float32", **options: Any) -> Pair:
    """Make a checkpoint and its bundle in `folder`; `options` as for `bundle`."""
    made = bundle(folder, checkpoint(folder / "checkpoint", settings, dtype=dtype), **options)
    return Pair(made, settings, dtype, package_tensors(made))
