"""The tiktoken encoding gives the ids of the bundle's tokenizer: on real and made-up texts, and on anything random."""

from __future__ import annotations

import inspect
import pickle
import random
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_text_splitters import RecursiveCharacterTextSplitter, TokenTextSplitter

from langchain_adapter.encoding import GemmaEncoding, gemma_encoding
from langchain_adapter.encoding_ranks import cutting_pattern, rank_table
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.convert import tokenizer as convert_tokenizer
from llm_gemma_coreml.convert.tokenizer import Piece, PieceKind, build_model
from llm_gemma_coreml.errors import BundleError, ModelNotInstalledError, RequestError

DATA = Path(__file__).parent / "data"
BLANKS = [" ", "  ", "\n", "\t", "\r", "\r\n", "\u2581", "\u00a0", "\u3000", "\x00", "\x0b"]
MARKUP = ["<b>", "</b>", "<table>", "</", "<", ">", "> </", "><", "<td", "<start_of_turn>", "<eos>", "<0x0D>", "<unused7>"]


@pytest.fixture(scope="module")
def tokenizer(quickstart_bundle: Path) -> Tokenizer:
    return Tokenizer(quickstart_bundle / "tokenizer.model")


@pytest.fixture(scope="module")
def encoding(quickstart_bundle: Path) -> Iterator[GemmaEncoding]:
    yield gemma_encoding(quickstart_bundle)
    tiktoken.registry.ENCODINGS.pop("gemma3", None)


def assert_same(encoding: GemmaEncoding, tokenizer: Tokenizer, text: str) -> None:
    """By the way that `encode` takes, and by that of tiktoken in any case."""
    expected = tokenizer.encode_text(text)
    clean = text.encode("utf-8", "replace").decode()
    assert encoding.encode(text) == expected
    assert encoding._merged(clean).tolist() == expected
    assert encoding.decode_bytes(expected) == clean.replace("\u2581", " ").encode()


def languages() -> list[str]:
    lines = (DATA / "languages.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t", 1)[1] for line in lines]


def characters_by_script() -> list[str]:
    """Every assigned character, those of a script together, in texts of up to 2,000."""
    scripts: dict[str, list[str]] = {}
    for point in range(0x20, 0x1FBFF):
        name = unicodedata.name(chr(point), "")
        if name:
            scripts.setdefault(name.split()[0], []).append(chr(point))
    texts = ["".join(characters) for characters in scripts.values()]
    return [text[start : start + 2000] for text in texts for start in range(0, len(text), 2000)]


def test_many_languages(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    texts = languages()
    assert len(texts) > 100
    for text in [*texts, " ".join(texts), "\n".join(texts)]:
        assert_same(encoding, tokenizer, text)


def test_every_assigned_character(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    for text in characters_by_script():
        assert_same(encoding, tokenizer, text)
        assert_same(encoding, tokenizer, " ".join(text[:500]))


def test_code_and_prose(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    root = Path(__file__).parent.parent
    files = [*root.glob("*.toml"), *root.glob("*/*.py"), *root.glob("*/*.md"), *root.glob("docs/*.svg"), *DATA.iterdir()]
    texts = [path.read_text(encoding="utf-8") for path in files if path.is_file()]
    texts += [inspect.getsource(module) for module in (unicodedata_table(), inspect, random)]
    for text in [*texts, *(text.replace("\n", "\r\n").replace("    ", "\t") for text in texts)]:
        assert_same(encoding, tokenizer, text)


def unicodedata_table() -> object:
    """A module of the standard library that is full of unusual characters."""
    import encodings.cp1006

    return encodings.cp1006


@pytest.mark.parametrize("blank", [" ", "\n", "\t", "\r", "\u2581", "\u00a0"])
def test_runs_of_blanks(encoding: GemmaEncoding, tokenizer: Tokenizer, blank: str) -> None:
    for length in [*range(70), 500]:
        for before, after in [("", ""), ("a", ""), ("", "b"), ("a", "b"), (">", "</"), (">", "</b>"), ("1", "2"), ("の", "の")]:
            assert_same(encoding, tokenizer, before + blank * length + after)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        "👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 ✌🏽 𠮷 e\u0301",
        "\ud83d \udc00x",
        "\ufffd\ufeff\u200b\u2028",
        "<start_of_turn>user\nHi<end_of_turn><bos>[multimodal]<image_soft_token>",
        "YYYY yyyy diffformul ::::::::  :::::::::::::::: yyyy-MM-dd",
        "> </a> </b> ></ > </ >  </",
        "12345.678e-9",
        "a" * 5000,
        "<" * 3000 + ">" * 3000,
        "> </" * 1000,
    ],
)
def test_awkward_texts(encoding: GemmaEncoding, tokenizer: Tokenizer, text: str) -> None:
    assert_same(encoding, tokenizer, text)


def test_every_piece_alone_and_beside_others(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    pieces = tokenizer.pieces()
    draw = random.Random(5)
    draw.shuffle(pieces)
    for start in range(0, len(pieces), 64):
        group = pieces[start : start + 64]
        assert_same(encoding, tokenizer, "".join(group))
    for piece in pieces[:3000]:
        assert_same(encoding, tokenizer, piece)


@settings(max_examples=400, deadline=None)
@given(st.text())
def test_random_characters(encoding: GemmaEncoding, tokenizer: Tokenizer, text: str) -> None:
    assert_same(encoding, tokenizer, text)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from([*BLANKS, *MARKUP]) | st.integers(0, 2000) | st.text(max_size=3), max_size=40))
