"""The tokenizer: text to ids that are never control tokens, and what each id stands for."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from llm_gemma_coreml.errors import BundleError

WORD_BOUNDARY = "\u2581"
"""SentencePiece writes a space as this character."""

MARKERS = (
    "[multimodal]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<|turn>",
    "<turn|>",
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
)
"""Pieces that are control tokens even where a tokenizer file types them as ordinary ones."""


class Tokenizer:
    """A SentencePiece model. Ids are positions in its vocabulary of `vocabulary_size` pieces.

    Raises BundleError if the file is missing or is no SentencePiece model. Safe to use from several threads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._model = _load(self.path)
        self.vocabulary_size = int(self._model.get_piece_size())
        self._untyped = {
            name: ident
            for name in MARKERS
            if (ident := self._existing_id(name)) is not None and not self._model.is_control(ident)
        }
        alternatives = "|".join(re.escape(name) for name in self._untyped)
        self._untyped_pattern = re.compile(alternatives) if alternatives else None
        self._untyped_ids = frozenset(self._untyped.values())
        self.bytes_of = lru_cache(maxsize=65536)(self._bytes_of)

    def encode_text(self, text: str) -> list[int]:
        """The ids of `text`. None of them is a control token, whatever the text says. No `<bos>` is added."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8") if _has_surrogates(text) else text
        if self._untyped_pattern is None:
            return list(self._model.encode(text))
        ids: list[int] = []
        start = 0
        for match in self._untyped_pattern.finditer(text):
            # Cut after the marker's first character: the file would match the whole marker as one piece.
            ids += self._model.encode(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + list(self._model.encode(text[start:]))

    def piece(self, token: int) -> str:
        """The piece as the vocabulary spells it. Raises BundleError if the id is outside the vocabulary."""
        if not 0 <= token < self.vocabulary_size:
            raise BundleError(f"Token id {token} is outside the vocabulary of {self.path} (0..{self.vocabulary_size - 1}).")
        return str(self._model.id_to_piece(token))

    def is_control(self, token: int) -> bool:
        """True for ids that stand for no text: control tokens, `<unk>`, and ids beyond the vocabulary."""
        if not 0 <= token < self.vocabulary_size:
            return True
        return bool(self._model.is_control(token) or self._model.is_unknown(token) or token in self._untyped_ids)

    def is_byte(self, token: int) -> bool:
        """True for an id that stands for one byte of a character."""
        return 0 <= token < self.vocabulary_size and bool(self._model.is_byte(token))

    def pieces(self) -> list[str]:
        """All pieces, in order of their ids."""
        return list(self._model.id_to_piece(list(range(self.vocabulary_size))))

    def find_control(self, name: str) -> int | None:
        """The id of the control token with that name, or None if there is none."""
        token = self._existing_id(name)
        return token if token is not None and self.is_control(token) else None

    def control_id(self, name: str) -> int:
        """The id of the control token with that name. Raises BundleError if there is none."""
        token = self.find_control(name)
        if token is None:
            raise BundleError(f"The tokenizer {self.path} has no control token {name}; the bundle needs another tokenizer.")
        return token

    def control_names(self) -> list[str]:
        """All control tokens by name, except the `<unusedN>` ones (too many to list; see template.py)."""
        low = [self.piece(token) for token in range(min(256, self.vocabulary_size)) if self.is_control(token)]
        names = {name for name in (*low, *MARKERS) if self.find_control(name) is not None}
        return sorted(name for name in names if not name.startswith("<unused"))

    def _bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes that the id adds to the text; empty for control tokens. Cached as `bytes_of`."""
        if self.is_control(token):
            return b""
        piece = self.piece(token)
        if self._model.is_byte(token):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace(WORD_BOUNDARY, " ").encode("utf-8", "replace")

    def _existing_id(self, name: str) -> int | None:
        token = int(self._model.piece_to_id(name))
        return token if 0 <= token < self.vocabulary_size and self._model.id_to_piece(token) == name else None


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _load(path: Path) -> Any:
    from sentencepiece import SentencePieceProcessor

    if not path.is_file():
        raise BundleError(f"The tokenizer {path} is missing. Install the bundle again.")
    try:
        model = SentencePieceProcessor(model_file=str(path))
        size = model.get_piece_size()
    except (RuntimeError, OSError, ValueError) as error:
        raise BundleError(f"{path} is not a SentencePiece model ({error}). Install the bundle again.") from error
    if not size:
        raise BundleError(f"{path} is an empty SentencePiece model. Install the bundle again.")
    return model
