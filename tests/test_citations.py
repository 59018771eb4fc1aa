"""Quotations are found at their exact places, whatever was done to white space, case and Unicode; nothing else is."""

from __future__ import annotations

import random
from difflib import SequenceMatcher

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage

from langchain_adapter.citations import Span, citations, quoted_spans, with_citations
from langchain_adapter.longest_matches import SourceIndex

SOURCE = "The quick brown fox jumps over the lazy dog. It was Tuesday, and nobody\n  minded the rain at all."


def shown(answer: str, sources: list[str], **options: int) -> list[tuple[str, int, str]]:
    """Each quotation: the answer's text, the number of its source, the source's text."""
    found = quoted_spans(answer, sources, **options)
    return [(answer[s.start : s.end], s.source, sources[s.source][s.source_start : s.source_end]) for s in found]


def test_a_quotation_in_the_middle() -> None:
    answer = "I read that the quick brown fox jumps over a fence."
    assert shown(answer, ["Nothing here.", SOURCE]) == [("the quick brown fox jumps over", 1, "The quick brown fox jumps over")]


def test_white_space_and_line_breaks_may_differ() -> None:
    assert shown("nobody minded\tthe  rain", [SOURCE]) == [("nobody minded\tthe  rain", 0, "nobody\n  minded the rain")]


def test_two_quotations_from_two_sources() -> None:
    sources = ["Water boils at a hundred degrees.", "Ice melts at zero degrees Celsius."]
    answer = "Ice melts at zero degrees, and water boils at a hundred degrees!"
    assert shown(answer, sources) == [
        ("Ice melts at zero degrees", 1, "Ice melts at zero degrees"),
        ("water boils at a hundred degrees", 0, "Water boils at a hundred degrees"),
    ]


def test_no_match() -> None:
    assert quoted_spans("Entirely different words are written in this answer.", [SOURCE]) == []
    assert quoted_spans("", [SOURCE]) == []
    assert quoted_spans("...", [SOURCE]) == []
    assert quoted_spans("anything", []) == []
    assert quoted_spans("anything", ["", "   "]) == []
    assert quoted_spans("the dog, the fox, the rain and the lazy quick day", [SOURCE]) == []


def test_a_run_never_goes_from_one_source_into_the_next() -> None:
    assert quoted_spans("alpha beta gamma delta", ["alpha beta", "gamma delta"]) == []


def test_repeated_passages_give_the_first_place() -> None:
    passage = "to be or not to be"
    sources = ["x " + passage, f"{passage} and again {passage}"]
    (span,) = quoted_spans(passage, sources)
    assert span == Span(0, len(passage), 0, 2, 2 + len(passage))
    (span,) = quoted_spans(f"{passage} and", sources)
    assert (span.source, span.source_start) == (1, 0)
    twice = quoted_spans(f"{passage}! {passage}?", sources)
    assert [(span.start, span.source, span.source_start) for span in twice] == [(0, 0, 2), (20, 0, 2)]


def test_the_longest_run_wins_over_an_earlier_one_that_overlaps() -> None:
    sources = ["one two three four five", "four five six seven eight nine ten"]
    assert shown("one two three four five six seven eight nine ten", sources, minimum_words=3) == [
        ("one two three", 0, "one two three"),
        ("four five six seven eight nine ten", 1, "four five six seven eight nine ten"),
    ]


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        ("“It’s a well—known ‘fact’ here”", "\"It's a well-known 'fact' here\""),
        ("cafe\u0301 au lait noir", "CAF\u00c9 AU LAIT NOIR"),
        ("ＡＢＣ １２３ ｘｙｚ ｄｅｆ", "abc 123 xyz def"),
        ("STRASSE ist sehr lang", "straße ist sehr lang"),
        ("ﬁne ﬂour and water", "fine flour and water"),
        ("soft\u00adware for every one", "software for every one"),
        ("zero\u200bwidth is not seen", "zerowidth is not seen"),
    ],
)
def test_unicode_spelling_may_differ(answer: str, source: str) -> None:
    if "\u200b" in answer or "\u00ad" in answer:
        # An invisible character inside a word cuts it: the words that follow are still found.
        assert [text for text, _, _ in shown(answer, [source], minimum_words=3)] == [answer.split(" ", 1)[1]]
    else:
        assert shown(answer, [source])[0][1:] == (0, source.strip("\"'"))


def test_scripts_without_spaces() -> None:
    assert shown("答えは東京都庁へ行きましたです", ["昨日、東京都庁へ行きました。"]) == [
        ("東京都庁へ行きました", 0, "東京都庁へ行きました")
    ]
    assert shown("คำตอบคือ สวัสดีตอนเช้า", ["เขาพูดว่า สวัสดีตอนเช้า นะ"]) == [("สวัสดีตอนเช้า", 0, "สวัสดีตอนเช้า")]
    assert shown("नमस्ते आप कैसे हैं जी", ["वह बोला: नमस्ते आप कैसे हैं"]) == [("नमस्ते आप कैसे हैं", 0, "नमस्ते आप कैसे हैं")]


def test_emoji_and_surrogates_keep_places_right() -> None:
    answer = "👍🏽 the quick brown fox 👩‍👩‍👧"
    assert shown(answer, ["😀" + SOURCE]) == [("the quick brown fox", 0, "The quick brown fox")]
    assert shown("\ud83d the quick brown fox", [SOURCE])[0][0] == "the quick brown fox"


