"""Replies to events, on ids: every case that has broken other parsers of Gemma 4's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chats import chat, gemma3_tokenizer, gemma4_tokenizer, ids, values

from llm_gemma_coreml.chat.messages import Message, Tool, ToolCallEvent, WarningEvent
from llm_gemma_coreml.chat.prompt import Prompt
from llm_gemma_coreml.chat.reply_parser import ReplyParser

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
PROPERTIES = {
    "city": STRING,
    "days": INTEGER,
    "zip": STRING,
    "temperature": NUMBER,
    "metric": {"type": "boolean"},
    "note": {"anyOf": [STRING, {"type": "null"}]},
    "tags": {"type": "array", "items": STRING},
    "where": {"type": "object", "properties": {"street": STRING, "number": INTEGER}},
    "anything": {},
}
WEATHER = Tool("get_weather", "", {"type": "object", "properties": PROPERTIES})
MCP = Tool("files.read-all:v2", "", {"type": "object", "properties": {"path": STRING}})
NOW = Tool("now", "", {"type": "object", "properties": {}})
TOOLS = (WEATHER, MCP, NOW)


def parser(tools: Sequence[Tool] = TOOLS, in_reasoning: bool = False, stop: Sequence[str] = ()) -> ReplyParser:
    prompt = Prompt((2,), frozenset({1, 50, 106}), starts_in_reasoning=in_reasoning, tools=tuple(tools))
    return ReplyParser(gemma4_tokenizer(), prompt, stop)


def parse(reply: str, complete: bool = True, one_by_one: bool = True, **options: Any) -> list[Any]:
    """Events of a reply, fed token by token (or all at once)."""
    made = parser(**options)
    tokens = ids(gemma4_tokenizer(), reply)
    events: list[Any] = []
    for chunk in [[token] for token in tokens] if one_by_one else [tokens]:
        events += made.feed(chunk)
    return values(events + made.finish(complete))


def call(arguments: dict[str, Any], name: str = "get_weather", index: int = 0) -> tuple[Any, ...]:
    return ("call", index, name, json.dumps(arguments, ensure_ascii=False))


def read(body: str, name: str = "get_weather") -> Any:
    """The arguments of one call in the call markers."""
    events = parse(f"<|tool_call>call:{name}{body}<tool_call|>")
    assert [event[0] for event in events] == ["call"], events
    return json.loads(events[0][3])


THOUGHT_CALL = '<|channel>thought\nhm\n<channel|>See:\n<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'

# --- streaming and state


def test_plain_text() -> None:
    assert parse("Hello, world!\n\nBye.\n") == [("text", "Hello, world!\n\nBye.\n")]
    assert parse("") == []


def test_thought_then_answer() -> None:
    expected = [("reasoning", "I think\n\nso"), ("text", "Yes")]
    assert parse("<|channel>thought\nI think\n\nso\n<channel|>Yes<turn|>") == expected
    assert parse("<|channel>thought\nI think\n\nso\n<channel|>\n\nYes") == expected


@pytest.mark.parametrize("one_by_one", [True, False])
def test_several_markers_in_one_delta(one_by_one: bool) -> None:
    reply = THOUGHT_CALL + "<|tool_call>call:now{}<tool_call|><|tool_response>ignored"
    expected = [
        ("reasoning", "hm"),
        ("text", "See:"),
        call({"city": "Oslo"}),
        call({}, "now", 1),
    ]
    assert parse(reply, one_by_one=one_by_one) == expected


@given(st.lists(st.integers(0, 40), max_size=12))
@settings(deadline=None, max_examples=40)
def test_any_cut_into_deltas_gives_the_same(cuts: list[int]) -> None:
    reply = THOUGHT_CALL + "after 日本<|tool_call>call:now{}<tool_call|><|channel>thought\nmore<channel|>𠮷 end"
    tokens = ids(gemma4_tokenizer(), reply)
    made = parser()
    events: list[Any] = []
    borders = sorted({0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)})
    for start, end in pairwise(borders):
        events += made.feed(tokens[start:end])
    assert values(events + made.finish()) == parse(reply)


def test_text_that_spells_markers_stays_text() -> None:
    """The literal `<|tool_call>` in text is not the control token."""
    tokenizer = gemma4_tokenizer()
    text = "Write <|tool_call>call:now{}<tool_call|> and <|channel>thought\n<channel|> and <turn|>."
    made = parser()
    events = made.feed(tokenizer.encode_text(text)) + made.finish()
    assert values(events) == [("text", text)]


def test_header_of_the_channel() -> None:
    assert parse("<|channel>thought\n<channel|>Hi") == [("text", "Hi")]
    assert parse("<|channel>thought<channel|>Hi") == [("text", "Hi")]
    assert parse("<|channel><channel|>Hi") == [("text", "Hi")]
    assert parse("<|channel>thoughtful people say<channel|>Hi") == [
        ("reasoning", "thoughtful people say"),
        ("text", "Hi"),
    ]
    assert parse("<|channel>analysis\nwell<channel|>Hi") == [("reasoning", "well"), ("text", "Hi")]


def test_consecutive_thoughts() -> None:
    reply = "<|channel>thought\none\n<channel|><|channel>thought\ntwo<channel|>Hi"
    assert parse(reply) == [("reasoning", "one\n\ntwo"), ("text", "Hi")]
    nested = "<|channel>thought\none<|channel>thought\ntwo<channel|>Hi"
    assert parse(nested) == [("reasoning", "one\n\ntwo"), ("text", "Hi")]


def test_prompt_inside_the_channel() -> None:
    assert parse("still thinking\n<channel|>Done", in_reasoning=True) == [
        ("reasoning", "still thinking"),
        ("text", "Done"),
    ]
    assert parse("thought\nabout<channel|>x", in_reasoning=True)[0] == ("reasoning", "thought\nabout")


def test_direct_answer_although_thinking_is_on() -> None:
    assert parse("Just an answer") == [("text", "Just an answer")]


def test_stray_markers_are_swallowed() -> None:
    assert parse("<channel|>Hi<channel|> there") == [("text", "Hi there")]
    assert parse("<|tool_call>call:now{}<tool_call|><tool_call|>ok") == [call({}, "now"), ("text", "ok")]
    assert parse("Hi<|channel>thought\n<channel|>") == [("text", "Hi")]
    assert parse("Hi<|channel>") == [("text", "Hi")]
    assert parse("a<tool_response|><|turn>b") == [("text", "ab")]


def test_call_inside_a_thought_closes_it() -> None:
    reply = "<|channel>thought\nI need it\n<|tool_call>call:now{}<tool_call|>"
    assert parse(reply) == [("reasoning", "I need it"), call({}, "now")]


def test_text_around_calls() -> None:
    reply = "One moment. \n\n<|tool_call>call:now{}<tool_call|><div>x</div>"
    assert parse(reply) == [("text", "One moment."), call({}, "now"), ("text", "<div>x</div>")]


def test_calls_are_numbered_and_have_ids() -> None:
    made = parser()
    one = "<|tool_call>call:now{}<tool_call|>"
    events = [e for e in made.feed(ids(gemma4_tokenizer(), one * 3)) if isinstance(e, ToolCallEvent)]
    assert [event.index for event in events] == [0, 1, 2]
    assert len({event.id for event in events}) == 3


def test_a_call_is_reported_when_complete_only() -> None:
    made = parser()
    tokens = ids(gemma4_tokenizer(), '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>')
    assert all(made.feed([token]) == [] for token in tokens[:-1])
    assert values(made.feed(tokens[-1:])) == [call({"city": "Oslo"})]


def test_nothing_after_the_end() -> None:
    made = parser()
    made.feed(ids(gemma4_tokenizer(), "Hi<turn|>"))
    assert made.stopped
    assert made.feed(ids(gemma4_tokenizer(), "more")) == []
    assert made.finish() == []


def test_a_call_that_begins_before_the_last_one_ended() -> None:
    reply = "<|tool_call>call:now{}<|tool_call>call:now{}<tool_call|>"
    assert parse(reply) == [call({}, "now"), call({}, "now", 1)]


def test_unfinished_character_at_a_marker_and_at_the_end() -> None:
    byte = 238 + 0xE6
    made = parser()
    events = made.feed([byte, *ids(gemma4_tokenizer(), "<|channel>thought\nx<channel|>"), byte]) + made.finish()
    assert values(events) == [("text", "\ufffd"), ("reasoning", "x"), ("text", "\ufffd")]


# --- values


def test_strings_are_literal() -> None:
    for text in ("a{b}[c],d:e", 'say "hi"', "line\nbreak", "C:\\users", "\\u2603", "don't", "}<tool>", "日本 𠮷", " x "):
        assert read('{city:<|"|>' + text + '<|"|>}') == {"city": text}


def test_numbers_and_literals() -> None:
    assert read("{days:-1,temperature:1.5e3,metric:true,note:null}") == {
        "days": -1,
        "temperature": 1500.0,
        "metric": True,
        "note": None,
    }
    assert read("{anything:123456789012345678901234567890}") == {"anything": 123456789012345678901234567890}
    assert read('{zip:<|"|>02139<|"|>}') == {"zip": "02139"}
    assert read("{anything:[1,-2.5,true,false,null]}") == {"anything": [1, -2.5, True, False, None]}


def test_values_by_schema() -> None:
    assert read("{city:Austin}") == {"city": "Austin"}
    assert read("{city:New York,days:2}") == {"city": "New York", "days": 2}
    assert read("{zip:02139}") == {"zip": "02139"}
    assert read('{days:<|"|>3<|"|>}') == {"days": 3}
    assert read("{days:3.0}") == {"days": 3}
    assert read('{temperature:<|"|>1.5<|"|>,metric:<|"|>true<|"|>}') == {"temperature": 1.5, "metric": True}
    assert read('{note:<|"|>null<|"|>}') == {"note": "null"}


def test_empty_things() -> None:
    assert read("{}") == {}
    assert read('{city:<|"|><|"|>,tags:[],where:{}}') == {"city": "", "tags": [], "where": {}}


def test_nesting_and_white_space() -> None:
    body = '{ tags : [ <|"|>a]<|"|> ,\n<|"|>b<|"|> ] , where:{street:<|"|>x}y<|"|>,\n number:7}, anything:[{a:[1]},{a:[]}] }'
    assert read(body) == {
        "tags": ["a]", "b"],
        "where": {"street": "x}y", "number": 7},
        "anything": [{"a": [1]}, {"a": []}],
    }


def test_quoted_keys_and_ordinary_json() -> None:
    assert read('{anything:{<|"|>3<|"|>:<|"|>x<|"|>,"k":"v \\" w"}}') == {"anything": {"3": "x", "k": 'v " w'}}
    assert read('{"city": "Oslo", "days": 3}') == {"city": "Oslo", "days": 3}


def test_names_with_dots_dashes_colons() -> None:
    assert read('{path:<|"|>/a<|"|>}', "files.read-all:v2") == {"path": "/a"}


# --- malformed by the model


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{city:Oslo<|"|>,days:3}', {"city": "Oslo", "days": 3}),  # opening quote missing
        ('{city:Paris, France<|"|>}', {"city": "Paris, France"}),
        ('{city:<|"|>Oslo}', {"city": "Oslo"}),  # closing quote missing
        ('{city:<|"|>Oslo,days:3}', {"city": "Oslo", "days": 3}),
        ('{city:<|"|>Oslo,zip:<|"|>1<|"|>}', {"city": "Oslo", "zip": "1"}),
        ('{city:<|"|>Oslo<|"|>', {"city": "Oslo"}),  # final brace missing
        ('{where:{street:<|"|>x<|"|>}', {"where": {"street": "x"}}),
        ('{tags:[<|"|>a<|"|>}', {"tags": ["a"]}),
        ('{city:<|"|>Oslo<|"|>,}', {"city": "Oslo"}),
        ('{city:<|"|>Oslo<|"|>}}', {"city": "Oslo"}),
        ('(city="Oslo", days=3)', {"city": "Oslo", "days": 3}),
        ('(city=<|"|>Oslo<|"|>)', {"city": "Oslo"}),
        ('city:<|"|>Oslo<|"|>}', {"city": "Oslo"}),
        ("{city:'Oslo'}", {"city": "Oslo"}),
        ("{'city':'<|\"|>Oslo<|\"|>'}", {"city": "Oslo"}),
        ("{'city':'<|\"|><|\"|>'}", {"city": ""}),
        ("{'city': '<|\"|>Oslo<|\"|>,days:3}", {"city": "Oslo", "days": 3}),
        ("", {}),
    ],
)
def test_repairs(body: str, expected: dict[str, Any]) -> None:
    separator = " " if body.startswith("city") else ""
    assert read(separator + body) == expected


@pytest.mark.parametrize("head", ["call:now", ":now", "now", "call: now ", "call:now\n"])
def test_repaired_heads(head: str) -> None:
    assert parse(f"<|tool_call>{head}{{}}<tool_call|>") == [call({}, "now")]


def test_no_repair_without_a_declared_tool() -> None:
    text = 'call:other{city:<|"|>Oslo}'
    events = parse(f"<|tool_call>{text}<tool_call|>")
    assert events == [("text", text), ("warning",)]


@pytest.mark.parametrize(
    "text", ["nonsense", "{}", "call:", "call:{", "call:get_weather{]]]", "call:get_weather{:::}", "[[[["]
)
def test_what_cannot_be_read_is_shown_with_a_warning(text: str) -> None:
    made = parser()
    events = made.feed(ids(gemma4_tokenizer(), f"Well:<|tool_call>{text}<tool_call|> bye")) + made.finish()
    assert values(events) == [("text", f"Well:\n{text}"), ("warning",), ("text", " bye")]
    assert any(isinstance(event, WarningEvent) and "could not be read" in event.message for event in events)


@pytest.mark.parametrize("bad", ["call:", "call:get_weather", "call:other", "call:other(", "nonsense", ":"])
def test_a_bad_call_swallows_no_later_one(bad: str) -> None:
    good = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|>'
    for reply in (f"<|tool_call>{bad}<tool_call|>{good}", f"<|tool_call>{bad}{good}"):
        events = parse(reply)
        assert json.loads(events[-1][3]) == {"city": "Oslo"}


def test_a_readable_call_of_an_undeclared_tool_is_passed_on_with_a_warning() -> None:
    """The caller answers the model that there is no such tool."""
    assert parse("<|tool_call>call:other{a:1}<tool_call|>") == [("warning",), call({"a": 1}, "other")]


def test_missing_end_marker() -> None:
    assert parse("<|tool_call>call:now{}") == [call({}, "now")]
    assert parse('<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<|tool_response>') == [call({"city": "Oslo"})]


def test_a_call_cut_off_by_the_token_limit_is_not_run() -> None:
    text = '<|tool_call>call:get_weather{city:<|"|>Os'
    events = parse(text, complete=False)
    assert events == [("text", 'call:get_weather{city:<|"|>Os'), ("warning",)]


def test_endless_garbage_ends() -> None:
    for text in ("]" * 2000, "{" * 2000, "call:get_weather" + "{where:" * 2000, "call:get_weather{tags:" + "[" * 2000):
        assert parse(f"<|tool_call>{text}<tool_call|>", one_by_one=False)[-1] == ("warning",)


@given(
    st.lists(
        st.sampled_from(['<|"|>', "{", "}", "[", "]", ",", ":", "call:get_weather", "city", "days", "1", " ", "=", "("]),
        max_size=14,
    )
)
@settings(deadline=None, max_examples=300)
def test_no_call_text_crashes(parts: list[str]) -> None:
    """Whatever stands between the markers is a call with strict JSON arguments, or text with a warning."""
    for event in parse("<|tool_call>" + "".join(parts) + "<tool_call|>"):
        if event[0] == "call":
            assert isinstance(json.loads(event[3]), dict)


# --- calls written as text


@pytest.mark.parametrize(
    "text",
    [
        'call:get_weather{city:<|"|>Oslo "x"<|"|>}',
        'get_weather{city:<|"|>Oslo "x"<|"|>}',
        '{"name": "get_weather", "arguments": {"city": "Oslo \\"x\\""}}',
        '```json\n{"name": "get_weather", "parameters": {"city": "Oslo \\"x\\""}}\n```',
        '[{"name": "get_weather", "arguments": {"city": "Oslo \\"x\\""}}]',
        '{"type": "function", "function": {"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo \\\\\\"x\\\\\\"\\"}"}}',
    ],
)
def test_calls_in_content(text: str) -> None:
    assert parse(text) == [call({"city": 'Oslo "x"'})]
    assert parse(f"<|channel>thought\nhm<channel|>{text}<turn|>")[1:] == [call({"city": 'Oslo "x"'})]


def test_several_calls_in_content() -> None:
    assert parse('call:now{}\ncall:get_weather{city:<|"|>A<|"|>}') == [call({}, "now"), call({"city": "A"}, index=1)]
    reply = '{"name": "now", "arguments": {}}\n{"name": "get_weather", "arguments": {"days": 1}}'
    assert parse(reply) == [call({}, "now"), call({"days": 1}, index=1)]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "arguments": {}}',
        '{"name": "now", "arguments": {}} is how a call looks.',
        '{"name": "now", "arguments": {}, "price": 3}',
        '{"name": "now", "arguments": {"x": NaN}}',
        '{"city": "Oslo"}',
        "call:other{}",
        "call: me later",
        "now we go (slowly)",
        "get_weather{ is a function",
        "[1, 2, 3]",
        "```python\nprint(1)\n```",
        "{",
    ],
)
def test_content_that_only_looks_like_a_call_stays_text(text: str) -> None:
    assert parse(text) == [("text", text)]


def test_without_tools_nothing_is_kept_back() -> None:
    made = parser(tools=())
    first = made.feed(gemma4_tokenizer().encode_text('{"name": "now"'))
    assert values(first) == [("text", '{"name": "now"')]


# --- stop strings


def test_stop_strings_act_on_visible_text_only() -> None:
    reply = "<|channel>thought\nEND of it<channel|>Hello EN"
    assert parse(reply, stop=["END"]) == [("reasoning", "END of it"), ("text", "Hello EN")]
    assert parse(reply + "D<|tool_call>call:now{}<tool_call|>", stop=["END"])[1:] == [("text", "Hello ")]


def test_stop_check_agrees_with_the_parser() -> None:
    prompt = chat("transcript").prompt([Message("user", "x")])
    check = chat("transcript").stop_check(prompt, ["###"])
    assert check is not None
    tokens = gemma3_tokenizer().encode_text(" Paris.\n\nUser: next")
    fired = next(index for index, token in enumerate(tokens) if check(token))
    made = chat("transcript").reply_parser(prompt, ["###"])
    assert values(made.feed(tokens[: fired + 1]) + made.finish()) == [("text", "Paris.")]
    assert made.stopped
    assert chat("gemma3").stop_check(chat("gemma3").prompt([Message("user", "x")])) is None


# --- transcripts


def transcript(reply: str, tools: Sequence[Tool] = ()) -> list[Any]:
    prompt = chat("transcript").prompt([Message("user", "x")], tools=tools)
    made = chat("transcript").reply_parser(prompt)
    events: list[Any] = []
    for token in gemma3_tokenizer().encode_text(reply):
        events += made.feed([token])
    return values(events + made.finish())


def test_transcript_text_is_trimmed_and_stopped() -> None:
    assert transcript(" Paris. \n\nUser: And?") == [("text", "Paris.")]
    assert transcript(" one\n\ntwo \n") == [("text", "one\n\ntwo")]
    assert transcript(" \n") == []


def test_transcript_lines_with_tools() -> None:
    written = 'Call: {"name": "get_weather", "arguments": {"city": "Oslo"}}'
    assert transcript(written + "\nResult: 3", TOOLS) == [call({"city": "Oslo"})]
    assert transcript(written + '\nCall: {"name": "now", "arguments": {}}', TOOLS)[1] == call({}, "now", 1)
    assert transcript("Assistant: It is 3C.\nUser: x", TOOLS) == [("text", "It is 3C.")]
    assert transcript("Assistant: Let me see.\nCall: {", TOOLS) == [("text", "Let me see.")]
    assert transcript("Just text", TOOLS) == [("text", "Just text")]
    assert transcript("Call: me", TOOLS) == [("text", "Call: me"), ("warning",)]
