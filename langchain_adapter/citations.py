"""Citations: which parts of an answer are quoted from the documents that it was given, and from where.

A quotation is a run of the same words and marks; white space, letter case, Unicode spelling (composed, full width) and
the style of quotes and dashes may differ. All functions are pure.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from langchain_adapter.longest_matches import SourceIndex

try:
    from langchain_core.documents import Document
    from langchain_core.messages import AIMessage
    from langchain_core.messages.content import Citation
except ModuleNotFoundError as error:
    from llm_gemma_coreml.errors import MissingDependencyError

    raise MissingDependencyError("Citations need LangChain: pip install 'llm-gemma-coreml[langchain]'") from error

MINIMUM_WORDS = 4
"""Shorter runs of words are common to all texts of a language."""

_SAME_MARKS = str.maketrans(
    {**dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc`\u00b4", "'"), **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')}
)
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u201e": "\u201c", "\u00ab": "\u00bb", "\u300c": "\u300d"}
_SHORTEST_ANSWER = 3
"""Letters and digits that an answer must have to be cited although it is shorter than the minimum of words."""


class Span(NamedTuple):
    """One quotation: `answer[start:end]` says what `sources[source][source_start:source_end]` says."""

    start: int
    end: int
    source: int
    source_start: int
    source_end: int


class _Unit(NamedTuple):
    """A word (or one character of a script written without spaces), or a mark; `key` is what is compared."""

    key: str
    start: int
    end: int
    is_word: bool


def quoted_spans(answer: str, sources: Sequence[str], minimum_words: int = MINIMUM_WORDS) -> list[Span]:
    """The quotations in `answer`, by their place, none overlapping another; characters count from 0.

    A run of at least `minimum_words` words is one. So is a shorter text in quotation marks that a source has, and an
    answer that is short as a whole, with the same letter case. Longer runs are preferred, then earlier sources, then
    earlier places. Raises ValueError if minimum_words is below 1.
    """
    if minimum_words < 1:
        raise ValueError(f"minimum_words is {minimum_words}: give 1 or more.")
    units = list(_units(answer))
    places = [list(_units(source)) for source in sources]
    index = SourceIndex([[unit.key for unit in source] for source in places])
    words = [0, *accumulate(int(unit.is_word) for unit in units)]
    spans: list[Span] = []
    for start, end in _disjoint_runs(units, words, index, minimum_words):
        spans += _located(units, start, end, places, index)
    for start, end in _short_quotations(answer, units):
        if not any(span.start < units[end - 1].end and units[start].start < span.end for span in spans):
            spans += _located(units, start, end, places, index)
    if not spans and units and sum(len(unit.key) for unit in units if unit.is_word) >= _SHORTEST_ANSWER:
        whole = _trimmed(units, 0, len(units))
        if words[whole[1]] - words[whole[0]] < minimum_words:
            spans += [span for span in _located(units, *whole, places, index) if _same_case(answer, sources, span)]
    return sorted(spans)


def citations(answer: str, documents: Sequence[Document | str], minimum_words: int = MINIMUM_WORDS) -> list[Citation]:
    """The quotations in `answer` as LangChain's `citation` annotations.

    start_index and end_index are places in `answer`; cited_text is the document's own text. title and url are taken from
    the document's metadata ("title"; "url", or "source" if it is a URL); extras tells document_index, document_id (if it
    has one), and the place in the document as source_start and source_end.
    """
    texts = [_text(document) for document in documents]
    return [_citation(span, texts, documents) for span in quoted_spans(answer, texts, minimum_words)]


def with_citations(message: AIMessage, documents: Sequence[Document | str], minimum_words: int = MINIMUM_WORDS) -> AIMessage:
    """A copy of `message` whose text blocks carry their citations as annotations; other blocks stay as they are.

    Annotations that were there are kept. A message whose content is a string becomes one with a single text block.
    """
    content = message.content
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    annotated: list[str | dict[Any, Any]] = []
    for block in blocks:
        block = {"type": "text", "text": block} if isinstance(block, str) else block
        if block.get("type") == "text" and isinstance(block.get("text"), str):
            found = citations(block["text"], documents, minimum_words)
            if found:
                block = {**block, "annotations": [*(block.get("annotations") or []), *found]}
        annotated.append(block)
    return message.model_copy(update={"content": annotated})


def _citation(span: Span, texts: Sequence[str], documents: Sequence[Document | str]) -> Citation:
    document = documents[span.source]
    extras: dict[str, Any] = {
        "document_index": span.source,
        "source_start": span.source_start,
        "source_end": span.source_end,
    }
    citation = Citation(
        type="citation",
        start_index=span.start,
        end_index=span.end,
        cited_text=texts[span.source][span.source_start : span.source_end],
        extras=extras,
    )
    if isinstance(document, Document):
        if document.id is not None:
            extras["document_id"] = document.id
        title, url, source = (document.metadata.get(key) for key in ("title", "url", "source"))
        if isinstance(title, str):
            citation["title"] = title
        if not isinstance(url, str) and isinstance(source, str) and "://" in source:
            url = source
        if isinstance(url, str):
            citation["url"] = url
    return citation


def _text(document: Document | str) -> str:
    return document if isinstance(document, str) else document.page_content


def _units(text: str) -> Iterator[_Unit]:
    """Words, characters of scripts without spaces, and marks; white space and invisible characters are left out."""
    start = 0
    while start < len(text):
        kind = _kind(text[start])
        end = start + 1
        while end < len(text) and ((kind == "word" and _kind(text[end]) == "word") or _kind(text[end]) == "attached"):
            end += 1
        if kind in ("word", "character", "mark", "attached"):
            key = unicodedata.normalize("NFKC", text[start:end]).casefold().translate(_SAME_MARKS)
            key = "-" if kind == "mark" and unicodedata.category(text[start]) == "Pd" else key
            if key := "".join(character for character in key if not character.isspace() and _kind(character) != "nothing"):
                yield _Unit(key, start, end, kind != "mark")
        start = end


def _kind(character: str) -> str:
    if character.isascii():
        return "word" if character.isalnum() else "nothing" if character.isspace() or not character.isprintable() else "mark"
    category = unicodedata.category(character)
    if category.startswith("M"):
        return "attached"
    if category.startswith(("Z", "C")):
        return "nothing"
    if category.startswith(("L", "N")):
        apart = unicodedata.east_asian_width(character) == "W" or "\u0e00" <= character <= "\u109f"
        return "character" if apart and not "\uac00" <= character <= "\ud7a3" else "word"
    return "mark"


def _trimmed(units: Sequence[_Unit], start: int, end: int) -> tuple[int, int]:
    """Without marks at either end."""
    while start < end and not units[start].is_word:
        start += 1
    while end > start and not units[end - 1].is_word:
        end -= 1
    return start, end


def _disjoint_runs(units: Sequence[_Unit], words: Sequence[int], index: SourceIndex, minimum: int) -> Iterator[tuple[int, int]]:
    """Runs of units that a source has: the longest, then the longest of what is left before and after it."""
    lengths = index.longest_ending_at([unit.key for unit in units])
    regions = [(0, len(units))]
    while regions:
        low, high = regions.pop()
        best = (0, low, low)
        for end in range(low + 1, high + 1):
            start = max(low, end - lengths[end - 1])
            if words[end] - words[start] > best[0]:
                best = (words[end] - words[start], start, end)
        if best[0] >= minimum:
            _, start, end = best
            yield _trimmed(units, start, end)
            regions += [(low, start), (end, high)]


def _short_quotations(answer: str, units: Sequence[_Unit]) -> Iterator[tuple[int, int]]:
    """What stands in quotation marks."""
    place = 0
    while place < len(answer):
        closing = _QUOTES.get(answer[place])
        end = answer.find(closing, place + 1) if closing else -1
        if end < 0 or answer[place + 1].isspace():  # none that opens
            place += 1
            continue
        inside = [number for number, unit in enumerate(units) if place < unit.start and unit.end <= end]
        if inside:
            start, stop = _trimmed(units, inside[0], inside[-1] + 1)
            if start < stop:
                yield start, stop
        place = end + 1


def _located(units: Sequence[_Unit], start: int, end: int, places: Sequence[Sequence[_Unit]], index: SourceIndex) -> list[Span]:
    """The quotation units[start:end] with its first place in the sources; empty if it has none."""
    found = index.first_place([unit.key for unit in units[start:end]]) if start < end else None
    if found is None:
        return []
    source, first = found
    last = places[source][first + end - start - 1]
    return [Span(units[start].start, units[end - 1].end, source, places[source][first].start, last.end)]


def _same_case(answer: str, sources: Sequence[str], span: Span) -> bool:
    ours, theirs = answer[span.start : span.end], sources[span.source][span.source_start : span.source_end]
    return unicodedata.normalize("NFKC", "".join(ours.split())) == unicodedata.normalize("NFKC", "".join(theirs.split()))
