"""Checkpoints of assistants: what is converted with its target, what is refused and how that is said."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_environment import run_llm
from support import tiny_gemma4
from support.trained_pair import assistant_settings, random_assistant, save_assistant

from llm_gemma_coreml.bundle.inspection import check_packages
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.convert.assistant import Assistant
from llm_gemma_coreml.convert.assistant_source import AssistantSource
from llm_gemma_coreml.convert.source import ModelConfig, expected_shapes, open_source
from llm_gemma_coreml.errors import PackageError, RequestError, SourceError

SETTINGS = tiny_gemma4.config("ssf")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma4.checkpoint(tmp_path_factory.mktemp("checkpoints") / "target", SETTINGS)


@pytest.fixture(scope="module")
def target_config(target: Path) -> ModelConfig:
    source = open_source(target)
    source.close()
    return source.config


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    document = assistant_settings(SETTINGS, "sf")
    return save_assistant(random_assistant(document), document, tmp_path_factory.mktemp("checkpoints") / "assistant")


def edited(assistant: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the checkpoint with a changed config.json."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((assistant / "model.safetensors").read_bytes())
    document = json.loads((assistant / "config.json").read_text())
    change(document)
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def with_tensors(assistant: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """A copy of the checkpoint with changed tensors."""
    from safetensors.numpy import load_file, save_file

    folder.mkdir()
    tensors = load_file(assistant / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((assistant / "config.json").read_text())
    return folder


def text(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["text_config"].update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(use_ordered_embeddings=True), "use_ordered_embeddings"),
        (lambda d: d.update(backbone_hidden_size="x"), "backbone_hidden_size is 'x'"),
        (lambda d: d.update(backbone_hidden_size=0), "backbone_hidden_size is 0"),
        (lambda d: d.update(model_type="gemma4_unified_text"), "is no drafter"),
        (lambda d: d.update(model_type=None), "is no drafter"),
        (lambda d: d.update(text_config=None), "text_config is missing"),
        (text(num_kv_shared_layers=1), "num_kv_shared_layers"),
        (text(hidden_size_per_layer_input=256), "hidden_size_per_layer_input"),
        (text(hidden_size=128), "shape"),
        (text(num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]), "missing"),
    ],
)
def test_unsupported_assistants_are_named(
    assistant: Path, target_config: ModelConfig, tmp_path: Path, change: Any, said: str
) -> None:
    with pytest.raises(SourceError, match=said) as caught:
        AssistantSource(edited(assistant, tmp_path / "drafter", change), target_config)
    assert "drafter" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "backbone_hidden_size is 96, the model's 128"),
        ({"sliding_window": 64}, "sliding window is 100, the model's 64"),
        ({"rope_theta_full": 5e5}, "RoPE theta of full layers"),
        ({"live_frequencies_full": 40}, "RoPE frequencies of full layers"),
        ({"kv_heads_sliding": 2}, "key/value heads of sliding layers"),
        ({"kv_heads_full": 2}, "key/value heads of full layers"),
        ({"head_dim_sliding": 64}, "head dimension of sliding layers"),
        ({"head_dim_full": 64}, "head dimension of full layers"),
        ({"vocabulary_size": 4096}, "vocabulary is 352, the model's 4096"),
        ({"family": "gemma3"}, "family is gemma4, the model's gemma3"),
        ({"layer_types": ("full", "full")}, "no sliding layer"),
    ],
)
def test_a_drafter_of_another_model_is_refused(
    assistant: Path, target_config: ModelConfig, changes: dict[str, Any], said: str
) -> None:
    other = copy.copy(target_config)
    for name, value in changes.items():
        object.__setattr__(other, name, value)
    with pytest.raises(SourceError, match=said):
        Assistant.open(assistant, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("pre_projection.weight"), "pre_projection is missing"),
        (lambda t: t.pop("post_projection.weight"), "post_projection is missing"),
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.weight"), r"layers\.1\.q is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), "embed_tokens"),
        (lambda t: t.update({"masked_embedding.centroids.weight": np.zeros((4, 64), np.float32)}), "masked_embedding"),
        (lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.zeros((4, 64), np.float32)}), "not part of"),
        (lambda t: t.update({"post_projection.weight": np.zeros((64, 96), np.float32)}), "post_projection has shape"),
    ],
)
def test_wrong_tensors_are_named(
    assistant: Path, target_config: ModelConfig, tmp_path: Path, change: Any, said: str
) -> None:
    with pytest.raises(SourceError, match=said):
        AssistantSource(with_tensors(assistant, tmp_path / "drafter", change), target_config)


def test_nothing_is_left_of_a_conversion_with_a_bad_drafter(target: Path, assistant: Path, tmp_path: Path) -> None:
    def infinite(tensors: dict[str, np.ndarray]) -> None:
        tensors["pre_projection.weight"][0, 0] = np.inf

    broken = with_tensors(assistant, tmp_path / "drafter", infinite)
    for drafter, said in ((broken, "NaN or infinity"), (target, "is no drafter"), (tmp_path / "none", "no .safetensors")):
        with pytest.raises(SourceError, match=said):
            tiny_gemma4.bundle(tmp_path / "bundles", target, drafter=drafter)
    assert not [path for path in (tmp_path / "bundles").glob("*") if not path.name.startswith(".")]


def test_both_layers_whose_states_are_read_must_be_in_one_package(target: Path, assistant: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the last package must hold the layers 1 to 2; it starts at layer 2"):
        tiny_gemma4.bundle(tmp_path, target, drafter=assistant, layers_per_package=1)


def test_a_vocabulary_with_padding_is_cut_to_the_targets(target_config: ModelConfig, tmp_path: Path) -> None:
    document = assistant_settings(SETTINGS, "sf", vocab_size=SETTINGS["vocab_size"] + 64)
    source = AssistantSource(save_assistant(random_assistant(document), document, tmp_path / "a"), target_config)
    assert source.config.vocabulary_size == target_config.vocabulary_size
    assert expected_shapes(source.config)["embedding"] == source.tensor("embedding").shape
    source.close()


def test_the_command_builds_the_drafter_in_and_info_shows_it(
    target: Path, assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    made = run_llm(
        "gemma-coreml", "convert", str(target), "--drafter", str(assistant), "--name", "pair",
        "--contexts", "256", "--widths", "1,2,128",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    shown = run_llm("gemma-coreml", "info", "pair")
    assert "drafter     assistant of 2 layers, hidden size 64" in shown.output
    assert "reads K/V of layers 1 and 2" in shown.output
    facts = json.loads(run_llm("gemma-coreml", "info", "pair", "--json").output)
    assert facts["drafter"]["layers"] == 2
    assert facts["quantisation"]["drafter"] == "int8 block 32, head int8 block 32"
    assert "assistant_context_256" in facts["packages"][0]["functions"]
    bundle = tmp_path / "gemma-coreml" / "pair"
    manifest = load_manifest(bundle)
    assert manifest.schema_version == 2
    check_packages(manifest, bundle)
    refused = run_llm("gemma-coreml", "convert", str(target), "--drafter", str(target), "--name", "other")
    assert refused.exit_code == 1
    assert "is no drafter" in refused.output


def test_a_manifest_that_promises_a_drafter_needs_its_functions(target: Path, assistant: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    bundle = tiny_gemma4.bundle(tmp_path, target, "with", contexts=(256,), drafter=assistant)
    other = tiny_gemma4.bundle(tmp_path, target, "without", contexts=(256,))
    manifest = load_manifest(bundle)
    promised = replace(load_manifest(other), drafter=manifest.drafter, schema_version=2)
    with pytest.raises(PackageError, match="lacks the functions assistant_context_256"):
        check_packages(promised, other)
