"""Constrained replies: JSON schemas and calls, masks on every draft row, forced tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.chats import chat, gemma3_tokenizer, gemma4_tokenizer, ids, spell, values

from llm_gemma_coreml.chat import structured
from llm_gemma_coreml.chat.json_schema import first_violation, read_reply
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.prompt import Prompt
from llm_gemma_coreml.engine.request import TokenConstraint
from llm_gemma_coreml.errors import MissingDependencyError, RequestError

USER = [Message("user", "x")]
SHORT = {"type": "string", "maxLength": 4}
PERSON = {
    "type": "object",
    "properties": {
        "name": SHORT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": SHORT, "maxItems": 2},
    },
    "required": ["name", "age"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "person": PERSON,
    "choice": {"enum": ["red", 'a "b"', 3, None]},
    "union": {
        "anyOf": [
            SHORT,
            {"type": "null"},
            {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 1, "maxItems": 3},
        ]
    },
    "tree": TREE,
    "format": {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "date"}, "p": {"type": "string", "pattern": "^[ab]{2}$"}},
        "required": ["d", "p"],
    },
    "const": {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "object", "properties": {}}}, "required": ["a"]},
}
WEATHER = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "Days": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "object", "properties": {"a": SHORT}, "required": ["a"]}, "maxItems": 2},
            "o": {"type": "object", "properties": {"z": {"type": "number", "minimum": 0, "maximum": 1}}},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
        },
        "required": ["city"],
    },
)
NOW = Tool("now", "", {})
TOOLS = (WEATHER, NOW)


def constraint(kind: str = "gemma4", **options: Any) -> TokenConstraint:
    made = chat(kind).prompt(USER, **options).constraint
    assert made is not None
    return made


def follow(made: TokenConstraint, tokens: Sequence[int]) -> bool:
    """Whether the grammar allows these tokens, one after the other."""
    for token in tokens:
        mask = made.masks([])[0]
        if mask is not None and not mask[token]:
            return False
        made.advance(token)
    return True


def accepts(reply: str, kind: str = "gemma4", **options: Any) -> bool:
    tokenizer = gemma4_tokenizer() if kind == "gemma4" else gemma3_tokenizer()
    made = constraint(kind, **options)
    return follow(made, ids(tokenizer, reply)) and made.complete()


def random_reply(made: TokenConstraint, seed: int, stop_ids: frozenset[int], limit: int = 400) -> list[int]:
    """A random walk through the grammar, ended as soon as the grammar allows it (half of the time)."""
    choose = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < limit:
        mask = made.masks([])[0]
        assert mask is not None
        assert mask.any()
        assert made.complete() == mask[list(stop_ids)].any()
        mask[list(stop_ids)] = False
        if made.complete() and (not mask.any() or choose.random() < 0.5):
            break
        tokens.append(int(choose.choice(np.flatnonzero(mask))))
        made.advance(tokens[-1])
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_grammar_allows_satisfies_the_schema(name: str) -> None:
    """Oracle: the package jsonschema."""
    stops = chat("gemma3").stop_ids
    for seed in range(4):
        tokens = random_reply(constraint("gemma3", schema=SCHEMAS[name]), seed, stops)
        text = spell(gemma3_tokenizer(), tokens)
        value = read_reply(text, SCHEMAS[name])
        jsonschema.validate(value, SCHEMAS[name])
        assert text == json.dumps(value, ensure_ascii=False) or "\\" in text


def test_schema_replies() -> None:
    reply = '{"name": "Ada", "age": 36, "tags": ["x"]}'
    for kind in ("gemma3", "gemma4"):
        assert accepts(reply, kind, schema=PERSON)
        assert not accepts(reply[:-1], kind, schema=PERSON)
        assert not accepts('{"name":"Ada","age":36}', kind, schema=PERSON)
        assert not accepts('{"age": 36, "name": "Ada"}', kind, schema=PERSON)
        assert not accepts('{"name": "Ada", "age": 151}', kind, schema=PERSON)
        assert not accepts('{"name": "Ada", "age": 36, "more": 1}', kind, schema=PERSON)
        assert not accepts("Sure: " + reply, kind, schema=PERSON)
        assert not accepts("\n" + reply, kind, schema=PERSON)
    assert accepts(" " + reply, "transcript", schema=PERSON)
    assert not accepts(reply, "transcript", schema=PERSON)


def test_only_the_end_may_follow_a_whole_reply() -> None:
    made = constraint(schema=PERSON)
    assert follow(made, gemma4_tokenizer().encode_text('{"name": "A", "age": 1}'))
    mask = made.masks([])[0]
    assert mask is not None
    assert set(np.flatnonzero(mask)) == {1, 50, 106}
    assert made.complete()
    made.advance(106)
    assert list(made.forced(4)) == []


def test_the_thought_channel_is_part_of_the_grammar() -> None:
    reply = '{"name": "A", "age": 1}'
    thought = "<|channel>thought\nlet me { see\n<channel|>"
    assert accepts(thought + reply, schema=PERSON, thinking=True)
    assert accepts(reply, schema=PERSON, thinking=True)
    assert not accepts(thought + reply, schema=PERSON)
    assert not accepts(thought + thought + reply, schema=PERSON, thinking=True)
    assert not accepts(thought + "hm", schema=PERSON, thinking=True)


def test_native_calls() -> None:
    call = '<|tool_call>call:get_weather{city:<|"|>Oslo {"x"}, ]<|"|>,Days:3,map:{a:true},o:{z:0.5},'
    call += 'tags:[{a:<|"|>q<|"|>}],unit:<|"|>C<|"|>}<tool_call|>'
    now = "<|tool_call>call:now{}<tool_call|>"
    minimal = '<|tool_call>call:get_weather{city:<|"|><|"|>,Days:null}<tool_call|>'
    for choice in ("any", "auto"):
        assert accepts(call, tools=TOOLS, tool_choice=choice)
        assert accepts(now + minimal + now, tools=TOOLS, tool_choice=choice)
        for wrong in (
            "<|tool_call>call:get_weather{Days:3}<tool_call|>",
            "<|tool_call>call:get_weather{city:Oslo}<tool_call|>",
            '<|tool_call>call:get_weather{city:<|"|>x<|"|>,Days:12}<tool_call|>',
            '<|tool_call>call:get_weather{city:<|"|>x<|"|>,unit:<|"|>K<|"|>}<tool_call|>',
            '<|tool_call>call:get_weather{city:<|"|>x<|"|>,o:{y:1}}<tool_call|>',
            "<|tool_call>call:other{}<tool_call|>",
            "<|tool_call>call:now{}",
            '<|tool_call>call:get_weather{city:<|"|>x<|tool_call><|"|>}<tool_call|>',
        ):
            assert not accepts(wrong, tools=TOOLS, tool_choice=choice), wrong
    assert accepts(now, tools=TOOLS, tool_choice="now")
    assert not accepts(call, tools=TOOLS, tool_choice="now")


def test_tool_choice() -> None:
    now = "<|tool_call>call:now{}<tool_call|>"
    assert accepts("Just text", tools=TOOLS)
    assert accepts(f"Text {now} more", tools=TOOLS)
    assert not accepts("Text", tools=TOOLS, tool_choice="any")
    assert not accepts("", tools=TOOLS, tool_choice="any")
    assert accepts(f"<|channel>thought\nhm<channel|>{now}", tools=TOOLS, tool_choice="any", thinking=True)
    assert accepts("Text", tools=TOOLS, tool_choice="none")
    assert not accepts(now, tools=TOOLS, tool_choice="none")
    assert accepts(now, tools=TOOLS, schema=PERSON)
    assert accepts('{"name": "A", "age": 1}', tools=TOOLS, schema=PERSON)
    assert not accepts("text", tools=TOOLS, schema=PERSON)


def test_a_reply_that_goes_on_thinking_after_a_result() -> None:
    from llm_gemma_coreml.chat.messages import ToolCall

    messages = [*USER, Message("assistant", tool_calls=(ToolCall("now", {}, "1"),)), Message("tool", "12", tool_call_id="1")]
    prompt = chat("gemma4").prompt(messages, tools=TOOLS, thinking=True, schema=PERSON)
    assert prompt.starts_in_reasoning
    assert prompt.constraint is not None
    assert follow(prompt.constraint, ids(gemma4_tokenizer(), 'so\n<channel|>{"name": "A", "age": 1}'))
    assert prompt.constraint.complete()


@pytest.mark.parametrize("seed", range(6))
def test_native_calls_that_the_grammar_allows_are_read_and_satisfy_the_schema(seed: int) -> None:
    """Oracle: jsonschema on what the parser reads from a random walk."""
    prompt = chat("gemma4").prompt(USER, tools=TOOLS, tool_choice="get_weather")
    assert prompt.constraint is not None
    tokens = ids(gemma4_tokenizer(), '<|tool_call>call:get_weather{city:<|"|>x<|"|>')
    assert follow(prompt.constraint, tokens)
    tokens += random_reply(prompt.constraint, seed, prompt.stop_ids)
    parser = chat("gemma4").reply_parser(prompt)
    events = values(parser.feed(tokens) + parser.finish())
    assert events
    for event in events:
        assert event[0] == "call", events
        jsonschema.validate(json.loads(event[3]), dict(WEATHER.parameters))


@pytest.mark.parametrize("name", ["union", "tree", "choice"])
def test_native_translation_of_schemas(name: str) -> None:
    schema = {**SCHEMAS[name]}
    definitions = schema.pop("$defs", {})
    tool = Tool("f", "", {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": definitions})
    for seed in range(3):
        prompt = chat("gemma4").prompt(USER, tools=[tool], tool_choice="f")
        assert prompt.constraint is not None
        parser = chat("gemma4").reply_parser(prompt)
        events = values(parser.feed(random_reply(prompt.constraint, seed, prompt.stop_ids)) + parser.finish())
        for event in events:
            assert event[0] == "call", events
            jsonschema.validate(json.loads(event[3]), dict(tool.parameters))


def test_json_calls_of_the_other_kinds() -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}'
    assert accepts(call, "gemma3", tools=TOOLS)
    assert accepts(f'{call}\n{{"name": "now", "arguments": {{}}}}', "gemma3", tools=TOOLS, tool_choice="any")
    assert accepts("Hello {you}", "gemma3", tools=TOOLS)
    assert not accepts("Hello", "gemma3", tools=TOOLS, tool_choice="any")
    assert not accepts('{"name": "get_weather", "arguments": {}}', "gemma3", tools=TOOLS)
    assert not accepts(call + " and more", "gemma3", tools=TOOLS)
    assert accepts(f"Call: {call}", "transcript", tools=TOOLS)
    assert accepts(f"Call: {call}\nResult:", "transcript", tools=TOOLS, tool_choice="any")
    assert accepts("Assistant: Hello.\nUser: x", "transcript", tools=TOOLS)
    assert not accepts("Assistant: Hello.", "transcript", tools=TOOLS, tool_choice="any")
    assert not accepts("Hello", "transcript", tools=TOOLS)
    assert accepts('Assistant: {"name": "A", "age": 1}', "transcript", tools=TOOLS, schema=PERSON)


def walk(prompt: Prompt, tokens: Sequence[int]) -> list[np.ndarray | None]:
    """The mask before each token and after the last one, advancing one by one."""
    made = prompt.constraint
    assert made is not None
    rows = []
    for token in tokens:
        rows.append(made.masks([])[0])
        made.advance(token)
    return [*rows, made.masks([])[0]]


def same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return left is not None and right is not None and left.dtype == np.bool_ and np.array_equal(left, right)


def test_masks_of_draft_rows_are_those_of_stepping_there() -> None:
    reply = ids(gemma4_tokenizer(), '<|channel>thought\nhm\n<channel|>{"name": "A", "age": 12, "tags": []}')
    options: dict[str, Any] = {"schema": PERSON, "thinking": True}
    expected = walk(chat("gemma4").prompt(USER, **options), reply)
    made = constraint(**options)
    position = 0
    for width in (1, 4, 8, 3, 8, 8, 8):
        drafts = reply[position : position + width - 1]
        for _ in range(2):  # asking changes nothing
            rows = made.masks(drafts)
            assert len(rows) == len(drafts) + 1
            assert all(same(row, want) for row, want in zip(rows, expected[position:], strict=False))
        for token in reply[position : position + width]:
            made.advance(token)
        position += width
    assert position >= len(reply)


def test_rows_after_a_forbidden_draft_are_open_and_nothing_is_lost() -> None:
    tokenizer = gemma4_tokenizer()
    made = constraint(schema=PERSON)
    good = tokenizer.encode_text('{"name": "')
    first = made.masks([])[0]
    rows = made.masks([*good[:2], 106, *good[2:]])
    assert rows[3:] == [None] * (len(good) - 2 + 1)
    assert all(row is not None for row in rows[:3])
    assert same(made.masks([])[0], first)
    assert made.masks([-1, 10**9])[1:] == [None, None]
    assert follow(made, good)


def test_a_stop_id_among_the_drafts() -> None:
    made = constraint(tools=TOOLS)
    rows = made.masks([106, 9259])
    assert rows[0] is not None
    assert rows[0][106]
    assert same(made.masks([])[0], rows[0])
    assert follow(made, [9259])


def test_forced_tokens() -> None:
    tokenizer = gemma4_tokenizer()
    made = constraint(schema=PERSON)
    forced = list(made.forced(100))
    assert forced == tokenizer.encode_text('{"name":')
    assert list(made.forced(2)) == forced[:2]
    assert list(made.forced(0)) == []
    assert follow(made, forced)
    assert follow(made, tokenizer.encode_text(' "A'))
    assert list(made.forced(100)) == []


def test_forced_tokens_open_a_call() -> None:
    made = constraint(tools=TOOLS, tool_choice="get_weather")
    forced = list(made.forced(100))
    assert forced == ids(gemma4_tokenizer(), '<|tool_call>call:get_weather{city:<|"|>')


def test_a_token_against_the_grammar_is_an_error() -> None:
    made = constraint(schema=PERSON)
    with pytest.raises(RequestError, match="JSON schema"):
        made.advance(9259)


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(3000):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (5, "not a JSON object"),
        ({"type": "objekt"}, "objekt"),
        ({"properties": {"a": {"minLength": -1}}}, "properties/a/minLength"),
        ({"$ref": "#/nope"}, "/nope"),
        ({"$ref": "http://localhost/schema"}, "http://localhost/schema"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"$ref": "#"}, "nothing satisfies it"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing satisfies it"),
        ({"const": float("nan")}, "JSON"),
        ({"enum": [{1}]}, "JSON"),
        ({"description": "x" * 600_000}, "larger than"),
        (DEEP, "JSON"),
    ],
)
def test_schemas_that_cannot_be_met(schema: Any, named: str) -> None:
    for kind in ("gemma3", "gemma4"):
        with pytest.raises(RequestError, match="schema") as caught:
            chat(kind).prompt(USER, schema=schema)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "minItems": 10**8},
        {"type": "string", "minLength": 10**8},
        {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
        {"enum": [f"x{number}" for number in range(5000)]},
        {"type": "string", "format": "something"},
        {"not": {"type": "string"}},
        {},
    ],
)
def test_unusual_schemas_compile(schema: Any) -> None:
    assert chat("gemma3").prompt(USER, schema=schema).constraint is not None
    tool = Tool("f", "", {"type": "object", "properties": {"x": schema}})
    assert chat("gemma4").prompt(USER, tools=[tool], tool_choice="any").constraint is not None


def test_bad_tool_schemas_are_named() -> None:
    for parameters in (
        {"type": "objekt"},
        {"properties": {"a": {"$ref": "#/nope"}}},
        {"type": "string"},
        {"properties": {"a": DEEP}},
    ):
        with pytest.raises(RequestError, match="'broken'"):
            chat("gemma4").prompt(USER, tools=[Tool("broken", "", parameters)])


def test_replies_are_checked() -> None:
    assert read_reply('{"name": "A", "age": 1}', PERSON) == {"name": "A", "age": 1}
    with pytest.raises(RequestError, match="max_tokens"):
        read_reply('{"name": "A', PERSON)
    with pytest.raises(RequestError, match="age"):
        read_reply('{"name": "A"}', PERSON)
    with pytest.raises(RequestError, match="at tags/1"):
        read_reply('{"name": "A", "age": 1, "tags": ["a", 2]}', PERSON)
    assert first_violation(1, {"$ref": "http://localhost:1/x"}) is not None


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema or a forced call needs llguidance; tools alone do without."""
    from llm_gemma_coreml.chat.chat import Chat

    fresh = Chat(chat("gemma3").folder, chat("gemma3").manifest)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"llm-gemma-coreml\[structured\]"):
        fresh.prompt(USER, schema=PERSON)
    with pytest.raises(MissingDependencyError, match=r"structured"):
        fresh.prompt(USER, tools=TOOLS, tool_choice="any")
    assert fresh.prompt(USER, tools=TOOLS).constraint is None


def test_a_model_with_more_logits_than_pieces() -> None:
    """Some checkpoints pad their vocabulary: the columns beyond the tokenizer's are never allowed."""
    from llm_gemma_coreml.chat.structured import GrammarCompiler

    made = GrammarCompiler(gemma3_tokenizer(), 262208, frozenset({1, 106})).constraint("start: /(.|\\n)*/", "it")
    mask = made.masks([])[0]
    assert mask is not None
    assert mask.shape == (262208,)
    assert mask[:262144].sum() > 200_000
    assert not mask[262144:].any()


def test_an_unreadable_call_names_what_would_have_prevented_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert structured.hint_if_missing() == ""
    monkeypatch.setattr(structured, "has_llguidance", lambda: False)
    assert "llm-gemma-coreml[structured]" in structured.hint_if_missing()
