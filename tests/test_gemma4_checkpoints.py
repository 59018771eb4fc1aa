"""Checkpoints of Gemma 4 that cannot be used are named with what is wrong; configurations are read as transformers does."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import tiny_gemma4 as tiny

from llm_gemma_coreml.convert.checkpoint_config import read_config
from llm_gemma_coreml.convert.safetensors_source import SafetensorsSource
from llm_gemma_coreml.convert.source import ModelConfig, check_config, open_source
from llm_gemma_coreml.errors import SourceError

Tensors = dict[str, np.ndarray]
FILE = Path("config.json")


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of transformers' model of that configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    others = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **others))
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}


def write(folder: Path, config: dict[str, Any], change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    """A checkpoint of small ones for the usual configuration, changed, under the configuration `config`."""
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes(tiny.config("sf")).items()}
    change(tensors)
    return tiny_checkpoints.write_checkpoint(folder / "checkpoint", config, tensors)


SUPPORTED = r"Supported models: Gemma 3 text .*, Gemma 4 dense text \(12B, 31B\)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}, rf"E2B and E4B have it\)\. {SUPPORTED}"),
        ({"num_kv_shared_layers": 1}, rf"keys and values of others.*{SUPPORTED}"),
        ({"model_type": "gemma4_text", "enable_moe_block": True}, rf"26B-A4B has it\)\. {SUPPORTED}"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp = True is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
        ({"model_type": "gemma5_text"}, "model type 'gemma5_text' is not supported"),
        ({"model_type": "gemma4_unified_assistant"}, "'gemma4_unified_assistant' is not supported"),
        ({"global_head_dim": 96}, r"layers\.1\.q has shape \[480, 96\], the configuration asks for \[576, 96\]"),
        ({"num_global_key_value_heads": 2}, r"layers\.1\.k has shape \[80, 96\], the configuration asks for \[160, 96\]"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"layers\.2\.q.* are missing\. Is the download complete\?"),
        ({"num_hidden_layers": 1, "layer_types": None}, r"layers\.1\..* not part of .* 1 layers\. The configuration disagrees"),
        ({"attention_k_eq_v": False}, r"layers\.1\.v is missing|has shape"),
        ({"num_attention_heads": 5}, "5 query heads cannot share 3 key/value heads"),
        ({"global_head_dim": 81}, "head dimension 81 is odd"),
        ({"num_attention_heads": 3, "head_dim": 50}, r"\(150, 240\) must be multiples of 32"),
        ({"sliding_window": 0}, "sliding_window is 0, which no Gemma model has"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4}}}, "'yarn' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}}, "must lie in"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in (tiny.config("sf") | changes).items() if value is not None}
    with pytest.raises(SourceError, match=message) as caught:
        open_source(write(tmp_path, config))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.layer_scalar"), r"layers\.0\.layer_scalar is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), r"embed_tokens\.weight is missing"),
        (lambda t: t.update({"model.layers.1.self_attn.v_proj.weight": np.ones((80, 96))}), r"layers\.1\.v is not part of"),
        (lambda t: t.update({"model.layers.0.router.proj.weight": np.ones(3)}), r"layers\.0\.router\.proj\.weight is not part"),
        (lambda t: t.update({"model.layers.0.layer_scalar": np.ones(2)}), r"layer_scalar has shape \[2\]"),
        (lambda t: t.update({"model.norm.weight": np.ones(96, np.int32)}), "final_norm is stored as I32"),
        (lambda t: t.update({"layers.0.layer_scalar": np.ones(1)}), "is given twice"),
    ],
)
def test_tensors_that_disagree(tmp_path: Path, change: Callable[[Tensors], object], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(write(tmp_path, tiny.config("sf"), change))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_in_a_scalar_is_named(tmp_path: Path, value: float) -> None:
    path = write(tmp_path, tiny.config("sf"), lambda t: t.update({"model.layers.0.layer_scalar": np.full(1, value)}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"layers\.0\.layer_scalar is stored as F64|layer_scalar holds NaN"):
        open_source(path).tensor("layers.0.layer_scalar")


@pytest.mark.parametrize("model", ["gemma4_unified", "gemma4"])
def test_checkpoints_with_vision_and_audio_parts(tmp_path: Path, model: str) -> None:
    """The published form: the text model inside of a larger one, whose other parts are left out."""
    tensors = {
        name.replace("model.", "model.language_model.", 1): np.full(shape, 0.5, np.float32)
        for name, shape in shapes(tiny.config("sf")).items()
    }
    for name in ("vision_tower.a", "embed_vision.b", "vision_embedder.c", "embed_audio.d", "audio_tower.e"):
        tensors[f"model.{name}.weight"] = np.ones((2, 2), np.float32)
    document = {"model_type": model, "text_config": tiny.config("sf", model_type=f"{model}_text"), "vision_config": {}}
    source = open_source(tiny_checkpoints.write_checkpoint(tmp_path / "x", document, tensors))
    assert source.config.layer_types == ("sliding", "full")
    assert source.config.value_is_key_full
    source.close()
    untied = document | {"tie_word_embeddings": False}
    with pytest.raises(SourceError, match="tie_word_embeddings = False"):
        open_source(tiny_checkpoints.write_checkpoint(tmp_path / "y", untied, tensors))


def read(document: Any) -> ModelConfig:
    config = read_config(FILE, document, "tiny", "BF16")
    check_config(FILE, config)
    return config


def test_the_12b_is_read_as_published() -> None:
    """Sizes of google/gemma-4-12B-it; the configuration leaves out what equals the defaults."""
    text = {
        "model_type": "gemma4_unified_text", "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    }  # fmt: skip
    config = read({"model_type": "gemma4_unified", "text_config": text})
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full"] == [5, 11, 17, 23, 29, 35, 41, 47]
    assert (config.kv_heads_sliding, config.kv_heads_full) == (8, 1)
    assert (config.head_dim_sliding, config.head_dim_full, config.live_frequencies_full) == (256, 512, 64)
    assert (config.rope_theta_sliding, config.rope_theta_full, config.rope_scaling_full) == (1e4, 1e6, 1.0)
    assert (config.embedding_multiplier, config.query_scale, config.final_softcap) == (62.0, 1.0, 30.0)
    assert (config.sliding_window, config.context_length, config.vocabulary_size) == (1024, 262144, 262144)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of Gemma 4 models with any pattern of layers and any heads; settings may be left out."""
    kv_heads, global_heads = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([None, 1, 2]))
    changes: dict[str, Any] = {
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_heads,
        "num_attention_heads": 4,
        "attention_k_eq_v": draw(st.booleans()),
        "head_dim": draw(st.sampled_from([16, 24, 64])),
        "global_head_dim": draw(st.sampled_from([16, 40, 512])),
        "model_type": draw(st.sampled_from(["gemma4_text", "gemma4_unified_text"])),
    }
    config = tiny.config("".join(draw(st.lists(st.sampled_from("sf"), min_size=1, max_size=8))), **changes)
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.1, 0.25, 0.33, 1.0]))
        config["rope_parameters"] = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": 2e6},
        }
    for key in draw(st.lists(st.sampled_from(["layer_types", "num_global_key_value_heads", "sliding_window", "head_dim"]))):
        config.pop(key, None)
    return {key: value for key, value in config.items() if value is not None}