def test_random_mixtures(encoding: GemmaEncoding, tokenizer: Tokenizer, parts: list[str | int]) -> None:
    """Integers stand for pieces of the vocabulary, all over it."""
    texts = [tokenizer.piece(part * 131 % tokenizer.vocabulary_size) if isinstance(part, int) else part for part in parts]
    assert_same(encoding, tokenizer, "".join(texts))


def test_text_splitters(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    text = (DATA / "prose_alice.txt").read_text(encoding="utf-8")
    splitter = RecursiveCharacterTextSplitter.from_tiktoken_encoder(encoding_name="gemma3", chunk_size=100, chunk_overlap=0)
    chunks = splitter.split_text(text)
    assert len(chunks) > 3
    assert all(0 < len(tokenizer.encode_text(chunk)) <= 100 for chunk in chunks)
    by_tokens = TokenTextSplitter(encoding_name="gemma3", chunk_size=50, chunk_overlap=0).split_text(text)
    assert "".join(by_tokens) == text


def test_decoding(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    text = "Ein größeres 𠮷  <b>x</b>"
    ids = encoding.encode(text)
    assert encoding.decode(ids) == text
    shown, offsets = encoding.decode_with_offsets(ids)
    assert shown == text
    assert offsets[0] == 0
    assert encoding.decode_tokens_bytes(ids) == [tokenizer.bytes_of(token) for token in ids]
    assert encoding.token_byte_values() == [tokenizer.bytes_of(token) for token in range(tokenizer.vocabulary_size)]
    assert encoding.decode([tokenizer.control_id("<bos>"), *ids]) == text
    assert encoding.n_vocab == tokenizer.vocabulary_size
    assert encoding.eot_token == tokenizer.control_id("<eos>")
    for token in ids:
        assert encoding.encode_single_token(tokenizer.bytes_of(token)) == token or tokenizer.is_byte(token)
    assert encoding.encode_to_numpy(text).tolist() == ids
    assert encoding.encode_batch([text, "a"]) == [ids, encoding.encode("a")]
    with pytest.raises(KeyError):
        encoding.decode([tokenizer.vocabulary_size])
    with pytest.raises(KeyError):
        encoding.decode([-1])
    with pytest.raises(KeyError):
        encoding.decode_with_offsets([tokenizer.control_id("<bos>")])
    with pytest.raises(KeyError):
        encoding.encode_single_token("\ue000 no such piece")
    with pytest.raises(NotImplementedError):
        encoding.encode_with_unstable("x")


def test_control_tokens_are_never_made_or_refused(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    text = "<bos><eos><start_of_turn>"
    assert not any(tokenizer.is_control(token) for token in encoding.encode(text, allowed_special="all"))
    assert encoding.encode(text, disallowed_special="all") == tokenizer.encode_text(text)


def test_registration(encoding: GemmaEncoding, quickstart_bundle: Path, tmp_path: Path) -> None:
    assert tiktoken.get_encoding("gemma3") is encoding
    assert gemma_encoding(quickstart_bundle) is encoding
    assert pickle.loads(pickle.dumps(encoding)) is encoding
    with pytest.raises(RequestError, match="another name"):
        gemma_encoding(quickstart_bundle, name="cl100k_base")
    with pytest.raises(ModelNotInstalledError, match="no bundle"):
        gemma_encoding(tmp_path)
    with pytest.raises(ModelNotInstalledError, match="no bundle"):
        gemma_encoding("no-such-model")


def test_a_model_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    with pytest.raises(ModelNotInstalledError, match="install"):
        gemma_encoding("gemma4-local")


def small_pieces() -> list[Piece]:
    controls = [Piece(name, 0, PieceKind.CONTROL) for name in ("<pad>", "<eos>", "<bos>")]
    bytes_ = [Piece(f"<0x{byte:02X}>", 0, PieceKind.BYTE) for byte in range(256)]
    whole = [Piece(text, 0, PieceKind.USER_DEFINED) for text in ("\n", "\n\n", "\u2581\u2581", "<b>")]
    merged = [Piece(text, -score, PieceKind.NORMAL) for score, text in enumerate(["ab", "\u2581a", "abc", "bc", "日本"])]
    singles = [Piece(text, -100 - number, PieceKind.NORMAL) for number, text in enumerate("abc\u2581日本<>")]
    return [*controls, Piece("<unk>", 0, PieceKind.UNKNOWN), *bytes_, *whole, *merged, *singles]


def write_model(pieces: list[Piece], folder: Path) -> Tokenizer:
    path = folder / "tokenizer.model"
    path.write_bytes(build_model(pieces, "test"))
    return Tokenizer(path)


def test_a_small_vocabulary(tmp_path: Path) -> None:
    tokenizer = write_model(small_pieces(), tmp_path)
    small = GemmaEncoding("small", tokenizer.path)
    for text in ["abcab bc  a\n\n\n<b><ab>", "日本日本本日 日", "月é日", "", "cab   ab"]:
        assert_same(small, tokenizer, text)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda pieces: [
                *pieces,
                Piece("ca", pieces[-1].score, PieceKind.NORMAL),
                Piece("cb", pieces[-1].score, PieceKind.NORMAL),
            ],
            "same score",
        ),
        (lambda pieces: [*pieces, Piece("ax", -500, PieceKind.NORMAL)], "'x'"),
        (lambda pieces: [*pieces, Piece("\n\n\n\n", 0, PieceKind.USER_DEFINED)], "gaps"),
        (
            lambda pieces: [
                *pieces,
                Piece("<end_of_turn>", -500, PieceKind.NORMAL),
                *(Piece(c, -600 - ord(c), PieceKind.NORMAL) for c in "endoftur_"),
            ],
            "control",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(tmp_path: Path, change: object, problem: str) -> None:
    tokenizer = write_model(change(small_pieces()), tmp_path)  # type: ignore[operator]
    with pytest.raises(BundleError, match=problem):
        rank_table(tokenizer)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\x08nonsense")
    with pytest.raises(BundleError, match="SentencePiece"):
        GemmaEncoding("bad", path)


def test_the_pattern_loses_nothing() -> None:
    pattern = re.compile(cutting_pattern(["\n", "\n\n", "  ", "   ", "<b>"], ["> </"]))
    for text in ["a b  c\n\n\nd <b> </b><a", "> </ >  </", "    ", "<b", " "]:
        assert "".join(pattern.findall(text)) == text


def test_markup_names_of_the_converter_are_matched_whole(encoding: GemmaEncoding, tokenizer: Tokenizer) -> None:
    for name in convert_tokenizer._MARKUP_NAMES:
        assert_same(encoding, tokenizer, f" <{name}>x</{name}> <{name} </{name}")
