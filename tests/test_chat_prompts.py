"""What the prompts of each kind of template look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.chats import chat, gemma3_tokenizer, gemma4_tokenizer, spell

from llm_gemma_coreml.chat.messages import Message, Tool, ToolCall
from llm_gemma_coreml.errors import RequestError

WEATHER = Tool(
    "get_weather",
    "Weather of a city",
    {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "City": {"type": "string", "description": "its name"},
            "days": {"type": ["integer", "null"], "minimum": 1},
        },
        "required": ["City"],
    },
)


def gemma4(messages: Sequence[Message], template: str | None = None, **options: Any) -> str:
    return spell(gemma4_tokenizer(), chat("gemma4", template).prompt(messages, **options).token_ids)


def gemma3(messages: Sequence[Message], **options: Any) -> str:
    return spell(gemma3_tokenizer(), chat("gemma3").prompt(messages, **options).token_ids)


def transcript(messages: Sequence[Message], **options: Any) -> str:
    return spell(gemma3_tokenizer(), chat("transcript").prompt(messages, **options).token_ids)


USER = Message("user", " Hi \n")
NO_THOUGHT = "<|channel>thought\n<channel|>"


def test_gemma4_plain() -> None:
    assert gemma4([USER]) == f"<bos><|turn>user\nHi<turn|>\n<|turn>model\n{NO_THOUGHT}"


def test_gemma4_system_and_thinking() -> None:
    system = Message("system", " Be kind ")
    assert gemma4([system, USER]).startswith("<bos><|turn>system\nBe kind<turn|>\n<|turn>user\n")
    assert gemma4([USER], thinking=True) == ("<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n")
    assert "<|think|>\nBe kind<turn|>" in gemma4([system, USER], thinking=True)
    assert "<|turn>system\nA\n\nB<turn|>" in gemma4([Message("system", "A"), Message("system", "B"), USER])


def test_gemma4_declarations() -> None:
    text = gemma4([USER], tools=[WEATHER, Tool("now", "", {})])
    assert (
        '<bos><|turn>system\n<|tool>declaration:get_weather{description:<|"|>Weather of a city<|"|>,parameters:{'
        'properties:{City:{description:<|"|>its name<|"|>,type:<|"|>STRING<|"|>},'
        'days:{description:<|"|>minimum 1<|"|>,nullable:true,type:<|"|>INTEGER<|"|>},'
        'unit:{enum:[<|"|>C<|"|>,<|"|>F<|"|>],type:<|"|>STRING<|"|>}},'
        'required:[<|"|>City<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
        '<|tool>declaration:now{description:<|"|><|"|>,parameters:{type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
    ) in text


ARGUMENTS = {"city": "Oslo", "days": 3, "f": 1.5, "l": ["a", 1], "none": None, "O": {"k": "v"}, "ok": True}
ROUND = [
    Message("user", "weather?"),
    Message(
        "assistant",
        "Let me see",
        "think",
        (ToolCall("get_weather", ARGUMENTS, "a"), ToolCall("now", {}, "b")),
    ),
    Message("tool", "12:00", tool_call_id="b"),
    Message("tool", '{"t": 3}', tool_call_id="a"),
]
RENDERED_CALLS = (
    'Let me see<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3,f:1.5,l:[<|"|>a<|"|>,1],none:null,'
    'O:{k:<|"|>v<|"|>},ok:true}<tool_call|><|tool_call>call:now{}<tool_call|>'
    '<|tool_response>response:get_weather{value:<|"|>{"t": 3}<|"|>}<tool_response|>'
    '<|tool_response>response:now{value:<|"|>12:00<|"|>}<tool_response|>'
)


def test_gemma4_calls_and_results_stay_in_one_turn() -> None:
    """Text before the calls stands before them, results are in the calls' order, the turn stays open."""
    start = "<bos><|turn>user\nweather?<turn|>\n<|turn>model\n<|channel>thought\nthink\n<channel|>"
    assert gemma4(ROUND) == start + RENDERED_CALLS
    answered = gemma4([*ROUND, Message("assistant", "3C."), Message("user", "ok")])
    assert f"<|turn>model\n{RENDERED_CALLS}3C.<turn|>\n<|turn>user\nok<turn|>\n" in answered


