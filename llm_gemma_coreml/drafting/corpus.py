"""Corpus lookup: propose what follows the session's latest tokens in pinned documents and earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llm_gemma_coreml.drafting.prompt_lookup import MAXIMUM_MATCH, NgramIndex, match_grade

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.session import Session

_BETWEEN_DOCUMENTS = (1 << 21) - 1
"""Stands between documents; larger than every token id, so that no match crosses a border."""
MAXIMUM_TOKENS = 1 << 20
"""Documents beyond this many tokens in all are not looked into."""


class CorpusLookup:
    """Drafts from the pinned documents of the request; the index is kept while they stay the same."""

    name = "corpus"

    def __init__(self) -> None:
        self._documents: tuple[tuple[int, ...], ...] = ()
        self._index = NgramIndex()
        self._recent: list[int] = []
        self.grade = 0

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self._recent = list(tokens[-MAXIMUM_MATCH:])
        documents = tuple(tuple(document) for document in pinned)
        if documents == self._documents:
            return
        self._documents, self._index = documents, NgramIndex()
        for document in documents:
            if len(self._index) + len(document) >= MAXIMUM_TOKENS:
                break
            self._index.extend(document)
            self._index.extend((_BETWEEN_DOCUMENTS,))

    def propose(self, limit: int) -> Sequence[int]:
        start, length = self._index.find(self._recent)
        if length == 0:
            return ()
        self.grade = match_grade(length)
        drafts = self._index.continuation(start, limit)
        return drafts[: drafts.index(_BETWEEN_DOCUMENTS)] if _BETWEEN_DOCUMENTS in drafts else drafts

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._recent = [*self._recent, *tokens][-MAXIMUM_MATCH:]


class CorpusLookupFactory:
    """Makes a CorpusLookup for every session."""

    name = CorpusLookup.name

    def create(self, session: Session) -> CorpusLookup:
        return CorpusLookup()
