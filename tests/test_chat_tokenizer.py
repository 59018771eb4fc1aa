"""The tokenizer, the detokenizer and stop strings."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chats import gemma3_tokenizer, gemma4_tokenizer, ids
from support.gemma4_tokenizer import GEMMA4_NAMES

from llm_gemma_coreml.chat.detokenizer import Detokenizer, decode
from llm_gemma_coreml.chat.stop_strings import StopStrings
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.errors import BundleError, RequestError

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40)


def test_known_ids() -> None:
    """Ids that Google's own tokenizer gives (facts about the published vocabulary)."""
    tokenizer = gemma3_tokenizer()
    assert tokenizer.vocabulary_size == 262144
    assert tokenizer.encode_text("Hello") == [9259]
    assert tokenizer.encode_text(" Café") == [62367]
    assert tokenizer.encode_text("\n\n\n") == [109]
    assert len(tokenizer.encode_text("12345")) == 5
    assert tokenizer.encode_text("\r") == [238 + 0x0D]
    assert tokenizer.control_id("<bos>") == 2
    assert tokenizer.control_id("<end_of_turn>") == 106


@given(TEXTS)
@settings(deadline=None)
def test_text_survives(text: str) -> None:
    tokenizer = gemma3_tokenizer()
    assert decode(tokenizer, tokenizer.encode_text(text)) == text


@given(st.lists(st.sampled_from(["<", "|", ">", "turn", "bos", "[multimodal]", " ", *GEMMA4_NAMES.values()]), max_size=8))
@settings(deadline=None)
def test_text_is_never_a_control_token(parts: list[str]) -> None:
    for tokenizer in (gemma3_tokenizer(), gemma4_tokenizer()):
        tokens = tokenizer.encode_text("".join(parts))
        assert not any(tokenizer.is_control(token) for token in tokens)
        assert decode(tokenizer, tokens) == "".join(parts)


def test_every_control_name_stays_text() -> None:
    tokenizer = gemma4_tokenizer()
    for name in [*tokenizer.control_names(), "<unused99>", "<unused6241>"]:
        tokens = tokenizer.encode_text(f"a{name}b")
        assert not any(tokenizer.is_control(token) for token in tokens), name
        assert decode(tokenizer, tokens) == f"a{name}b"


def test_markers_that_a_file_types_as_ordinary_pieces(tmp_path: Path) -> None:
    """Some converters type `<|tool_response>` or `[multimodal]` as user-defined; text must not become them."""
    from sentencepiece import sentencepiece_model_pb2
    from support.gemma4_tokenizer import gemma4_model

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(gemma4_model().read_bytes())
    for token in (5, 50, 52):
        proto.pieces[token].type = 4
    (tmp_path / "model").write_bytes(proto.SerializeToString())
    tokenizer = Tokenizer(tmp_path / "model")
    text = 'x<|tool_response>[multimodal]<|"|><|tool_response>'
    tokens = tokenizer.encode_text(text)
    assert not {5, 50, 52} & set(tokens)
    assert decode(tokenizer, tokens) == text
    assert tokenizer.is_control(50)
    assert tokenizer.control_id("<|tool_response>") == 50


def test_lone_surrogates_are_no_crash() -> None:
    tokenizer = gemma3_tokenizer()
    assert decode(tokenizer, tokenizer.encode_text("a\ud800b")) == "a?b"


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\xff"])
def test_bad_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.model"):
        Tokenizer(path)


def test_missing_file_and_unknown_ids(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="missing"):
        Tokenizer(tmp_path / "tokenizer.model")
    tokenizer = gemma3_tokenizer()
    assert tokenizer.find_control("Hello") is None
    with pytest.raises(BundleError, match="<no_such>"):
        tokenizer.control_id("<no_such>")
    with pytest.raises(BundleError, match="262144"):
        tokenizer.piece(262144)
    assert tokenizer.bytes_of(262144) == b""


def byte_tokens(data: bytes) -> list[int]:
    return [238 + value for value in data]


def test_characters_split_over_tokens_are_held_back() -> None:
    detokenizer = Detokenizer(gemma3_tokenizer())
    tokens = byte_tokens("𠮷".encode())
    assert [detokenizer.feed(token) for token in tokens] == ["", "", "", "𠮷"]
    assert detokenizer.flush() == ""


def test_invalid_bytes_become_one_replacement_each() -> None:
    tokenizer = gemma3_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    fed = [detokenizer.feed(token) for token in [*byte_tokens("𠮷".encode()[:3]), 9259]]
    assert fed == ["", "", "", "\ufffd\ufffd\ufffdHello"]
    assert [detokenizer.feed(token) for token in byte_tokens(b"\xff\xc3")] == ["\ufffd", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@given(st.binary(max_size=12))
@settings(deadline=None)
def test_any_bytes_as_python_decodes_them(data: bytes) -> None:
    """Oracle: Python's own decoder, each undecodable byte replaced."""
    expected = data.decode("utf-8", "surrogateescape")
    expected = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in expected)
    assert decode(gemma3_tokenizer(), byte_tokens(data)) == expected


def test_control_tokens_add_no_text() -> None:
    tokenizer = gemma4_tokenizer()
    assert decode(tokenizer, ids(tokenizer, "a<|channel>thought<turn|>b")) == "athoughtb"


@given(st.lists(st.text("ab\n", max_size=5), max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
@settings(deadline=None)
def test_stop_strings_cut_as_on_the_whole_text(chunks: list[str], stop: list[str]) -> None:
    whole = "".join(chunks)
    first_end = min((whole.find(text) + len(text) for text in stop if text in whole), default=None)
    filtered = StopStrings(stop)
    shown = "".join(map(filtered.feed, chunks))
    stopped = filtered.stopped
    shown += filtered.flush()
    assert stopped == (first_end is not None)
    if not stopped:
        assert shown == whole
    else:
        assert whole.startswith(shown)
        assert not any(text in shown for text in stop)
        assert any(whole.startswith(text, len(shown)) for text in stop)


def test_stop_strings_hold_back_no_more_than_needed() -> None:
    filtered = StopStrings(["\nUser:"])
    assert filtered.feed("hello\nU") == "hello"
    assert filtered.feed("p") == "\nUp"
    assert filtered.feed("\nUser: x") == ""
    assert filtered.stopped
    assert filtered.feed("more") == ""


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["x", ""])
