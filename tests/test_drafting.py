"""Prompt lookup and corpus lookup against a plain scan, and the work that they do per token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_gemma_coreml.drafting import prompt_lookup
from llm_gemma_coreml.drafting.corpus import CorpusLookup
from llm_gemma_coreml.drafting.prompt_lookup import MAXIMUM_MATCH, MINIMUM_MATCH, NgramIndex, PromptLookup

few_tokens = st.lists(st.integers(0, 3), max_size=60)


def scan(tokens: list[int], suffix: list[int]) -> tuple[int, int]:
    """The longest, then latest match by trying every position."""
    best = (0, 0)
    for end in range(1, len(tokens)):
        length = 0
        limit = min(end, len(suffix), MAXIMUM_MATCH)
        while length < limit and tokens[end - 1 - length] == suffix[-1 - length]:
            length += 1
        if length >= MINIMUM_MATCH and length >= best[1]:
            best = (end, length)
    return best


@given(few_tokens)
def test_find_equals_a_scan(tokens: list[int]) -> None:
    for length in range(len(tokens) + 1):
        index = NgramIndex(tokens[:length])
        found = index.find(tokens[:length])
        expected = scan(tokens[:length], tokens[:length])
        assert found[1] <= expected[1]
        if length < prompt_lookup.MAXIMUM_CANDIDATES:  # all candidates are looked at
            assert found == expected


@given(st.lists(few_tokens, min_size=1, max_size=6))
def test_reset_and_truncate_leave_a_fresh_index(contents: list[list[int]]) -> None:
    index = NgramIndex()
    for content in contents:
        index.reset(content)
        fresh = NgramIndex(content)
        assert vars(index) == vars(fresh)
        index.truncate(len(content) // 2)
        assert vars(index) == vars(NgramIndex(content[: len(content) // 2]))


def test_the_draft_is_what_followed_the_longest_match() -> None:
    drafter = PromptLookup()
    drafter.begin([9, 1, 2, 3, 50, 51, 52, 8, 1, 2, 3, 60, 61, 62, 9, 1, 2], [])
    drafter.observe([3], 0, 0)
    assert list(drafter.propose(2)) == [50, 51]  # four tokens match there, three at the later place


def test_equally_long_matches_give_the_latest() -> None:
    drafter = PromptLookup()
    drafter.begin([1, 2, 3, 50, 7, 1, 2, 3, 60, 8, 1, 2, 3], [])
    assert list(drafter.propose(1)) == [60]


def test_a_repetition_is_drafted_beyond_the_end() -> None:
    drafter = PromptLookup()
    drafter.begin([0, 5, 6, 7, 5, 6, 7, 5, 6, 7], [])
    assert list(drafter.propose(7)) == [5, 6, 7, 5, 6, 7, 5]


def test_nothing_to_propose_without_a_match_of_three() -> None:
    drafter = PromptLookup()
    drafter.begin([1, 2, 3, 4, 2, 3], [])
    assert list(drafter.propose(4)) == []
    drafter.begin([], [])
    assert list(drafter.propose(4)) == []


@given(st.lists(st.integers(0, 2), max_size=80), st.integers(1, 20))
def test_proposals_never_exceed_the_limit(tokens: list[int], limit: int) -> None:
    drafter = PromptLookup()
    drafter.begin(tokens, [])
    assert len(drafter.propose(limit)) <= limit


def test_a_step_in_a_long_prompt_looks_at_a_bounded_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    original = NgramIndex._match_length

    def counting(self: NgramIndex, *arguments: Any) -> int:
        nonlocal compared
        compared += 1
        return original(self, *arguments)

    monkeypatch.setattr(NgramIndex, "_match_length", counting)
    drafter = PromptLookup()
    noise = random.Random(0)
    tokens = [token for _ in range(20_000) for token in (1, 2, 3, noise.randrange(4, 10_000))] + [1, 2, 3]
    drafter.begin(tokens, [])
    drafter.propose(7)
    assert 0 < compared <= prompt_lookup.MAXIMUM_CANDIDATES


def test_growing_costs_only_the_new_tokens() -> None:
    drafter = PromptLookup()
    drafter.begin(list(range(1000)), [])
    links = drafter._index._earlier
    drafter.begin([*range(1000), 5, 6], [])
    assert drafter._index._earlier is links
    assert len(links) == 1002


def test_corpus_continues_documents_and_stops_at_their_end() -> None:
    drafter = CorpusLookup()
    documents = [(1, 2, 3, 4, 5), (6, 7, 8, 9)]
    drafter.begin([0, 0, 1, 2], documents)
    assert list(drafter.propose(4)) == []
    drafter.observe([3], 0, 0)
    assert list(drafter.propose(4)) == [4, 5]
    drafter.observe([4, 5], 2, 2)
    assert list(drafter.propose(4)) == []
    drafter.begin([4, 5, 6], documents)
    assert list(drafter.propose(4)) == []  # a match never crosses from one document to the next
    drafter.begin([6, 7, 8], documents)
    assert list(drafter.propose(1)) == [9]


def test_corpus_forgets_documents_that_are_no_longer_pinned() -> None:
    drafter = CorpusLookup()
    drafter.begin([1, 2, 3], [(1, 2, 3, 4)])
    assert list(drafter.propose(1)) == [4]
    drafter.begin([1, 2, 3], [])
    assert list(drafter.propose(1)) == []
