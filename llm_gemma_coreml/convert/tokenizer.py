"""The bundle's tokenizer: a SentencePiece model rebuilt from a checkpoint, safe against control text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from llm_gemma_coreml.errors import SourceError

SPACE = "\u2581"
_MAX_PIECES = 1 << 21


def _schema() -> Any:
    """The generated classes of SentencePiece's model format (made at run time, so they have no types)."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2


class PieceKind(IntEnum):
    """SentencePiece's types of pieces; GGUF uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its place in the list."""

    text: str
    score: float
    kind: PieceKind


# Markup that Gemma's vocabulary holds as whole pieces and that ordinary text may use. Every other piece that
# is not a normal one is a marker (turns, images, tools): text must never become one of those.
_MARKUP_NAMES = frozenset(
    [
        "table",
        "caption",
        "thead",
        "tbody",
        "tfoot",
        "tr",
        "th",
        "td",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "blockquote",
        "strong",
        "em",
        "b",
        "i",
        "u",
        "s",
        "sub",
        "sup",
        "code",
        "a",
        "html",
        "body",
        "img",
        "span",
        "bbox",
        "ul",
        "li",
        "div",
        "iframe",
        "footer",
    ]
)
_MARKUP = re.compile(r"</?([a-z][a-z0-9]*)>")
_BLANK = re.compile(f"(?:\n+|\t+|\r+|[ {SPACE}]+)")
_IMAGE_PLACEHOLDER = "<image_soft_token>"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def is_text_piece(text: str) -> bool:
    """Whether a piece that is matched as a whole may come from text: runs of blanks and HTML tags."""
    markup = _MARKUP.fullmatch(text)
    return bool(_BLANK.fullmatch(text)) or bool(markup and markup.group(1) in _MARKUP_NAMES)


def from_gguf(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], where: str) -> bytes:
    """Serialised SentencePiece model from a GGUF's vocabulary. `where` names the file in errors."""
    if not len(tokens) == len(scores) == len(kinds):
        raise SourceError(
            f"{where}: the vocabulary has {len(tokens)} tokens, {len(scores)} scores and {len(kinds)} types; "
            "they must be as many."
        )
    try:
        pieces = [
            Piece(text, float(score), PieceKind(kind))
            for text, score, kind in zip(tokens, scores, kinds, strict=True)
        ]
    except ValueError as error:
        raise SourceError(f"{where}: unknown type of token: {error}.") from error
    return build_model(pieces, where)


def from_sentencepiece(model: bytes, where: str) -> bytes:
    """The same SentencePiece model with its marker pieces made control pieces."""
    from google.protobuf.message import DecodeError

    schema = _schema()

    proto = schema.ModelProto()
    try:
        proto.ParseFromString(model)
        pieces = [Piece(piece.piece, piece.score, PieceKind(piece.type)) for piece in proto.pieces]
    except (DecodeError, ValueError) as error:
        raise SourceError(f"{where}: not a SentencePiece model ({error}).") from error
    if proto.trainer_spec.model_type != schema.TrainerSpec.BPE:
        raise SourceError(f"{where}: not a BPE model; Gemma's tokenizers are. Use the checkpoint's own file.")
    return build_model(pieces, where)