def test_gemma4_thinking_after_a_result_begins_inside_the_channel() -> None:
    prompt = chat("gemma4").prompt(ROUND, thinking=True)
    assert prompt.starts_in_reasoning
    assert spell(gemma4_tokenizer(), prompt.token_ids).endswith("<tool_response|><|channel>thought\n")
    assert not chat("gemma4").prompt(ROUND).starts_in_reasoning
    assert not chat("gemma4").prompt([USER], thinking=True).starts_in_reasoning


def test_gemma4_thoughts_of_earlier_turns_are_dropped() -> None:
    text = gemma4([USER, Message("assistant", "A", "old thought"), USER], thinking=True)
    assert "old thought" not in text
    assert "<|turn>model\nA<turn|>" in text


def test_gemma4_equal_calls_without_ids_keep_their_own_results() -> None:
    calls = (ToolCall("f", {"n": 1}), ToolCall("g", {}), ToolCall("f", {"n": 2}))
    results = [Message("tool", "one", name="f"), Message("tool", "two", name="f"), Message("tool", "gee", name="g")]
    text = gemma4([USER, Message("assistant", tool_calls=calls), *results])
    assert text.endswith(
        '<|tool_response>response:f{value:<|"|>one<|"|>}<tool_response|>'
        '<|tool_response>response:g{value:<|"|>gee<|"|>}<tool_response|>'
        '<|tool_response>response:f{value:<|"|>two<|"|>}<tool_response|>'
    )


def test_gemma4_errors_orphans_and_missing_results() -> None:
    call = Message("assistant", tool_calls=(ToolCall("f", {}, "1"),))
    failed = Message("tool", "no net", tool_call_id="1", is_error=True)
    assert 'response:f{value:<|"|>Error: no net<|"|>}' in gemma4([USER, call, failed])
    with pytest.raises(RequestError, match="'f' has no result"):
        gemma4([USER, call])
    assert 'response:f{value:<|"|>(no result)<|"|>}<tool_response|><turn|>\n<|turn>user' in gemma4([USER, call, USER])
    orphan = gemma4([Message("tool", "42", name="f")])
    assert "<|turn>user\nResult of f: 42<turn|>" in orphan


def test_gemma4_merges_users_and_adjacent_assistants() -> None:
    text = gemma4([USER, Message("user", "there"), Message("assistant", "A"), Message("system", "note"), USER])
    assert text.startswith("<bos><|turn>user\nHi\n\nthere<turn|>\n<|turn>model\nA<turn|>\n<|turn>user\nnote\n\nHi<turn|>")


def test_gemma4_opens_a_turn_that_the_template_closed() -> None:
    """An older template writes the content after the results, closes the turn and adds no new one."""
    template = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n{% endfor %}"
    assert gemma4([USER], template).endswith("<|turn>user\nHi<turn|>\n<|turn>model\n")


def test_gemma4_stop_ids() -> None:
    assert chat("gemma4").stop_ids == {1, 50, 106}
    assert chat("gemma3").stop_ids == {1, 106}
    assert chat("transcript").stop_ids == {1, 106}


@pytest.mark.parametrize("name", ["has space", "", "a{b", "x" * 200, 'q"'])
def test_gemma4_refuses_tool_names_that_it_cannot_write(name: str) -> None:
    with pytest.raises(RequestError, match="Rename"):
        gemma4([USER], tools=[Tool(name, "", {})])


def test_gemma3_folds_the_system_text_and_alternates() -> None:
    messages = [Message("system", "S"), USER, Message("user", "again"), Message("assistant", "A"), Message("user", "B")]
    assert gemma3(messages) == (
        "<bos><start_of_turn>user\nS\n\nHi \n\n\nagain<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n"
    )
    assert gemma3([Message("assistant", "A"), Message("user", "B")]).startswith(
        "<bos><start_of_turn>user\n<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nB"
    )


