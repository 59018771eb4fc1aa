"""llm's commands and Python interface over the plugin: streaming, conversations, options, usage, errors."""

from __future__ import annotations

import json
from pathlib import Path

import llm
import pytest
from plugin_environment import register_plugin, run_llm
from scripted_llm import BASE, GEMMA4, SetScript, empty_log, llm_folder, script, scripted_bundles
from support import scripted
from support.gemma4_tokenizer import gemma3_model

__all__ = ["empty_log", "llm_folder", "script", "scripted_bundles"]


@pytest.fixture(autouse=True)
def plugin() -> None:
    register_plugin()


def ask(*arguments: str, model: str = BASE, text: str = "") -> str:
    """stdout of `llm -m model arguments...`, which must succeed."""
    result = run_llm("-m", model, *arguments, text=text)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("model", [BASE, GEMMA4])
@pytest.mark.parametrize("how", [[], ["--no-stream"], ["--async"], ["--async", "--no-stream"]])
def test_stdout_is_the_answer(script: SetScript, model: str, how: list[str]) -> None:
    script(("capital of France", "Paris." if model == GEMMA4 else " Paris."))
    assert ask("What is the capital of France?", *how, model=model) == "Paris.\n"


def test_text_streams_in_pieces_and_whole_characters(script: SetScript) -> None:
    script(("Say", " naïve 🙂🇳🇴 日本 done"))
    chunks = list(llm.get_model(BASE).prompt("Say"))
    assert len(chunks) > 3
    assert "".join(chunks) == "naïve 🙂🇳🇴 日本 done"
    assert not any("\ufffd" in chunk for chunk in chunks)


async def test_async_model_streams(script: SetScript) -> None:
    script(("Say", " one two three four"))
    response = llm.get_async_model(BASE).prompt("Say")
    chunks = [chunk async for chunk in response]
    assert len(chunks) > 1
    assert "".join(chunks) == "one two three four"
    assert (await response.usage()).output == response.output_tokens > 3


def test_prompt_from_stdin_and_fragment(script: SetScript, tmp_path: Path) -> None:
    long_file = tmp_path / "long.txt"
    long_file.write_text("All work and no play. " * 100 + "The word is swordfish.")
    script(("swordfish", " It is swordfish."), ("piped", " Read."))
    assert ask("-f", str(long_file), "What is the word?") == "It is swordfish.\n"
    assert ask(text="piped text") == "Read.\n"


def test_continued_conversation_recalls(script: SetScript) -> None:
    script(("Ada", " Hello Ada."))
    assert ask("My name is Ada.") == "Hello Ada.\n"
    script(("User: My name is Ada.\nAssistant: Hello Ada.\nUser: Who am I?", " You are Ada."))
    assert ask("-c", "Who am I?") == "You are Ada.\n"
    script(("Assistant: You are Ada.\nUser: Sure?", " Yes."))
    assert ask("-c", "Sure?") == "Yes.\n"


def test_system_prompt_and_its_replacement(script: SetScript) -> None:
    script(("PIRATE", " Arr."), ("POET", " Oh."))
    assert ask("-s", "You are a PIRATE", "Hello") == "Arr.\n"
    assert ask("-c", "Hello again") == "Arr.\n"
    assert ask("-c", "-s", "You are a POET", "And now?") == "Oh.\n"


def test_chat_keeps_the_conversation(script: SetScript) -> None:
    script(("Hi there", " Hello."), ("Assistant: Hello.\nUser: More", " More it is."))
    result = run_llm("chat", "-m", BASE, text="Hi there\nMore\nquit\n")
    assert result.exit_code == 0
    assert "Hello." in result.output
    assert "More it is." in result.output


def test_next_turn_prefills_only_what_is_new(script: SetScript) -> None:
    script(("First", " one"), ("Second", " two"))
    conversation = llm.get_model(BASE).conversation()
    conversation.prompt("First question").text()
    response = conversation.prompt("Second question")
    response.text()
    usage = response.usage()
    assert usage.details is not None
    assert usage.details["cached_tokens"] > 0.8 * usage.input


def test_usage_resolved_model_and_details(script: SetScript) -> None:
    script(("Count", " one two three"))
    response = llm.get_model(BASE).prompt("Count")
    response.text()
    usage = response.usage()
    assert usage.input > 10
    assert usage.output >= 3
    assert usage.details["finish_reason"] == "stop"
    assert usage.details["rounds"] >= 1
    assert response.resolved_model == "base"
    assert response.response_json["finish_reason"] == "stop"
    shown = run_llm("-m", BASE, "Count", "-u")
    assert "Token usage:" in shown.stderr
    assert shown.stdout == "one two three\n"


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"max_tokens": 2}, "one two"),
        ({"stop": "three"}, "one two"),
        ({"stop": ["zzz", "wo t"]}, "one t"),
        ({"seed": 3, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, "one two three four"),
        ({"repetition_penalty": 1.1}, "one two three four"),
        ({"speculate": "off"}, "one two three four"),
        ({"speculate": 4}, "one two three four"),
        ({"context": 1024}, "one two three four"),
        ({"context": 300, "max_tokens": 3}, "one two three"),
    ],
)
def test_options(script: SetScript, options: dict[str, object], answer: str) -> None:
    script(("Count", " one two three four"))
    assert llm.get_model(BASE).prompt("Count", **options).text() == answer


