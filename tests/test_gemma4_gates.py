"""Quantised Gemma 4 bundles: the gates of `verify`, transformers with the same weights, and the grid of q4_0 checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import tiny_gemma4 as tiny
from support.tiny_gemma4 import Pair

from llm_gemma_coreml.convert.source import open_source
from llm_gemma_coreml.engine import gates

WIDTHS = (1, 2, 4, 8, 128)
BLOCK = 32


@pytest.fixture(scope="module", params=[4, 8], ids=["int4", "int8"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("gemma4")
    return tiny.convert(folder, tiny.config("ssf", sliding_window=200), "bfloat16", bits=request.param, widths=WIDTHS)


def test_all_gates_pass(pair: Pair) -> None:
    report = gates.run_gates(pair.bundle)
    assert report.passed, report.render()
    assert len(report.results) == 8
    assert all(result.tokens_compared > 20 for result in report.results[1:])


def test_equals_transformers_with_the_same_quantised_weights(pair: Pair) -> None:
    ours, theirs = pair.portable_logits(), pair.reference
    np.testing.assert_array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))
    assert np.abs(ours - theirs).max() <= 1e-2
    fast = pair.portable_logits(exact=False)
    assert (fast.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.85  # activations are int8 there


def q4_0_checkpoint(folder: Path) -> Path:
    """A bfloat16 checkpoint whose linear weights lie on the grid of q4_0: blocks of 32, fp16 scales, -8 to 7."""
    import torch
    from safetensors.torch import load_file, save_file

    path = tiny.checkpoint(folder, tiny.config("sf"), dtype="bfloat16")
    random = np.random.default_rng(5)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            values = random.integers(-7, 8, (rows, columns // BLOCK, BLOCK)).astype(np.float32)
            values[:, :, 3] = -8  # the value of largest magnitude, which sets the scale
            scales = random.normal(0, 0.02, (rows, columns // BLOCK, 1)).astype(np.float16).astype(np.float32)
            tensors[name] = torch.from_numpy((values * scales).reshape(rows, columns)).bfloat16()
    save_file(tensors, path / "model.safetensors")
    return path


def test_the_grid_of_a_q4_0_checkpoint_is_kept_exactly(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    checkpoint = q4_0_checkpoint(tmp_path / "checkpoint")
    held = tiny.package_tensors(tiny.bundle(tmp_path, checkpoint, bits=4, contexts=(256,), widths=(1,)))
    for name, stored in load_file(checkpoint / "model.safetensors").items():
        if name != "model.embed_tokens.weight":
            assert torch.equal(torch.from_numpy(held[name]).bfloat16(), stored), name


def test_a_checkpoint_off_the_grid_is_quantised(tmp_path: Path) -> None:
    source = open_source(tiny.checkpoint(tmp_path, tiny.config("f"), dtype="bfloat16"))
    assert source.blocks("layers.0.q", 4) is None
    source.close()
