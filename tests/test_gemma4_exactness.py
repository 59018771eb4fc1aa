"""Gemma 4 on the portable runtime against transformers' own classes, with tiny random weights and every feature on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support import tiny_gemma4 as tiny
from support.sessions import forever, hidden_rows, open_runner
from support.tiny_gemma4 import Pair

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.portable.attention import find_attention

LARGEST_DIFFERENCE = 1e-2
CASES: Mapping[str, tuple[dict[str, Any], str]] = {
    "usual": (tiny.config("ssfsf"), "bfloat16"),
    "mostly full": (tiny.config("fsff", num_key_value_heads=2, num_global_key_value_heads=3, sliding_window=129), "float16"),
    # One K/V head of 512 for 16 query heads, as in the full layers of the 12B.
    "one layer": (tiny.config("f", num_attention_heads=16, num_key_value_heads=8, head_dim=32, global_head_dim=512), "float32"),
    # The dense text models of the older type, here with a projection of its own for the values of full layers.
    "gemma4_text": (tiny.config("ssf", model_type="gemma4_text", attention_k_eq_v=False, sliding_window=7), "bfloat16"),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return tiny.convert(tmp_path_factory.mktemp("gemma4"), *CASES["usual"])


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, usual: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return usual if request.param == "usual" else tiny.convert(tmp_path_factory.mktemp("gemma4"), *CASES[request.param])


def test_equals_transformers(pair: Pair) -> None:
    ours, theirs = pair.portable_logits(), pair.reference
    assert np.abs(theirs).max() > 10  # large enough for the cap on logits to matter
    np.testing.assert_array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))
    assert np.abs(ours - theirs).max() <= LARGEST_DIFFERENCE


def test_all_attention_is_recognised(pair: Pair) -> None:
    """Each layer of each function takes the in-place form, which is what makes calls of any size give the same bits."""
    manifest = load_manifest(pair.bundle)
    for package in manifest.layer_packages:
        opened = open_package(pair.bundle / package.path)
        assert len(opened.functions) == len(manifest.rungs) * len(manifest.widths)
        for name in opened.functions:
            plans = [match.plan for match in find_attention(opened.functions[name])]
            kinds = manifest.layer_types[package.first_layer : package.end_layer]
            assert len(plans) == len(kinds)
            for plan, kind in zip(plans, kinds, strict=True):
                full = kind == "full"
                heads = manifest.kv_heads_full if full else manifest.kv_heads_sliding
                size = manifest.head_dim_full if full else manifest.head_dim_sliding
                assert (plan.kv_heads, plan.head_dim, plan.group) == (heads, size, manifest.query_heads // heads)


@pytest.mark.parametrize("size", [1, 3, 8, 127])
def test_calls_of_any_size_give_the_same_bits(pair: Pair, size: int) -> None:
    runner = open_runner(pair.bundle)
    ids = tiny.random_ids(300)
    expected = hidden_rows(Session(runner), ids, forever(128))
    np.testing.assert_array_equal(hidden_rows(Session(runner), ids, forever(size)), expected)
    runner.close()


def test_fp16_packages_hold_the_weights_of_the_checkpoint(pair: Pair) -> None:
    import torch
    from safetensors.torch import load_file

    stored = load_file(pair.bundle.parent / "checkpoint" / "model.safetensors")
    assert set(pair.tensors) == set(stored)
    for name, value in stored.items():
        if name == "model.embed_tokens.weight":
            assert np.abs(pair.tensors[name] - value.float().numpy()).max() < 0.02  # int8 in any bundle
        else:
            wanted = value.to(torch.float16) if value.ndim == 2 else value
            np.testing.assert_array_equal(pair.tensors[name], wanted.float().numpy())


PARTIAL_ROTARY = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1_000_000.0},
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cap on logits": {"final_logit_softcapping": None},
    "window": {"sliding_window": 99},
    "partial rotary": {"rope_parameters": PARTIAL_ROTARY},
}
FACTORS = dict.fromkeys(
    ("layers.1.layer_scalar", "layers.2.self_attn.k_norm.weight", "layers.0.pre_feedforward_layernorm.weight"), 1.02
)


@pytest.mark.parametrize("feature", [*SETTINGS, *FACTORS, "embedding's multiplier"])
def test_each_feature_matters(feature: str, usual: Pair) -> None:
    """The comparison sees each feature: with it changed a little, transformers computes something else."""
    scaled = f"model.{feature}"
    changed = usual.changed_reference(
        SETTINGS.get(feature, {}),
        {scaled: usual.tensors[scaled] * np.float32(FACTORS[feature])} if feature in FACTORS else {},
        "float32" if feature == "embedding's multiplier" else None,
    )
    assert np.abs(changed - usual.reference).max() > LARGEST_DIFFERENCE