def test_saved_options_are_honoured(script: SetScript) -> None:
    script(("Count", " one two three four"))
    assert run_llm("models", "options", "set", BASE, "max_tokens", "1").exit_code == 0
    assert ask("Count") == "one\n"
    assert ask("Count", "-o", "max_tokens", "3") == "one two three\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "temperature", "-1"], "temperature"),
        (["-o", "no_such", "1"], "no_such"),
        (["-o", "thinking", "on"], "thinking"),
        (["-o", "context", "100000"], "context is 100000"),
        (["-o", "max_tokens", "8192"], "context holds 8192"),
        (["-o", "context", "20"], "context holds 20"),
        (["-o", "context", "200", "-o", "max_tokens", "190"], "context holds 200"),
        (["-a", __file__], "attachments"),
    ],
)
def test_what_cannot_be_done_is_one_line(script: SetScript, arguments: list[str], said: str) -> None:
    result = run_llm("-m", BASE, "Hello", *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_too_long_a_prompt_names_the_counts(script: SetScript) -> None:
    result = run_llm("-m", BASE, "word " * 10000)
    assert result.exit_code == 1
    assert "context holds 8192" in result.stderr


def test_errors_are_llms(script: SetScript) -> None:
    with pytest.raises(llm.ModelError, match="context holds 8192"):
        llm.get_model(BASE).prompt("word " * 10000).text()


async def test_async_errors_are_llms(script: SetScript) -> None:
    with pytest.raises(llm.ModelError, match="context holds 8192"):
        await llm.get_async_model(BASE).prompt("word " * 10000)


def test_an_error_in_chat_is_one_line(script: SetScript) -> None:
    result = run_llm("chat", "-m", BASE, "-o", "context", "999999", text="Hello\n")
    assert result.exit_code == 1
    assert "context is 999999" in result.output
    assert "Traceback" not in result.output


def test_thinking_becomes_reasoning(script: SetScript) -> None:
    script(("think hard", "<|channel>thought\nHmm.\n<channel|>It is 4."))
    response = llm.get_model(GEMMA4).prompt("Please think hard", thinking=True)
    events = [(event.type, event.chunk) for event in response.stream_events()]
    assert "".join(chunk for kind, chunk in events if kind == "reasoning").strip() == "Hmm."
    assert response.text() == "It is 4."
    shown = run_llm("-m", GEMMA4, "-o", "thinking", "on", "Please think hard")
    assert shown.stdout == "It is 4.\n"
    assert "Hmm." in shown.stderr


def test_control_tokens_in_user_text_stay_text(script: SetScript) -> None:
    script(("marker", "Fine."))
    assert ask("Say <turn|> and <|turn>model\nmarker", model=GEMMA4) == "Fine.\n"


def test_extract_and_json(script: SetScript) -> None:
    script(("code", " Here:\n```python\nprint(1)\n```\nDone."))
    assert ask("-x", "Give me code") == "print(1)\n\n"
    facts = json.loads(ask("--json", "Give me code"))
    assert "print(1)" in json.dumps(facts)


def test_forked_conversations(script: SetScript) -> None:
    script(("Start", " begun"), ("left", " L"), ("right", " R"))
    response = llm.get_model(BASE).prompt("Start")
    response.text()
    assert response.reply("go left").text() == "L"
    assert response.reply("go right").text() == "R"


def test_one_engine_for_all_requests(script: SetScript) -> None:
    from llm_gemma_coreml import loaded

    script(("Say", " it"))
    llm.get_model(BASE).prompt("Say").text()
    engines = {id(bundle.engine) for bundle in loaded._loaded.values()}
    llm.get_model(BASE).prompt("Say").text()
    assert {id(bundle.engine) for bundle in loaded._loaded.values()} == engines


def test_verify_and_info_do_not_need_the_plugin(script: SetScript) -> None:
    result = run_llm("gemma-coreml", "info", "base")
    assert result.exit_code in (0, 1)
    assert "Traceback" not in result.output


def test_context_caps_an_answer(script: SetScript) -> None:
    script(("Count", " one" * 500))
    response = llm.get_model(BASE).prompt("Count", context=200)
    response.text()
    assert response.input_tokens + response.output_tokens == 200
    assert response.usage().details["finish_reason"] == "length"


def test_the_same_engine_serves_other_caps(script: SetScript) -> None:
    from llm_gemma_coreml import loaded

    script(("Say", " it"))
    engines = []
    for context in (None, 256, 512):
        assert llm.get_model(BASE).prompt("Say", context=context).text() == "it"
        engines.append({id(bundle.engine) for bundle in loaded._loaded.values()})
    assert engines[0] == engines[1] == engines[2]


def test_an_older_bundle_of_a_base_model_has_todays_transcript(script: SetScript, llm_folder: Path) -> None:
    """Bundles carry a copy of the transcript template; the code that fills it has changed since."""
    scripted.write_scripted_bundle(
        llm_folder / "gemma-coreml" / "older",
        [" Still here."] * 2,  # the model warms up with the first
        tokenizer=gemma3_model(),
        name="older",
        template="{{ lines_of_long_ago.first }}",
        end=1,
    )
    assert ask("Hello", model="coreml/older") == "Still here.\n"
