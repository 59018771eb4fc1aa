"""llm's prompts and options in our form, against what llm itself builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llm
import pydantic
import pytest
from llm.parts import ReasoningPart, TextPart, ToolCallPart, ToolResultPart

from llm_gemma_coreml.chat.messages import ReasoningEvent, TextEvent, ToolCallEvent
from llm_gemma_coreml.errors import RequestError
from llm_gemma_coreml.options import GemmaOptions, ThinkingOptions
from llm_gemma_coreml.plugin import GemmaModel
from llm_gemma_coreml.settings import sampling_parameters, speculation
from llm_gemma_coreml.translate import neutral_messages, neutral_tools, reply_parts, wanted_schema


@pytest.fixture
def model() -> GemmaModel:
    return GemmaModel("coreml/none", lambda: Path("/nowhere"))


def seen(prompt: Any) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in neutral_messages(prompt)]


def test_single_prompt_with_system_and_fragments(model: GemmaModel) -> None:
    prompt = llm.Prompt("Question", model, system="Be brief", fragments=["One", "Two"], system_fragments=["Rules"])
    assert seen(prompt) == [("system", "Rules\n\nBe brief"), ("user", "One\nTwo\nQuestion")]


def test_history_comes_from_the_messages(model: GemmaModel) -> None:
    messages = [llm.system("Old"), llm.user("Hi"), llm.assistant("Hello"), llm.user("Again")]
    prompt = llm.Prompt("Again", model, messages=messages)
    assert seen(prompt) == [("system", "Old"), ("user", "Hi"), ("assistant", "Hello"), ("user", "Again")]


def test_a_later_system_text_takes_the_place_of_the_first(model: GemmaModel) -> None:
    messages = [llm.system("Old"), llm.user("Hi"), llm.assistant("Hello"), llm.user("Again")]
    prompt = llm.Prompt("Again", model, messages=messages, system="New")
    assert seen(prompt) == [("system", "New"), ("user", "Hi"), ("assistant", "Hello"), ("user", "Again")]


def test_tools_results_and_reasoning(model: GemmaModel) -> None:
    messages = [
        llm.user("Weather?"),
        llm.assistant(
            ReasoningPart("Let me see"),
            TextPart("Looking. "),
            ToolCallPart("weather", {"city": "Oslo"}, "id1"),
            ToolCallPart("weather", {"city": "Rome"}, "id2"),
        ),
        llm.tool_message(
            ToolResultPart("weather", "3 C", "id1"),
            ToolResultPart("weather", "", "id2", exception="ValueError: no such city"),
        ),
    ]
    user, assistant, first, second = neutral_messages(llm.Prompt("", model, messages=messages))
    assert user.role == "user"
    assert (assistant.text, assistant.reasoning) == ("Looking. ", "Let me see")
    assert [(call.name, call.arguments, call.id) for call in assistant.tool_calls] == [
        ("weather", {"city": "Oslo"}, "id1"),
        ("weather", {"city": "Rome"}, "id2"),
    ]
    assert (first.role, first.text, first.tool_call_id, first.is_error) == ("tool", "3 C", "id1", False)
    assert (second.text, second.name, second.is_error) == ("ValueError: no such city", "weather", True)


def test_an_attachment_in_explicit_messages_is_refused(model: GemmaModel) -> None:
    messages = [llm.user("See", llm.Attachment(type="image/png", content=b"png"))]
    with pytest.raises(RequestError, match="text only"):
        neutral_messages(llm.Prompt("", model, messages=messages))


def test_tools_are_described(model: GemmaModel) -> None:
    def add(a: int, b: int) -> int:
        "Adds"
        return a + b

    (tool,) = neutral_tools(llm.Prompt("", model, tools=[add]))
    assert (tool.name, tool.description) == ("add", "Adds")
    assert set(tool.parameters["properties"]) == {"a", "b"}


class Past:
    """As much of a response as `wanted_schema` looks at."""

    def __init__(self, prompt: Any) -> None:
        self.prompt = prompt


def test_schema_lasts_through_a_tool_chain(model: GemmaModel) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    results = [llm.ToolResult("add", "3")]
    first = llm.Prompt("Count", model, schema=schema)
    second = llm.Prompt("", model, tool_results=results)
    conversation = type("Conversation", (), {"responses": [Past(first), Past(second)]})()
    assert wanted_schema(llm.Prompt("", model, tool_results=results), conversation) == schema
    assert wanted_schema(llm.Prompt("A new question", model), conversation) is None
    conversation.responses.append(Past(llm.Prompt("Plain", model)))
    assert wanted_schema(llm.Prompt("", model, tool_results=results), conversation) is None


class Noted:
    """As much of a response as `reply_parts` needs."""

    def __init__(self) -> None:
        self.calls: list[llm.ToolCall] = []

    def add_tool_call(self, call: llm.ToolCall) -> None:
        self.calls.append(call)


def test_events_become_stream_events() -> None:
    noted = Noted()
    events = [
        ReasoningEvent("hm"),
        TextEvent(""),
        TextEvent("So"),
        ToolCallEvent(0, "id1", "add", '{"a": 1}'),
    ]
    parts = list(reply_parts(events, noted))
    assert [part if isinstance(part, str) else (part.type, part.chunk) for part in parts] == [
        ("reasoning", "hm"),
        "So",
        ("tool_call_name", "add"),
        ("tool_call_args", '{"a": 1}'),
    ]
    assert {part.tool_call_id for part in parts[2:]} == {"id1"}
    assert [(call.name, call.arguments, call.tool_call_id) for call in noted.calls] == [("add", {"a": 1}, "id1")]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"stop": '["a", "b"]'}, {"stop": ["a", "b"]}),
        ({"stop": "[not json"}, {"stop": ["[not json"]}),
        ({"stop": "[1]"}, {"stop": ["[1]"]}),
        ({"speculate": "4"}, {"speculate": 4}),
        ({"speculate": "off"}, {"speculate": "off"}),
        ({"temperature": "0.5", "top_k": "3"}, {"temperature": 0.5, "top_k": 3}),
    ],
)
def test_options_as_the_command_line_gives_them(given: dict[str, Any], kept: dict[str, Any]) -> None:
    options = GemmaOptions(**given)
    assert {name: getattr(options, name) for name in kept} == kept


@pytest.mark.parametrize(("word", "value"), [("on", True), ("off", False)])
def test_thinking_is_on_or_off(word: str, value: bool) -> None:
    assert ThinkingOptions(thinking=word).thinking is value


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": "nan"},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"max_tokens": 0},
        {"context": 0},
        {"seed": -1},
        {"stop": ""},
        {"stop": '["a", ""]'},
        {"speculate": "fast"},
        {"speculate": "-1"},
        {"speculate": "²"},
        {"thinking": "on"},
        {"repetition_penalty": 0},
    ],
)
def test_bad_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        GemmaOptions(**given)


def test_sampling_takes_the_bundles_defaults() -> None:
    defaults = {"temperature": 1.0, "top_k": 64.0, "top_p": 0.95}
    plain = sampling_parameters(GemmaOptions(seed=5), defaults)
    assert (plain.temperature, plain.top_k, plain.top_p, plain.seed) == (1.0, 64, 0.95, 5)
    changed = sampling_parameters(GemmaOptions(top_k=3, top_p=1, temperature=0.2), defaults)
    assert (changed.temperature, changed.top_k, changed.top_p) == (0.2, 3, 1)
    greedy = sampling_parameters(GemmaOptions(temperature=0), defaults)
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0, None, None)
    assert sampling_parameters(GemmaOptions(), {}).temperature == 0


def test_answers_without_a_seed_differ() -> None:
    defaults = {"temperature": 1.0}
    seeds = {sampling_parameters(GemmaOptions(), defaults).seed for _ in range(8)}
    assert len(seeds) == 8


def test_speculation_option() -> None:
    assert speculation(GemmaOptions()) == "auto"
    assert speculation(GemmaOptions(speculate=0)) == "off"
    assert speculation(GemmaOptions(speculate="3")) == 3


def test_every_option_is_documented_and_plain() -> None:
    schema = ThinkingOptions.model_json_schema()
    for name, field in schema["properties"].items():
        assert field.get("description"), name
        assert field["default"] is None, name
    json.dumps(schema)