def from_tokenizer_json(text: str, where: str) -> bytes:
    """Serialised SentencePiece model equivalent to a Gemma `tokenizer.json` (BPE with byte fallback).

    The image placeholder that Gemma 3 adds behind its vocabulary is left out.
    """
    try:
        document = json.loads(text)
        model = document["model"]
        vocabulary: dict[str, int] = model["vocab"]
        merges: list[Any] = model["merges"]
        added: dict[int, dict[str, Any]] = {int(entry["id"]): entry for entry in document["added_tokens"]}
        if model["type"] != "BPE" or not model.get("byte_fallback"):
            raise SourceError(f"{where}: not a BPE tokenizer with byte fallback, which Gemma's are.")
        ranks = _merge_ranks(merges)
        by_id = {int(number): piece for piece, number in vocabulary.items()}
        by_id.update({number: str(entry["content"]) for number, entry in added.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(f"{where}: not a tokenizer.json that can be read ({error!r}).") from error
    if by_id.get(len(by_id) - 1) == _IMAGE_PLACEHOLDER:
        del by_id[len(by_id) - 1]
    if sorted(by_id) != list(range(len(by_id))):
        raise SourceError(f"{where}: token ids have gaps; the file is incomplete.")
    last = float(len(ranks))
    pieces = []
    for number in range(len(by_id)):
        piece = by_id[number]
        if number in added:
            kind = PieceKind.USER_DEFINED if is_text_piece(piece) else PieceKind.CONTROL
        else:
            kind = PieceKind.BYTE if _BYTE.fullmatch(piece) else PieceKind.NORMAL
        pieces.append(Piece(piece, -float(ranks.get(piece, last)), kind))
    return build_model(pieces, where)


def _merge_ranks(merges: list[Any]) -> dict[str, int]:
    """Rank of each merged piece: the order in which BPE prefers to make it, whichever pair it is made of."""
    ranks: dict[str, int] = {}
    for merge in merges:
        piece = merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
        ranks.setdefault(piece, len(ranks))
    return ranks


def build_model(pieces: Sequence[Piece], where: str) -> bytes:
    """Serialise `pieces` as a SentencePiece BPE model that neither normalises nor adds blanks.

    Pieces that only markers may produce become control pieces, so that encoding text never yields them.
    Raises SourceError if `<unk>`, `<bos>` or `<eos>` is missing or a piece occurs twice.
    """
    schema = _schema()

    if not 0 < len(pieces) <= _MAX_PIECES:
        raise SourceError(f"{where}: a vocabulary of {len(pieces)} pieces cannot be used.")
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise SourceError(f"{where}: the vocabulary holds a piece twice.")
    missing = [marker for marker in ("<unk>", "<bos>", "<eos>") if marker not in ids]
    if missing:
        raise SourceError(f"{where}: the vocabulary lacks {', '.join(missing)}; this is no Gemma tokenizer.")
    proto = schema.ModelProto()
    for number, piece in enumerate(pieces):
        entry = proto.pieces.add()
        try:
            entry.piece, entry.type = _text_and_kind(piece)
        except ValueError as error:  # a lone surrogate
            raise SourceError(f"{where}: piece {number} is not valid Unicode.") from error
        if not math.isfinite(piece.score):
            raise SourceError(f"{where}: piece {number} has the score {piece.score}.")
        entry.score = piece.score
    trainer = proto.trainer_spec
    trainer.model_type = schema.TrainerSpec.BPE
    trainer.byte_fallback = any(piece.kind == PieceKind.BYTE for piece in pieces)
    trainer.vocab_size = len(pieces)
    trainer.unk_id, trainer.bos_id, trainer.eos_id = ids["<unk>"], ids["<bos>"], ids["<eos>"]
    trainer.pad_id = ids.get("<pad>", -1)
    trainer.unk_piece, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece = (
        "<unk>",
        "<bos>",
        "<eos>",
        "<pad>",
    )
    normalizer = proto.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = False
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return bytes(proto.SerializeToString())


def _text_and_kind(piece: Piece) -> tuple[str, int]:
    if piece.text == "<unk>":
        return piece.text, int(PieceKind.UNKNOWN)
    if piece.kind in (PieceKind.USER_DEFINED, PieceKind.CONTROL, PieceKind.UNUSED):
        if not is_text_piece(piece.text):
            return piece.text, int(PieceKind.CONTROL)
        # SentencePiece matches whole pieces after it has replaced spaces.
        return piece.text.replace(" ", SPACE), int(PieceKind.USER_DEFINED)
    return piece.text, int(piece.kind)


def piece_count(model: bytes) -> int:
    """Number of pieces of a serialised SentencePiece model."""
    proto = _schema().ModelProto()
    proto.ParseFromString(model)
    return len(proto.pieces)


def piece_ids(model: bytes) -> dict[str, int]:
    """Id of every piece of a serialised SentencePiece model, by its text."""
    schema = _schema()

    proto = schema.ModelProto()
    proto.ParseFromString(model)
    return {piece.piece: number for number, piece in enumerate(proto.pieces)}