@given(document=configurations())
@settings(max_examples=40, deadline=None)
def test_configurations_are_read_as_transformers_reads_them(document: dict[str, Any]) -> None:
    """As given, and in the form in which transformers writes it out again."""
    from transformers import AutoConfig
    from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedTextRotaryEmbedding

    others = json.loads(json.dumps({name: value for name, value in document.items() if name != "model_type"}))
    written = json.loads(AutoConfig.for_model(document["model_type"], **others).to_json_string())
    for form in (others, written):
        ours = read(form | {"model_type": document["model_type"]})
        theirs = AutoConfig.for_model(**copy.deepcopy(form | {"model_type": document["model_type"]}))
        rotary = Gemma4UnifiedTextRotaryEmbedding(theirs)
        assert [f"{kind}_attention" for kind in ours.layer_types] == theirs.layer_types
        for layer in range(ours.layers):
            own = theirs.per_layer_config[layer]
            assert (ours.head_dim(layer), ours.kv_heads(layer)) == (own.head_dim, own.num_key_value_heads)
        assert ours.sliding_window == theirs.sliding_window
        frequencies = rotary.full_attention_inv_freq.numpy()
        assert ours.live_frequencies_full == np.count_nonzero(frequencies)
        expected = ours.rope_theta_full ** (-2 * np.arange(ours.live_frequencies_full) / ours.head_dim_full)
        np.testing.assert_allclose(frequencies[: ours.live_frequencies_full], expected, rtol=1e-5)


ROPE_KEYS = ("full_attention", "sliding_attention", "rope_type", "rope_theta", "partial_rotary_factor", "head_dim")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "1", *ROPE_KEYS]), inner, max_size=3),
    max_leaves=4,
)
KEYS = (*tiny.config(), "rope_parameters", "rope_scaling", "per_layer_config", "rms_norm_eps", "sliding_window_pattern")


@given(key=st.sampled_from(KEYS), value=ANYTHING)
@example("layer_types", [["full"]] * 5)
@example("model_type", [])
@example("per_layer_config", {"0": {"head_dim": []}})
@example("rms_norm_eps", 10**400)
@settings(max_examples=300, deadline=None)
def test_whatever_a_configuration_holds_it_is_read_or_refused(key: str, value: Any) -> None:
    for document in (tiny.config() | {key: value}, {"model_type": "gemma4_unified", "text_config": tiny.config() | {key: value}}):
        with contextlib.suppress(SourceError):
            read(document)


def test_a_source_of_another_kind_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SourceError, match=r"no \.safetensors file"):
        SafetensorsSource(tmp_path)
