"""Turns a Hugging Face `config.json` of a Gemma checkpoint into a `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_gemma_coreml.convert.source import FULL, SLIDING, ModelConfig
from llm_gemma_coreml.errors import SourceError

GEMMA_TERMS = ("Gemma Terms of Use", "https://ai.google.dev/gemma/terms")
APACHE_LICENCE = ("Apache License 2.0", "https://www.apache.org/licenses/LICENSE-2.0")
_KINDS = {"sliding_attention": SLIDING, "full_attention": FULL}
_LARGEST_NUMBER = 1e30
# Published configurations leave out what equals these defaults of their family.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA4_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
}
_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("gemma3", _GEMMA3_DEFAULTS),
    "gemma4_text": (
        "gemma4",
        _GEMMA4_DEFAULTS
        | {"max_position_embeddings": 131072, "sliding_window": 512, "hidden_size_per_layer_input": 256},
    ),
    "gemma4_unified_text": (
        "gemma4",
        _GEMMA4_DEFAULTS | {"max_position_embeddings": 262144, "sliding_window": 1024},
    ),
}
_WRAPPERS = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
# Settings that change the computation in a way which is not built; each with the values that switch it off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attn_logit_softcapping": (None, 0),
    "use_bidirectional_attention": (False, None, "vision"),
    "hidden_size_per_layer_input": (0, None),
    "num_kv_shared_layers": (0, None),
    "use_double_wide_mlp": (False, None),
    "enable_moe_block": (False, None),
    "tie_word_embeddings": (True, None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
}
_ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
_WHAT_IT_IS = {
    "hidden_size_per_layer_input": "an embedding for each layer, as Gemma 4 E2B and E4B have it",
    "num_kv_shared_layers": "layers that use the keys and values of others, as Gemma 4 E2B and E4B have them",
    "enable_moe_block": "a mixture of experts, as Gemma 4 26B-A4B has it",
}


class _Settings:
    """Typed look-ups in the text part of a config.json, with errors that name file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self._defaults = defaults

    def raw(self, key: str) -> Any:
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def integer(self, key: str) -> int:
        value = self.raw(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise SourceError(f"{self.path}: {key} is {value!r}, not a whole number.")
        return value

    def number(
        self, key: str, values: Mapping[str, Any] | None = None, default: float | None = None
    ) -> float:
        value = self.raw(key) if values is None else values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= _LARGEST_NUMBER:
            raise SourceError(f"{self.path}: {key} is {str(value)[:40]}, not a number that can be used.")
        return float(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise SourceError(f"{self.path}: {key} is {str(value)[:40]!r}, not an object.")
        return value


def read_config(path: Path, document: Any, name: str, embedding_dtype: str) -> ModelConfig:
    """The configuration in `document`, the parsed `config.json` at `path`.

    embedding_dtype: "F32", "F16" or "BF16"; the family rounds the embedding's multiplier to it.
    Raises SourceError for an unsupported family or setting, naming it.
    """
    family, settings = _text_settings(path, document)
    _refuse_unsupported(settings, _UNSUPPORTED)
    layer_types = _layer_types(settings)
    if family == "gemma3":
        return _gemma3(settings, name, layer_types, embedding_dtype)
    # As in transformers, the last layer is a full one whatever the file says.
    return _gemma4(settings, name, (*layer_types[:-1], FULL), embedding_dtype)


def read_assistant_config(path: Path, document: Any, name: str, embedding_dtype: str) -> ModelConfig:
    """The configuration of a Gemma 4 assistant (drafter) in the parsed `config.json`; arguments as for read_config.

    Raises SourceError for a checkpoint that is no assistant, or one with settings that are not built.
    """
    model_type = document.get("model_type") if isinstance(document, dict) else None
    if model_type not in _ASSISTANTS:
        raise SourceError(
            f"{path}: model type {model_type!r} is no drafter. Give the directory of a Gemma 4 assistant "
            f"({', '.join(_ASSISTANTS)})."
        )
    if document.get("use_ordered_embeddings"):
        raise SourceError(
            f"{path}: use_ordered_embeddings = true is not supported (a head in clusters, as the assistants of Gemma 4 "
            "E2B and E4B have it). Supported: the assistants of Gemma 4 12B and 31B."
        )
    settings = _text_settings(path, document, _ASSISTANTS)[1]
    layer_types = _layer_types(settings)
    # All layers of an assistant use the target's keys and values: that is what is built here.
    shared = {"num_kv_shared_layers": (0, None, len(layer_types))}
    _refuse_unsupported(settings, _UNSUPPORTED | shared)
    backbone = document.get("backbone_hidden_size", 3840)
    if not isinstance(backbone, int) or isinstance(backbone, bool) or backbone < 1:
        raise SourceError(f"{path}: backbone_hidden_size is {backbone!r}, not a size.")
    config = _gemma4(settings, name, (*layer_types[:-1], FULL), embedding_dtype)
    return replace(config, backbone_hidden_size=backbone)


def _refuse_unsupported(settings: _Settings, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    for key, harmless in unsupported.items():
        value = settings.raw(key)
        if value not in harmless:
            what = f" ({_WHAT_IT_IS[key]})" if key in _WHAT_IT_IS else ""
            raise SourceError(
                f"{settings.path}: {key} = {value!r} is not supported{what}. Supported models: {supported_models()}."
            )


def supported_models() -> str:
    """The models that can be converted, for messages."""
    return "Gemma 3 text (270M, 1B, and the text part of 4B, 12B, 27B), Gemma 4 dense text (12B, 31B)"


def _text_settings(
    path: Path, document: Any, wrappers: Mapping[str, str] = _WRAPPERS
) -> tuple[str, _Settings]:
    if not isinstance(document, dict):
        raise SourceError(f"{path}: not a JSON object.")
    model_type: Any = document.get("model_type")
    values: Any = document
    if isinstance(model_type, str) and model_type in wrappers:
        values = document.get("text_config")
        if not isinstance(values, dict):
            raise SourceError(f"{path}: text_config is missing.")
        if document.get("tie_word_embeddings") is False:
            values = values | {"tie_word_embeddings": False}
        model_type = values.get("model_type", wrappers[model_type])
    if not isinstance(model_type, str) or model_type not in _TEXT_MODELS:
        raise SourceError(
            f"{path}: model type {model_type!r} is not supported. Supported: {supported_models()}."
        )
    family, defaults = _TEXT_MODELS[model_type]
    return family, _Settings(path, values, defaults)


def _layer_types(settings: _Settings) -> tuple[str, ...]:
    layers = settings.integer("num_hidden_layers")
    if not 0 < layers <= 1024:
        raise SourceError(f"{settings.path}: {layers} layers, which no Gemma model has.")
    names = settings.raw("layer_types")
    if names is None:
        pattern = settings.values.get(
            "sliding_window_pattern", settings.values.get("_sliding_window_pattern", 6)
        )
        if not isinstance(pattern, int) or pattern < 1:
            raise SourceError(f"{settings.path}: sliding_window_pattern is {pattern!r}.")
        return tuple(FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(layers))
    if not isinstance(names, list) or len(names) != layers:
        raise SourceError(f"{settings.path}: layer_types must name the kind of each of the {layers} layers.")
    unknown = sorted({str(name) for name in names if str(name) not in _KINDS})
    if unknown:
        raise SourceError(f"{settings.path}: unknown kind of layer {', '.join(unknown)[:80]}.")
    return tuple(_KINDS[str(name)] for name in names)


def _rope(settings: _Settings) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """RoPE parameters of sliding and of full layers, from the current or the older form of the file."""
    parameters = settings.mapping("rope_parameters")
    both = [parameters.get(kind) or {} for kind in _KINDS]
    if not all(isinstance(each, dict) for each in both):
        raise SourceError(f"{settings.path}: rope_parameters must hold an object for each kind of layer.")
    sliding, full = dict(both[0]), dict(both[1]) | dict(settings.mapping("rope_scaling"))
    sliding.setdefault("rope_theta", settings.values.get("rope_local_base_freq", 10000.0))
    full.setdefault("rope_theta", settings.values.get("rope_theta", 1e6))
    return sliding, full


def _rope_kind(settings: _Settings, parameters: Mapping[str, Any], allowed: tuple[str, ...]) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in allowed:
        raise SourceError(f"{settings.path}: RoPE of type {kind!r} is not supported ({', '.join(allowed)}).")
    return str(kind)


def _common(settings: _Settings, layer_types: tuple[str, ...], embedding_dtype: str) -> dict[str, Any]:
    softcap = settings.number("final_logit_softcapping") if settings.raw("final_logit_softcapping") else None
    if softcap is not None and softcap <= 0:
        raise SourceError(f"{settings.path}: final_logit_softcapping is {softcap}; it must be positive.")
    hidden = settings.integer("hidden_size")
    if not 0 < hidden <= 1 << 24:
        raise SourceError(f"{settings.path}: hidden_size is {hidden}, which no Gemma model has.")
    return {
        "vocabulary_size": settings.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("intermediate_size"),
        "layer_types": layer_types,
        "query_heads": settings.integer("num_attention_heads"),
        "sliding_window": settings.integer("sliding_window"),
        "rms_norm_epsilon": settings.number("rms_norm_eps"),
        "final_softcap": softcap,
        "embedding_multiplier": rounded_root(hidden, embedding_dtype),
        "context_length": settings.integer("max_position_embeddings"),
    }


def _gemma3(
    settings: _Settings, name: str, layer_types: tuple[str, ...], embedding_dtype: str
) -> ModelConfig:
    sliding, full = _rope(settings)
    _rope_kind(settings, sliding, ("default",))
    scaled = _rope_kind(settings, full, ("default", "linear")) == "linear"
    head_dim, kv_heads = settings.integer("head_dim"), settings.integer("num_key_value_heads")
    scalar = settings.number("query_pre_attn_scalar")
    if scalar <= 0:
        raise SourceError(f"{settings.path}: query_pre_attn_scalar is {scalar}; it must be positive.")
    return ModelConfig(
        family="gemma3",
        name=name,
        **_common(settings, layer_types, embedding_dtype),
        kv_heads_sliding=kv_heads,
        kv_heads_full=kv_heads,
        head_dim_sliding=head_dim,
        head_dim_full=head_dim,
        rope_theta_sliding=settings.number("rope_theta", sliding),
        rope_theta_full=settings.number("rope_theta", full),
        rope_scaling_full=settings.number("factor", full, 1.0) if scaled else 1.0,
        live_frequencies_full=head_dim // 2,
        query_scale=1.0 / math.sqrt(scalar),
        norm_adds_one=True,
        licence=GEMMA_TERMS[0],
        licence_url=GEMMA_TERMS[1],
    )


def _gemma4(
    settings: _Settings, name: str, layer_types: tuple[str, ...], embedding_dtype: str
) -> ModelConfig:
    sliding, full = _rope(settings)
    _rope_kind(settings, sliding, ("default",))
    if not settings.mapping("rope_parameters"):
        full = dict(full) | {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    proportional = _rope_kind(settings, full, ("default", "proportional")) == "proportional"
    head_dim_full, kv_heads_full = _full_attention(settings, layer_types)
    part = settings.number("partial_rotary_factor", full, 1.0) if proportional else 1.0
    if not 0 < part <= 1:
        raise SourceError(f"{settings.path}: partial_rotary_factor is {part}; it must lie in (0, 1].")
    return ModelConfig(
        family="gemma4",
        name=name,
        **_common(settings, layer_types, embedding_dtype),
        kv_heads_sliding=settings.integer("num_key_value_heads"),
        kv_heads_full=kv_heads_full,
        head_dim_sliding=settings.integer("head_dim"),
        head_dim_full=head_dim_full,
        rope_theta_sliding=settings.number("rope_theta", sliding),
        rope_theta_full=settings.number("rope_theta", full),
        rope_scaling_full=settings.number("factor", full, 1.0) if proportional else 1.0,
        live_frequencies_full=int(part * head_dim_full // 2),
        query_scale=1.0,
        norm_adds_one=False,
        licence=APACHE_LICENCE[0],
        licence_url=APACHE_LICENCE[1],
        value_norm=True,
        value_is_key_full=bool(settings.raw("attention_k_eq_v")),
        layer_scalar=True,
    )


def _full_attention(settings: _Settings, layer_types: tuple[str, ...]) -> tuple[int, int]:
    """Head dimension and K/V heads of full layers: overrides per layer, or the older global settings."""
    overrides = settings.mapping("per_layer_config")
    if settings.raw("per_layer_config") is None:
        kv_heads = settings.raw("num_global_key_value_heads") if settings.raw("attention_k_eq_v") else None
        return (
            settings.integer("global_head_dim"),
            settings.integer("num_global_key_value_heads" if kv_heads is not None else "num_key_value_heads"),
        )
    base = {
        "head_dim": settings.integer("head_dim"),
        "num_key_value_heads": settings.integer("num_key_value_heads"),
    }
    usual = (base["head_dim"], base["num_key_value_heads"])
    found: dict[str, set[tuple[int, int]]] = {SLIDING: set(), FULL: set()}
    for layer, kind in enumerate(layer_types):
        own = overrides.get(str(layer), {})
        if not isinstance(own, dict) or set(own) - set(base):
            raise SourceError(
                f"{settings.path}: per_layer_config of layer {layer} holds unsupported settings."
            )
        merged = base | own
        if not all(isinstance(value, int) for value in merged.values()):
            raise SourceError(f"{settings.path}: per_layer_config must hold whole numbers.")
        found[kind].add((merged["head_dim"], merged["num_key_value_heads"]))
    if found[SLIDING] - {usual} or len(found[FULL]) > 1:
        raise SourceError(
            f"{settings.path}: layers of one kind differ in their heads, which is not supported."
        )
    return next(iter(found[FULL]), usual)


def rounded_root(hidden_size: int, dtype: str) -> float:
    """sqrt(hidden size) in the precision of `dtype` ("F32", "F16", "BF16"), as the model uses it."""
    import numpy as np

    root = np.float32(math.sqrt(hidden_size))
    if dtype == "F16":
        return float(np.float16(root))
    if dtype == "BF16":
        bits = int(root.view(np.uint32))
        # Round to nearest even in the upper 16 bits.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(root)
