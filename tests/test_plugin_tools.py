"""Tools and schemas through llm: chains, parallel calls, failures, constrained answers."""

from __future__ import annotations

import json
from typing import Any

import llm
import pytest
from plugin_environment import register_plugin, run_llm
from scripted_llm import BASE, GEMMA4, SetScript, empty_log, llm_folder, script, scripted_bundles

__all__ = ["empty_log", "llm_folder", "script", "scripted_bundles"]

FUNCTIONS = """
def add(a: int, b: int) -> int:
    "Adds two numbers"
    return a + b

def shout(text: str) -> str:
    "Writes in capitals"
    return text.upper()
"""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.fixture(autouse=True)
def plugin() -> None:
    register_plugin()


def add(a: int, b: int) -> int:
    "Adds two numbers"
    return a + b


def call(name: str, arguments: str) -> str:
    """A call as Gemma 4 writes it."""
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|><|tool_response>"


def test_a_tool_chain_on_the_command_line(script: SetScript) -> None:
    script(
        ("17 and 25", call("add", "a:17,b:25")),
        ("42", "The sum is 42."),
    )
    result = run_llm("-m", GEMMA4, "--functions", FUNCTIONS, "Add 17 and 25")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sum is 42.\n"


def test_a_chain_of_two_calls(script: SetScript) -> None:
    script(
        ("first add", call("add", "a:1,b:2")),
        ("value:", call("shout", 'text:<|"|>three<|"|>')),
        ("THREE", "Done: THREE."),
    )
    result = run_llm("-m", GEMMA4, "--functions", FUNCTIONS, "Please first add, then shout", "--td")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("Done: THREE.\n")


def test_parts_of_a_call(script: SetScript) -> None:
    script(("Add", call("add", "a:1,b:2")))
    response = llm.get_model(GEMMA4).prompt("Add them", tools=[add])
    events = [(event.type, event.chunk) for event in response.stream_events()]
    assert ("tool_call_name", "add") in events
    assert [json.loads(chunk) for kind, chunk in events if kind == "tool_call_args"] == [{"a": 1, "b": 2}]
    (noted,) = response.tool_calls()
    assert (noted.name, noted.arguments) == ("add", {"a": 1, "b": 2})
    (part,) = response.messages()[0].parts
    assert (part.name, part.arguments, part.tool_call_id) == ("add", {"a": 1, "b": 2}, noted.tool_call_id)


def test_parallel_calls(script: SetScript) -> None:
    two = "<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_call>call:add{a:3,b:4}<tool_call|><|tool_response>"
    script(("Both", two), ("value:", "Three and seven."))
    seen: list[Any] = []
    chain = llm.get_model(GEMMA4).chain(
        "Both sums", tools=[add], after_call=lambda tool, tool_call, result: seen.append(result.output)
    )
    assert chain.text() == "Three and seven."
    assert seen == ["3", "7"]


async def test_async_chain(script: SetScript) -> None:
    script(("Add", call("add", "a:20,b:22")), ("value:", "It is 42."))

    async def slow_add(a: int, b: int) -> int:
        "Adds"
        return a + b

    chain = llm.get_async_model(GEMMA4).chain("Add them", tools=[llm.Tool.function(slow_add, name="add")])
    assert await chain.text() == "It is 42."


def test_a_failing_tool_is_told_to_the_model(script: SetScript) -> None:
    def fail(a: int) -> int:
        "Fails"
        raise ValueError("no luck today")

    script(("Try", call("fail", "a:1")), ("no luck today", "It failed."))
    assert llm.get_model(GEMMA4).chain("Try it", tools=[fail]).text() == "It failed."


def test_next_turn_of_a_chain_keeps_the_cache(script: SetScript) -> None:
    script(("Add", call("add", "a:1,b:2")), ("value:", "Three."))
    chain = llm.get_model(GEMMA4).chain("Add them up, please", tools=[add])
    chain.text()
    first, second = chain._responses
    # The empty thought block that ends a prompt is not part of the history that the template writes.
    assert second.usage().details["cached_tokens"] >= first.usage().input - 4


def test_tools_with_the_base_model(script: SetScript) -> None:
    script(
        ("17 and 25", 'Call: {"name": "add", "arguments": {"a": 17, "b": 25}}'),
        ("Result: 42", "Assistant: The sum is 42."),
    )
    result = run_llm("-m", BASE, "--functions", FUNCTIONS, "Add 17 and 25")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sum is 42.\n"


@pytest.mark.parametrize("model", [BASE, GEMMA4])
def test_schema(script: SetScript, model: str) -> None:
    answer = '{"name": "Ada", "age": 36}'
    script(("Ada", answer if model == GEMMA4 else " " + answer))
    result = run_llm("-m", model, "--schema", json.dumps(PERSON), "Ada is 36")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"name": "Ada", "age": 36}


def test_schema_multi(script: SetScript) -> None:
    script(("Ada", ' {"items": [{"name": "Ada", "age": 36}]}'))
    result = run_llm("-m", BASE, "--schema-multi", "name, age int", "Ada is 36")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"items": [{"name": "Ada", "age": 36}]}


def test_the_grammar_holds_whatever_the_model_wants(script: SetScript) -> None:
    schema = {"type": "object", "properties": {"ok": {"enum": ["yes"]}}, "required": ["ok"]}
    script(("Say", " I would rather not."))
    answer = llm.get_model(BASE).prompt("Say", schema=schema).text()
    assert json.loads(answer) == {"ok": "yes"}


def test_a_cut_off_answer_is_an_error(script: SetScript) -> None:
    script(("Ada", ' {"name": "Ada of the very long name","age":36}'))
    result = run_llm("-m", BASE, "--no-stream", "--schema", json.dumps(PERSON), "Ada", "-o", "max_tokens", "6")
    assert result.exit_code == 1
    assert "max_tokens" in result.stderr
    assert result.stdout == ""


def test_a_schema_that_cannot_be_is_one_line(script: SetScript) -> None:
    result = run_llm("-m", BASE, "--schema", '{"type": "nonsense"}', "Ada")
    assert result.exit_code == 1
    assert "schema" in result.stderr.lower()
    assert "Traceback" not in result.output


def test_schema_and_tools_in_one_chain(script: SetScript) -> None:
    script(("Ada", call("add", "a:30,b:6")), ("value:", '{"name": "Ada", "age": 36}'))
    chain = llm.get_model(GEMMA4).conversation().chain("How old is Ada?", tools=[add], schema=PERSON)
    assert json.loads(chain.text().strip()) == {"name": "Ada", "age": 36}


def test_without_llguidance_the_error_names_the_extra(script: SetScript, monkeypatch: Any) -> None:
    import sys

    from llm_gemma_coreml import loaded

    loaded.unload_all()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(llm.ModelError, match=r"llm-gemma-coreml\[structured\]"):
        llm.get_model(BASE).prompt("Ada", schema=PERSON).text()
