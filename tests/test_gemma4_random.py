"""Gemma 4 models of random shapes: right, recognised, and the same bits in any cut; other forms of writing compute the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support import tiny_gemma4 as tiny
from support.sessions import all_logits, forever, hidden_rows, open_runner

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.runtime.portable.attention import find_attention

CONTEXTS = (128, 768)
WIDTHS = (1, 3, 77, 128)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of small models: any pattern of layers, windows that are multiples of nothing, any grouping of heads."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([2, 3, 5, 8]))
    heads = kv_heads * group
    full_heads = draw(st.sampled_from([n for n in range(1, heads) if heads % n == 0]))
    dims = st.sampled_from([8, 16, 32, 48, 80, 256])
    head_dim, full_dim = draw(dims), draw(dims)
    assume(heads * head_dim % 32 == 0)
    assume(heads * full_dim % 32 == 0)
    return tiny.config(
        "".join(draw(st.lists(st.sampled_from("sf"), min_size=1, max_size=3))),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_global_key_value_heads=full_heads,
        head_dim=head_dim,
        global_head_dim=full_dim,
        sliding_window=draw(st.sampled_from([1, 2, 7, 127, 128, 129, 300, 1000])),
        attention_k_eq_v=draw(st.booleans()),
        final_logit_softcapping=draw(st.sampled_from([None, 5.0, 30.0])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-4])),
        hidden_size=draw(st.sampled_from([32, 96])),
    )


@given(config=models(), bits=st.sampled_from([4, 8, 16]), dtype=st.sampled_from(["bfloat16", "float16"]))
@example(tiny.config("f", sliding_window=1), 4, "bfloat16")  # no sliding layer at all
@settings(max_examples=2, deadline=None, derandomize=True)
def test_any_model_is_right_and_the_same_in_any_cut(config: dict[str, Any], bits: int, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pair = tiny.convert(Path(folder), config, dtype, bits=bits, contexts=CONTEXTS, widths=WIDTHS)
        (package,) = load_manifest(pair.bundle).layer_packages
        functions = open_package(pair.bundle / package.path).functions
        assert all(len(find_attention(functions[name])) == package.end_layer for name in functions)
        ours, theirs = pair.portable_logits(), pair.reference
        assert np.abs(ours - theirs).max() < 0.03
        # Random rows may be near ties, closer than the rounding of K/V to fp16.
        assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.99
        runner, ids = open_runner(pair.bundle), tiny.random_ids(300)
        whole = hidden_rows(Session(runner), ids, forever(128))
        for size in (1, 3, 70):
            np.testing.assert_array_equal(hidden_rows(Session(runner), ids, forever(size)), whole)
        runner.close()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tiny.Pair:
    return tiny.convert(tmp_path_factory.mktemp("gemma4"), tiny.config("sf"), "bfloat16", contexts=(256,), widths=(8,))


@pytest.mark.parametrize("form", [{"write_form": "one_hot"}, {"write_form": "gather"}, {"attention_form": "sdpa"}])
def test_other_forms_compute_the_same(form: dict[str, str], usual: tiny.Pair, tmp_path: Path) -> None:
    """They take the general path of the portable runtime, which computes the MIL text as it stands."""
    bundle = tiny.bundle(tmp_path, usual.bundle.parent / "checkpoint", contexts=(256,), widths=(8,), **form)
    runner, ids = open_runner(bundle, exact=True), tiny.random_ids()[:140]
    logits = all_logits(runner, hidden_rows(Session(runner), ids, forever(8)))
    runner.close()
    np.testing.assert_allclose(logits, usual.reference[: len(ids)], rtol=0, atol=1e-2)
