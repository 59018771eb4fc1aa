"""Token counts equal to what the engine reads, pinned documents, prefixes reused, and contexts that are too small."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_scripted import MakeModel, bundles, langchain_bundles, make_model  # noqa: F401
from support import scripted
from support.quickstart import prose

from langchain_adapter import ChatGemmaCoreML


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}"


CALL: Any = {"name": "get_weather", "args": {"city": "Oslo"}, "id": "a", "type": "tool_call"}
CONVERSATIONS: list[list[BaseMessage]] = [
    [HumanMessage("Hello")],
    [SystemMessage("Be brief."), HumanMessage("你好 🙂\n\n   x <turn|>"), AIMessage("Hi."), HumanMessage("Bye", name="Ada")],
    [HumanMessage("Weather?"), AIMessage("", tool_calls=[CALL]), ToolMessage("sunny", tool_call_id="a")],
]


@pytest.mark.parametrize("bundle", ["gemma4", "base"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [get_weather]])
def test_counts_are_those_of_the_engine(make_model: MakeModel, bundle: str, messages: list[BaseMessage], tools: Any) -> None:  # noqa: F811
    model = make_model(("", "ok"), model=bundle)
    answer = model.bind(tools=tools).invoke(messages) if tools else model.invoke(messages)
    counted = model.get_num_tokens_from_messages(messages, tools=tools)
    assert answer.usage_metadata is not None
    assert counted == answer.usage_metadata["input_tokens"]


def test_counts_with_schema_and_thinking(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    schema: dict[str, Any] = {"title": "A", "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    arguments: dict[str, Any] = {"response_format": schema, "thinking": True}
    model = make_model(("", '<|channel>thought\nHm.<channel|>{"x": 1}'))
    model.invoke("Hello", **arguments)
    prompt = scripted.script_of(bundles / "gemma4").prompts[-1]
    assert model.get_num_tokens_from_messages([HumanMessage("Hello")], **arguments) == len(prompt)


def test_ids_of_a_text(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model()
    tokenizer = model._opened().chat.tokenizer
    for text in ("", "Hello world", "a\n\n\nb    c", "naïve 漢字 🙂", "<turn|>"):
        assert model.get_token_ids(text) == tokenizer.encode_text(text)
        assert model.get_num_tokens(text) == len(tokenizer.encode_text(text))


def test_counts_are_cached(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The messages of a conversation are encoded once, however often it grows by one more."""
    model = make_model()
    tokenizer = model._opened().chat.tokenizer
    seen: list[str] = []
    encode = type(tokenizer).encode_text
    monkeypatch.setattr(type(tokenizer), "encode_text", lambda self, text: seen.append(text) or encode(self, text))
    messages: list[BaseMessage] = [HumanMessage("the first question, which is long")]
    for text in ("one", "two", "three"):
        messages += [AIMessage(text), HumanMessage(f"and then {text}?")]
        model.get_num_tokens_from_messages(messages)
    assert sum("the first question" in text for text in seen) == 1


def test_pieces_of_a_conversation_can_be_counted(make_model: MakeModel) -> None:  # noqa: F811
    """trim_messages asks for the size of every suffix."""
    model = make_model()
    messages: list[BaseMessage] = [SystemMessage("Be brief."), *CONVERSATIONS[2], *CONVERSATIONS[1][1:]]
    assert model.get_num_tokens_from_messages([]) == 0
    assert all(model.get_num_tokens_from_messages(messages[start:end]) > 0 for start in range(7) for end in range(start + 1, 8))
    for limit in (30, 45, 70):
        kept = trim_messages(messages, max_tokens=limit, token_counter=model, include_system=True, start_on="human")
        assert model.get_num_tokens_from_messages(kept) <= limit
        assert kept[0] == messages[0]


def cached(message: AIMessage) -> int:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]["cache_read"]


def test_a_second_question_computes_only_the_question(make_model: MakeModel) -> None:  # noqa: F811
    document = prose()[:12000]
    model = make_model(("", "ok"))

    def ask(question: str) -> AIMessage:
        return model.invoke([SystemMessage(document), HumanMessage(question)])

    ask("Who is it about?")
    second = ask("Where does it happen?")
    whole = model.get_num_tokens_from_messages([SystemMessage(document), HumanMessage("Where does it happen?")])
    assert whole > 2000
    assert whole - cached(second) < 20


@pytest.mark.parametrize("bundle", ["gemma4", "base"])
def test_a_pinned_document_outlasts_other_prompts(make_model: MakeModel, bundle: str) -> None:  # noqa: F811
    # Room for a document or so: without the pin, the other prompts would have taken its place.
    document = "A pinned text. " + prose()[:4000]
    budget = 1 << 20
    model = make_model(("", "ok"), model=bundle, session_memory=budget)
    with model.pin(document) as pinned:
        for index in range(12):
            model.invoke(f"{index} Something else. " + prose()[index * 50 : index * 50 + 3000])
        answer = model.invoke([SystemMessage(document), HumanMessage("Who is it about?")])
        assert cached(answer) >= pinned.tokens > 500
        assert not model.pin(document).tokens < pinned.tokens
    assert not pinned.unpin()


async def test_pin_messages_and_tools(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("", "ok"))
    beginning: list[BaseMessage] = [SystemMessage("Rules. " * 30), HumanMessage("A story. " * 30), AIMessage("Read.")]
    async with await model.apin(beginning, tools=[get_weather]) as pinned:
        answer = model.bind_tools([get_weather]).invoke([*beginning, HumanMessage("And now?")])
        assert cached(answer) >= pinned.tokens > 100


def test_pins_beyond_the_memory(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("", "ok"), session_memory=1000)
    with pytest.raises(ModelInvalidRequestError, match="MB for sessions"):
        model.pin(prose()[:2000])
    with pytest.raises(ModelInvalidRequestError, match="empty"):
        model.pin("  ")


def test_overlong_input(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    model = make_model(("", "ok"))
    script = scripted.script_of(bundles / "gemma4")
    computed = len(script.prompts)
    messages = [HumanMessage("word " * 9000)]
    with pytest.raises(ContextOverflowError) as overflow:
        model.invoke(messages)
    error: Any = overflow.value
    assert error.prompt_tokens == model.get_num_tokens_from_messages(messages) > error.context_tokens == 8192
    assert str(error.prompt_tokens) in str(error)
    assert "8192" in str(error)
    with pytest.raises(ContextOverflowError, match="100 to generate"):
        model.invoke("word " * 8100, max_tokens=100)
    with pytest.raises(ContextOverflowError):
        model.invoke("Hello there, how are you today?", context=10)
    with pytest.raises(ContextOverflowError):
        next(iter(model.stream(messages)))
    with pytest.raises(ContextOverflowError):
        model.pin("word " * 9000)
    assert len(script.prompts) == computed


def test_profile(make_model: MakeModel) -> None:  # noqa: F811
    profile: Any = make_model().profile
    assert profile["max_input_tokens"] == 8192
    assert make_model(context=100).profile["max_input_tokens"] == 100  # type: ignore[index]
    assert profile["tool_calling"] and profile["structured_output"] and profile["reasoning_output"]  # noqa: PT018
    assert not make_model(model="base").profile["reasoning_output"]  # type: ignore[index]
    assert ChatGemmaCoreML(model="no-such-model").profile is None
