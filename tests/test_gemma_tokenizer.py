"""The transformers tokenizer gives the ids, texts and places of the bundle's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers import PreTrainedTokenizerBase

from langchain_adapter.tokenizer import GemmaCoreMLTokenizer
from llm_gemma_coreml.chat.detokenizer import decode
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, RequestError

DATA = Path(__file__).parent / "data"
TEXTS = [
    "Hello world",
    "",
    "  a\n\n\tb  ",
    "日本語の文章𠮷と😀です",
    "a\u2581b \u2581\u2581",
    "<bos><start_of_turn>user\nHi<end_of_turn>",
    "\x00\r\n<b>x</b>",
    "\ud800 half",
]


@pytest.fixture(scope="module")
def ours(quickstart_bundle: Path) -> GemmaCoreMLTokenizer:
    return GemmaCoreMLTokenizer.of_bundle(quickstart_bundle)


@pytest.fixture(scope="module")
def bundle_tokenizer(quickstart_bundle: Path) -> Tokenizer:
    return Tokenizer(quickstart_bundle / "tokenizer.model")


@pytest.mark.parametrize("text", TEXTS)
def test_ids(ours: GemmaCoreMLTokenizer, bundle_tokenizer: Tokenizer, text: str) -> None:
    ids = bundle_tokenizer.encode_text(text)
    assert isinstance(ours, PreTrainedTokenizerBase)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == ours(text)["input_ids"] == [ours.bos_token_id, *ids]
    assert ours.convert_tokens_to_ids(ours.tokenize(text)) == ids
    assert len(ours.tokenize(text, split_special_tokens=False)) == len(ids)
    assert ours.decode(ids) == ours.decode(ours.encode(text), skip_special_tokens=True) == decode(bundle_tokenizer, ids)
    assert ours.decode(ours.encode(text)) == "<bos>" + ours.decode(ids)
    assert ours.convert_tokens_to_string(ours.tokenize(text)) == ours.decode(ids)


def test_languages(ours: GemmaCoreMLTokenizer, bundle_tokenizer: Tokenizer) -> None:
    for line in (DATA / "languages.tsv").read_text(encoding="utf-8").splitlines():
        assert ours.encode(line, add_special_tokens=False) == bundle_tokenizer.encode_text(line)
        assert ours.decode(ours.encode(line), skip_special_tokens=True) == line


def test_special_tokens(ours: GemmaCoreMLTokenizer, bundle_tokenizer: Tokenizer) -> None:
    assert ours.vocab_size == len(ours) == len(ours.get_vocab()) == bundle_tokenizer.vocabulary_size
    for name in ("<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>"):
        assert name in ours.all_special_tokens
        assert bundle_tokenizer.piece(ours.convert_tokens_to_ids(name)) == name
        assert ours.convert_ids_to_tokens(ours.convert_tokens_to_ids(name)) == name
    assert ours.bos_token_id == bundle_tokenizer.control_id("<bos>")
    assert ours.eos_token_id == bundle_tokenizer.control_id("<eos>")
    assert ours.pad_token_id == bundle_tokenizer.control_id("<pad>")
    special = [bundle_tokenizer.control_id("<start_of_turn>"), *bundle_tokenizer.encode_text("Hi")]
    assert ours.decode(special) == "<start_of_turn>Hi"
    assert ours.decode(special, skip_special_tokens=True) == "Hi"
    assert ours("Hi", return_special_tokens_mask=True)["special_tokens_mask"] == [1, 0]


def test_an_unfinished_character(ours: GemmaCoreMLTokenizer, bundle_tokenizer: Tokenizer) -> None:
    ids = bundle_tokenizer.encode_text("𠮷")
    assert len(ids) == 4
    assert [ours.decode(ids[:n]) for n in range(5)] == [decode(bundle_tokenizer, ids[:n]) for n in range(5)]


def test_offsets(ours: GemmaCoreMLTokenizer) -> None:
    text = "Hello  wörld 𠮷!"
    encoded = ours(text, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    assert len(offsets) == len(encoded["input_ids"])
    assert offsets[0] == (0, 0)
    assert [text[start:end] for start, end in offsets[1:3]] == ["Hello", "  "]
    assert [text[start:end] for start, end in offsets[-5:]] == ["𠮷"] * 4 + ["!"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30))
def test_offsets_cover_any_text(ours: GemmaCoreMLTokenizer, text: str) -> None:
    encoded = ours(text, return_offsets_mapping=True, add_special_tokens=False)
    at = 0
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        assert max(at - 1, 0) <= start <= at <= end
        assert start < end
        assert text[start:end].replace("\u2581", " ") == ours.decode([token]) or "\ufffd" in ours.decode([token])
        at = end
    assert at == len(text)


@pytest.mark.parametrize("side", ["left", "right"])
def test_offsets_with_truncation_padding_and_batches(ours: GemmaCoreMLTokenizer, side: str) -> None:
    ours.truncation_side = ours.padding_side = side
    try:
        texts = ["one two three four five six", "a"]
        batch = ours(texts, return_offsets_mapping=True, truncation=True, max_length=4, padding=True, return_tensors="np")
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 4)
        assert batch["offset_mapping"].shape == (2, 4, 2)
        words = [texts[0][start:end] for start, end in batch["offset_mapping"][0] if end]
        assert words == (["one", " two", " three"] if side == "right" else [" four", " five", " six"])
        assert [texts[1][start:end] for start, end in batch["offset_mapping"][1] if end] == ["a"]
        single = ours(texts[1], return_offsets_mapping=True, return_tensors="np")
        assert single["offset_mapping"].tolist() == [[[0, 0], [0, 1]]]
    finally:
        ours.truncation_side, ours.padding_side = "right", "left"


def test_what_has_no_offsets(ours: GemmaCoreMLTokenizer) -> None:
    with pytest.raises(RequestError, match="pairs"):
        ours("a", "b", return_offsets_mapping=True)


def test_langchain_takes_it(ours: GemmaCoreMLTokenizer, bundle_tokenizer: Tokenizer) -> None:
    splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(ours, chunk_size=60, chunk_overlap=0)
    chunks = splitter.split_text((DATA / "prose_holmes.txt").read_text(encoding="utf-8"))
    assert len(chunks) > 3
    assert [splitter._length_function(chunk) for chunk in chunks] == [len(bundle_tokenizer.encode_text(c)) for c in chunks]


def test_saving(ours: GemmaCoreMLTokenizer, tmp_path: Path) -> None:
    ours.save_pretrained(tmp_path)
    again = GemmaCoreMLTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text)
    assert again.model_max_length == ours.model_max_length


def test_bad_input(ours: GemmaCoreMLTokenizer, tmp_path: Path) -> None:
    with pytest.raises(GemmaCoreMLError):
        GemmaCoreMLTokenizer.of_bundle("no-such-model")
    with pytest.raises(BundleError, match="missing"):
        GemmaCoreMLTokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(RequestError, match="no piece"):
        ours.convert_tokens_to_ids(["no such piece"])