def test_marks_separate_unless_they_are_the_same() -> None:
    assert shown("the lazy dog. It was Tuesday", [SOURCE]) == [
        ("the lazy dog. It was Tuesday", 0, "the lazy dog. It was Tuesday")
    ]
    assert shown("the lazy dog? It was Tuesday", [SOURCE], minimum_words=3) == [
        ("the lazy dog", 0, "the lazy dog"),
        ("It was Tuesday", 0, "It was Tuesday"),
    ]
    assert shown("it costs 3.50 euros now", ["it costs 3,50 euros now"]) == []


def test_short_texts_in_quotation_marks() -> None:
    assert shown('They call it a "lazy dog" there.', [SOURCE]) == [("lazy dog", 0, "lazy dog")]
    assert shown("They call it “Lazy Dog”, «lazy» or „brown“.", [SOURCE]) == [
        ("Lazy Dog", 0, "lazy dog"),
        ("lazy", 0, "lazy"),
        ("brown", 0, "brown"),
    ]
    assert shown('It is a "busy dog".', [SOURCE]) == []
    assert shown('An open " mark, "" and "...".', [SOURCE]) == []


def test_short_answers_as_a_whole() -> None:
    assert shown("Tuesday.", [SOURCE]) == [("Tuesday", 0, "Tuesday")]
    assert shown(" The lazy dog", ["see The lazy dog"]) == [("The lazy dog", 0, "The lazy dog")]
    assert shown("No.", ["No man is an island."]) == []
    assert shown("tuesday", [SOURCE]) == []  # letter case counts here
    assert shown("It was Monday", [SOURCE]) == []


def test_the_minimum_must_be_positive() -> None:
    with pytest.raises(ValueError, match="minimum_words"):
        quoted_spans("a", ["a"], minimum_words=0)


def test_annotations() -> None:
    document = Document(SOURCE, id="d1", metadata={"title": "Animals", "source": "https://example.org/a"})
    other = Document("Other text.", metadata={"title": 3, "source": "notes.txt"})
    (citation,) = citations("So nobody minded the rain at all, it says.", [other, document])
    assert citation == {
        "type": "citation",
        "start_index": 3,
        "end_index": 32,
        "cited_text": "nobody\n  minded the rain at all",
        "title": "Animals",
        "url": "https://example.org/a",
        "extras": {
            "document_index": 1,
            "document_id": "d1",
            "source_start": SOURCE.index("nobody"),
            "source_end": len(SOURCE) - 1,
        },
    }
    (citation,) = citations("Other text", [other])
    assert "title" not in citation
    assert "url" not in citation


def test_messages() -> None:
    message = AIMessage("The quick brown fox ran.", id="m", tool_calls=[{"name": "t", "args": {}, "id": "1"}])
    cited = with_citations(message, [SOURCE])
    assert message.content == "The quick brown fox ran."  # the original stays
    assert (cited.id, cited.tool_calls, cited.text) == ("m", message.tool_calls, "The quick brown fox ran.")
    (block, call) = cited.content_blocks
    assert block["type"] == "text"
    (annotation,) = block["annotations"]
    assert annotation["cited_text"] == "The quick brown fox"
    assert call["type"] == "tool_call"
    again = with_citations(cited, ["quick brown fox ran"])
    assert len(again.content_blocks[0]["annotations"]) == 2


def test_only_text_blocks_are_annotated() -> None:
    reasoning = {"type": "reasoning", "reasoning": SOURCE}
    message = AIMessage([reasoning, "The quick brown fox", {"type": "text", "text": "no match here at all"}])
    assert with_citations(message, [SOURCE]).content[0] == reasoning
    assert [len(block.get("annotations", [])) for block in with_citations(message, [SOURCE]).content] == [0, 1, 0]  # type: ignore[union-attr]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab c", max_size=12), max_size=4), st.text("ab c", max_size=16))
def test_longest_matches_against_difflib(sources: list[str], items: str) -> None:
    index = SourceIndex([list(source) for source in sources])
    for end, length in enumerate(index.longest_ending_at(items), 1):
        expected = max((n for n in range(end + 1) if any(items[end - n : end] in source for source in sources)), default=0)
        assert length == expected
        if length:
            place = index.first_place(items[end - length : end])
            number = next(n for n, source in enumerate(sources) if items[end - length : end] in source)
            assert place == (number, sources[number].index(items[end - length : end]))
    longest = max(index.longest_ending_at(items), default=0)
    matchers = [SequenceMatcher(None, source, items, autojunk=False) for source in sources]
    assert longest == max((matcher.find_longest_match().size for matcher in matchers), default=0)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.lists(st.text(max_size=60), max_size=3), st.integers(1, 5))
def test_spans_are_in_bounds_ordered_and_disjoint(answer: str, sources: list[str], minimum: int) -> None:
    end = 0
    for span in quoted_spans(answer, [*sources, answer[::2]], minimum):
        assert end <= span.start < span.end <= len(answer)
        assert 0 <= span.source_start < span.source_end
        end = span.end


def test_a_repetitive_document_is_no_trouble() -> None:
    text = "a b " * 20_000
    (span,) = quoted_spans("a b " * 2_000, [text])
    assert (span.start, span.source_start) == (0, 0)


def test_a_long_document() -> None:
    draw = random.Random(1)
    words = [f"w{draw.randrange(3000)}" for _ in range(20_000)]
    sources = [" ".join(words[:10_000]), " ".join(words[10_000:])]
    answer = "so " + "  ".join(words[12_000:12_040]) + " unknown " + " ".join(words[500:510])
    assert [(source, len(text.split())) for text, source, _ in shown(answer, sources)] == [(1, 40), (0, 10)]
