"""Chat, schemas and tools with the real quick-start model: what its transcript template was made for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from llm_gemma_coreml.chat.chat import Chat
from llm_gemma_coreml.chat.json_schema import read_reply
from llm_gemma_coreml.chat.messages import Message, ReplyEvent, TextEvent, Tool, ToolCall, ToolCallEvent
from llm_gemma_coreml.engine.engine import Engine
from llm_gemma_coreml.engine.request import GenerationRequest, Speculate

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
}
PARAGRAPHS = [
    (
        "Maria Lopez is a 34-year-old architect. She was born in Madrid but has lived in Lisbon for ten years, "
        "where she runs a small studio.",
        ("Maria", 34, "Lisbon"),
    ),
    (
        "Last week we interviewed Tom Baker, 52, who works as a fisherman in the town of Galway and has three children.",
        ("Tom", 52, "Galway"),
    ),
    (
        "The winner of the race was Aiko Tanaka. She is 19 years old and trains every morning in Kyoto with her coach.",
        ("Aiko", 19, "Kyoto"),
    ),
]


class Model:
    """The real model with its chat."""

    def __init__(self, bundle: Path) -> None:
        self.chat = Chat(bundle)
        self.engine = Engine.open(bundle)

    def ask(
        self, messages: Sequence[Message], speculate: Speculate = "auto", **options: Any
    ) -> tuple[list[ReplyEvent], list[int]]:
        """Events and tokens of the reply."""
        prompt = self.chat.prompt(messages, **options)
        parser = self.chat.reply_parser(prompt)
        request = GenerationRequest(
            prompt.token_ids,
            max_tokens=80,
            stop_ids=prompt.stop_ids,
            constraint=prompt.constraint,
            stop_check=self.chat.stop_check(prompt),
            speculate=speculate,
        )
        events: list[ReplyEvent] = []
        tokens: list[int] = []
        for ids in self.engine.generate(request):
            events += parser.feed(ids)
            tokens += ids
        return events + parser.finish(), tokens


@pytest.fixture(scope="module")
def model(quickstart_bundle: Path) -> Iterator[Model]:
    opened = Model(quickstart_bundle)
    yield opened
    opened.engine.close()


def text(events: Sequence[ReplyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


def test_it_answers(model: Model) -> None:
    assert text(model.ask([Message("user", "What is the capital of France?")])[0]) == "Paris."
    assert "4" in text(model.ask([Message("user", "What is 2 + 2?")])[0])


def test_it_remembers_the_conversation(model: Model) -> None:
    told = [Message("user", "My name is Ada."), Message("assistant", "Nice to meet you, Ada.")]
    assert "Ada" in text(model.ask([*told, Message("user", "What is my name?")])[0])


@pytest.mark.parametrize(("paragraph", "expected"), PARAGRAPHS)
def test_extraction(model: Model, paragraph: str, expected: tuple[str, int, str]) -> None:
    replies = [model.ask([Message("user", paragraph)], way, schema=PERSON) for way in ("auto", "off")]
    assert replies[0][1] == replies[1][1]
    found = read_reply(text(replies[0][0]), PERSON)
    assert found["name"].startswith(expected[0])
    assert (found["age"], found["city"]) == expected[1:]


def integers(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": list(names)}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: dict[str, tuple[Tool, Callable[..., str]]] = {
    "multiply": (Tool("multiply", "Multiply two numbers.", integers("a", "b")), lambda a, b: str(a * b)),
    "get_weather": (Tool("get_weather", "Get the current weather of a city.", CITY), lambda city: "sunny, 21 degrees"),
}


@pytest.mark.parametrize(
    ("question", "names", "expected"),
    [
        ("What is 123 times 456?", ["multiply"], "56088"),
        ("What is 31 multiplied by 27?", ["get_weather", "multiply"], "837"),
        ("What is the weather in Oslo?", ["get_weather"], "sunny"),
    ],
)
def test_a_tool_chain_ends_with_the_result_in_the_answer(model: Model, question: str, names: list[str], expected: str) -> None:
    tools = [TOOLS[name][0] for name in names]
    messages = [Message("user", question)]
    for _ in range(3):
        events, tokens = model.ask(messages, tools=tools)
        assert model.ask(messages, "off", tools=tools)[1] == tokens
        calls = [event for event in events if isinstance(event, ToolCallEvent)]
        if not calls:
            break
        made = tuple(ToolCall(call.name, json.loads(call.arguments_json), call.id) for call in calls)
        messages.append(Message("assistant", text(events), tool_calls=made))
        for call in made:
            messages.append(Message("tool", TOOLS[call.name][1](**call.arguments), tool_call_id=call.id, name=call.name))
    assert len(messages) > 1, "no tool was called"
    assert expected in text(events)


def test_a_forced_call(model: Model) -> None:
    events, _ = model.ask([Message("user", "Hello!")], tools=[TOOLS["get_weather"][0]], tool_choice="get_weather")
    assert [type(event) for event in events] == [ToolCallEvent]
