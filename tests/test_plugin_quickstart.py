"""The real quick-start model through llm's commands: right values, a tool's result in the answer, drafts that change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_environment import register_plugin, run_llm
from test_chat_quickstart import PARAGRAPHS, PERSON

MODEL = "gemma3-local"
FUNCTIONS = '''
def multiply(a: int, b: int) -> int:
    "Multiply two numbers."
    return a * b
'''


@pytest.fixture(scope="module", autouse=True)
def user_folder(quickstart_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """llm's folder with the real bundle in it; the engine stays open for all tests of this module."""
    from llm_gemma_coreml import loaded

    folder = tmp_path_factory.mktemp("llm")
    (folder / "gemma-coreml").mkdir()
    (folder / "gemma-coreml" / quickstart_bundle.name).symlink_to(quickstart_bundle, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_USER_PATH", str(folder))
        register_plugin()
        yield folder
    loaded.unload_all()


def ask(*arguments: str) -> str:
    result = run_llm("-m", MODEL, *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.mark.parametrize(("paragraph", "expected"), PARAGRAPHS)
def test_extraction_with_a_schema(paragraph: str, expected: tuple[str, int, str]) -> None:
    found = json.loads(ask("--schema", json.dumps(PERSON), paragraph))
    assert found["name"].startswith(expected[0])
    assert (found["age"], found["city"]) == expected[1:]


@pytest.mark.parametrize(("question", "product"), [("What is 123 times 456?", "56088"), ("What is 31 multiplied by 27?", "837")])
def test_the_result_of_a_real_function_is_in_the_answer(question: str, product: str) -> None:
    assert product in ask("--functions", FUNCTIONS, question)
    assert product not in question


PROMPTS = [
    "Write down the numbers from one to thirty, separated by commas.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Tell me something about rivers.",
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sampling", [["-o", "temperature", "0"], ["-o", "temperature", "0.8", "-o", "seed", "11"]])
def test_drafts_change_no_byte(prompt: str, sampling: list[str]) -> None:
    plain, *others = (
        ask(prompt, *sampling, "-o", "max_tokens", "60", "-o", "speculate", way).encode() for way in ("off", "auto", "3", "7")
    )
    assert len(plain) > 1
    assert others == [plain] * 3


def test_the_next_turn_knows_the_first() -> None:
    ask("The password is swordfish.")
    continued = run_llm("-c", "What is the password?").stdout
    assert "swordfish" in continued
    assert "swordfish" not in ask("What is the password?")
