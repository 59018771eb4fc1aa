"""From a SentencePiece BPE model to tiktoken's ranks: merge order, the cutting pattern, and ranks back to ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml.chat.tokenizer import MARKERS, WORD_BOUNDARY, Tokenizer
from llm_gemma_coreml.errors import BundleError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
"""SentencePiece's numbers for types of pieces."""


@dataclass(frozen=True)
class RankTable:
    """How tiktoken must merge, and what its ranks mean."""

    ranks: dict[bytes, int]
    """Bytes of a token -> rank; a lower rank is merged first."""
    pattern: str
    """Cuts a text where no piece goes across."""
    rank_ids: list[tuple[int, ...]]
    """Rank -> ids: one, or a byte each for the beginning of a character whose rest did not follow."""
    bytes_of: list[bytes]
    """Id -> bytes; empty for control tokens."""
    end_of_text: int

    def ids_of(self, rank: int) -> tuple[int, ...]:
        """The ids that a rank stands for."""
        return self.rank_ids[rank]

    def ids(self, ranks: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Ranks [n] to ids [n or more], uint32."""
        import numpy as np

        first, prefixes = self._arrays
        if not prefixes or not ranks.size or ranks.min() >= prefixes:
            return first[ranks]
        return np.array([token for rank in ranks.tolist() for token in self.rank_ids[rank]], np.uint32)

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.uint32], int]:
        """First id of each rank, and how many ranks (the lowest) stand for several ids."""
        import numpy as np

        first = np.array([ids[0] for ids in self.rank_ids], np.uint32)
        return first, sum(len(ids) > 1 for ids in self.rank_ids)


def rank_table(tokenizer: Tokenizer) -> RankTable:
    """The ranks that encode as `tokenizer` does. Raises BundleError if tiktoken could not."""
    vocabulary = _read_vocabulary(tokenizer.path)
    _require_exactness(tokenizer.path, vocabulary)
    mergeable = vocabulary.mergeable()
    tokens = _tokens_in_merge_order(vocabulary, mergeable)
    bytes_of = [b""] * len(vocabulary.texts)
    for token in (*vocabulary.normal, *vocabulary.whole):
        bytes_of[token] = vocabulary.texts[token].encode()
    for byte, token in vocabulary.byte_ids.items():
        bytes_of[token] = bytes([byte])
    return RankTable(
        {text: rank for rank, text in enumerate(tokens)},
        cutting_pattern(
            [vocabulary.texts[token] for token in vocabulary.whole],
            [vocabulary.texts[token] for token in mergeable if " " in vocabulary.texts[token][1:]],
        ),
        list(tokens.values()),
        bytes_of,
        tokenizer.control_id("<eos>"),
    )


def _tokens_in_merge_order(vocabulary: _Vocabulary, mergeable: list[int]) -> dict[bytes, tuple[int, ...]]:
    """Bytes -> ids: beginnings of characters, characters, pieces, pieces matched whole, single bytes."""
    tokens: dict[bytes, tuple[int, ...]] = {}
    texts = {token: vocabulary.texts[token].encode() for token in mergeable}
    wide = {token: text for token, text in texts.items() if len(text) > 1 == len(vocabulary.texts[token])}
    for text in wide.values():
        for end in range(2, len(text)):
            tokens[text[:end]] = tuple(vocabulary.byte_ids[byte] for byte in text[:end])
    tokens.update((text, (token,)) for token, text in wide.items())
    for token, text in texts.items():
        tokens.setdefault(text, (token,))
    for token in vocabulary.whole:
        tokens.setdefault(vocabulary.texts[token].encode(), (token,))
    for byte, token in vocabulary.byte_ids.items():
        tokens.setdefault(bytes([byte]), (token,))
    return tokens


def cutting_pattern(whole: list[str], spanning: list[str]) -> str:
    """A regular expression whose matches are the parts that can be encoded apart.

    whole: texts that are always matched as a whole, longest first. spanning: pieces that hold a space elsewhere than at
    their beginning: the text is not cut before a space in the middle of one.
    """
    runs: dict[str, list[int]] = {}
    markup: dict[str, list[str]] = {}
    for text in sorted(whole, key=len, reverse=True):
        if len(set(text)) == 1:
            runs.setdefault(text[0], []).append(len(text))
        else:
            markup.setdefault(text[0], []).append(text[1:])
    outside = "".join(re.escape(character) for character in sorted({" ", *runs, *markup}))
    inside = [f"[^{outside}]++"]
    matched_whole = [f"{re.escape(character)}{{{min(lengths)},{max(lengths)}}}" for character, lengths in runs.items()]
    for start, rests in markup.items():
        ends = "|".join(map(re.escape, rests))
        inside.append(f"{re.escape(start)}(?!{ends})")
        matched_whole.append(f"{re.escape(start)}(?:{ends})")
    for text in spanning:
        for place in (found.start() for found in re.finditer(" ", text[1:])):
            before, after = text[: place + 1], text[place + 2 :]
            inside.append(f"(?<={re.escape(before)}) (?={re.escape(after)})")
    # What is matched whole begins with no character that `inside` takes, so the commonest form may come first.
    return "|".join([f" ?(?:{'|'.join(inside)})++", *matched_whole, " "])


@dataclass(frozen=True)
class _Vocabulary:
    """A SentencePiece model's pieces; texts have spaces where the file has U+2581."""

    model: bytes
    texts: list[str]
    scores: list[float]
    normal: list[int]
    whole: list[int]
    """Ids of the pieces that are matched as a whole before anything is merged."""
    byte_ids: dict[int, int]
    """Byte -> id."""
    controls: frozenset[str]

    def mergeable(self) -> list[int]:
        """Ids of the pieces that merging can make, those made first first.

        tiktoken looks a whole part up before it merges, so a piece that merging never arrives at must not be there.
        """
        from sentencepiece import SentencePieceProcessor

        ids = sorted(self.normal, key=lambda token: -self.scores[token])
        alone = SentencePieceProcessor(model_proto=self.model).encode([self.texts[token] for token in ids], num_threads=1)
        return [token for token, encoded in zip(ids, alone, strict=True) if encoded == [token]]


def _read_vocabulary(path: Path) -> _Vocabulary:
    from sentencepiece import sentencepiece_model_pb2

    schema: Any = sentencepiece_model_pb2  # its classes are made at run time and have no types
    proto = schema.ModelProto()
    model = path.read_bytes()
    proto.ParseFromString(model)
    pieces = [(piece.piece, piece.type, piece.score) for piece in proto.pieces]
    of_kind = {kind: [token for token, piece in enumerate(pieces) if piece[1] == kind] for kind in range(1, 7)}
    return _Vocabulary(
        model,
        [text.replace(WORD_BOUNDARY, " ") for text, _, _ in pieces],
        [score for _, _, score in pieces],
        of_kind[_NORMAL],
        of_kind[_USER_DEFINED],
        {int(pieces[token][0][3:-1], 16): token for token in of_kind[_BYTE]},
        frozenset(pieces[token][0] for token in of_kind[_CONTROL]),
    )


def _require_exactness(path: Path, vocabulary: _Vocabulary) -> None:
    """Raise BundleError if the merges of SentencePiece cannot be repeated by rank."""
    texts = [vocabulary.texts[token] for token in vocabulary.normal]
    scores = sorted(vocabulary.scores[token] for token in vocabulary.normal if len(vocabulary.texts[token]) > 1)
    known = set(vocabulary.texts)
    if any(low == high for low, high in pairwise(scores)):
        problem: str | None = "two pieces have the same score, so their order of merging is not a rank"
    elif stray := set("".join(texts)) - {text for text in texts if len(text) == 1}:
        problem = f"pieces have the character {min(stray)!r}, which is no piece"
    elif len(vocabulary.byte_ids) != 256:
        problem = "there are not 256 byte pieces"
    elif marker := next((name for name in MARKERS if name in known and name not in vocabulary.controls), None):
        problem = f"{marker} is not a control piece"
    else:
        problem = _problem_of_whole_pieces([vocabulary.texts[token] for token in vocabulary.whole])
    if problem:
        raise BundleError(f"tiktoken cannot encode exactly as {path} does: {problem}. Use the bundle's own tokenizer.")


def _problem_of_whole_pieces(texts: list[str]) -> str | None:
    """What keeps `cutting_pattern` from finding these texts as SentencePiece does, or None."""
    runs = sorted((text[0], len(text)) for text in texts if len(set(text)) == 1)
    for character, group in groupby(runs, key=lambda run: run[0]):
        lengths = [length for _, length in group]
        shortest = 2 if character == " " else 1
        if lengths != list(range(shortest, shortest + len(lengths))):
            return f"the runs of {character!r} have gaps"
    starts = {character for character, _ in runs}
    markup = [text for text in texts if len(set(text)) > 1]
    if any(text[0] in starts or " " in text for text in markup):
        return "a piece that is matched whole begins like a run or holds a space"
    return None