def test_gemma3_tools_in_words() -> None:
    text = gemma3(ROUND, tools=[WEATHER])
    assert "You can call these tools:\n" in text
    assert '"name": "get_weather"' in text
    assert 'Let me see\n{"name": "get_weather", "arguments": {"city": "Oslo"' in text
    assert "<start_of_turn>user\nResult: 12:00\n\nResult: " in text
    assert "tool<" not in text


def test_transcript_plain() -> None:
    text = transcript([Message("system", "Be kind."), USER, Message("assistant", "A"), Message("user", "B")])
    assert text.startswith("<bos>Be kind.\n\nUser: ")
    assert text.endswith("User: Hi\nAssistant: A\nUser: B\nAssistant:")
    prompt = chat("transcript").prompt([USER])
    assert prompt.stop_strings == ("\nUser:", "\nAssistant:")


def test_transcript_with_tools_lets_the_model_choose() -> None:
    text = transcript(ROUND, tools=[WEATHER])
    assert "get_weather(unit: string, City: string, days: integer or null): Weather of a city\n" in text
    assert 'Call: {"name": "get_weather", "arguments": {"City": "example"}}\n' in text
    assert text.endswith('Call: {"name": "now", "arguments": {}}\nResult: 12:00\nResult: {"t": 3}\n')
    assert chat("transcript").prompt(ROUND, tools=[WEATHER]).stop_strings == ("\nUser:", "\nResult:")


def test_an_example_tool_gives_way_to_a_declared_one() -> None:
    mine = Tool("add", "Put things together", {"type": "object", "properties": {"x": {"type": "number"}}})
    text = transcript([USER], tools=[mine])
    assert "Add two numbers" not in text
    assert '"a": 12' not in text


def test_the_prompt_of_a_turn_begins_with_that_of_the_turn_before() -> None:
    """Kept K/V: what has been computed is a prefix of the next prompt (up to the reply's first or last tokens)."""
    first = [Message("system", "S"), Message("user", "one")]
    later = [*first, Message("assistant", "two"), Message("user", "three")]
    for kind in ("transcript", "gemma3"):
        before, after = (chat(kind).prompt(messages).token_ids for messages in (first, later))
        assert after[: len(before)] == before


def test_requests_that_cannot_be_met() -> None:
    ask = chat("gemma3").prompt
    with pytest.raises(RequestError, match="nothing to answer"):
        ask([])
    with pytest.raises(RequestError, match="nothing to answer"):
        ask([Message("system", "S")])
    with pytest.raises(RequestError, match="needs at least one tool"):
        ask([USER], tool_choice="any")
    with pytest.raises(RequestError, match="'other'"):
        ask([USER], tools=[WEATHER], tool_choice="other")
    with pytest.raises(RequestError, match="same name"):
        ask([USER], tools=[WEATHER, WEATHER])
    with pytest.raises(RequestError, match="robot"):
        ask([Message("robot", "x")])  # type: ignore[arg-type]
    assert ask([USER], tools=[WEATHER], tool_choice="none").tools == ()


def test_prompt_ids_are_those_of_the_prompt() -> None:
    assert chat("gemma3").prompt_ids([USER]) == list(chat("gemma3").prompt([USER]).token_ids)
    with_tool = chat("gemma4").prompt([USER], tools=[WEATHER], thinking=True).token_ids
    assert chat("gemma4").prompt_ids([USER], tools=[WEATHER], thinking=True) == list(with_tool)


def test_bundles_that_do_not_fit_their_kind() -> None:
    from types import SimpleNamespace
    from typing import cast

    from llm_gemma_coreml.bundle.manifest import Manifest
    from llm_gemma_coreml.chat.chat import Chat
    from llm_gemma_coreml.errors import BundleError

    good = chat("gemma3")
    for kind, named in (("gemma4", r"<channel\|>"), ("gemma9", "gemma9")):
        manifest = SimpleNamespace(**{**vars(good.manifest), "template_kind": kind})
        with pytest.raises(BundleError, match=named):
            Chat(good.folder, cast(Manifest, manifest))
