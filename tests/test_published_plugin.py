"""A published bundle as users meet it: installed from a folder, listed, described, asked, checked, with llm's commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_environment import run_llm
from support import published_bundle as published

from llm_gemma_coreml import loaded

NAME = "gemma-4-12b-it-coreml-128k"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published.write_published(tmp_path_factory.mktemp("published") / "downloaded").path


@pytest.fixture(autouse=True)
def installed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    result = run_llm("gemma-coreml", "install", str(source), "--name", NAME)
    assert (result.exit_code, result.stdout) == (0, f"coreml/{NAME}\n"), result.output
    yield
    loaded.unload_all()


def ask(*options: str, prompt: str = "hat than the") -> str:
    """The answer of at most 12 tokens."""
    result = run_llm("-m", "gemma4-local", prompt, "-o", "max_tokens", "12", *options)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*options: str) -> str:
    result = run_llm("-m", "gemma4-local", "hat", *options)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.output
    return result.stderr


def test_it_is_listed_under_the_alias() -> None:
    listed = run_llm("gemma-coreml", "models").stdout
    assert f"coreml/{NAME}, gemma4-local: " in listed
    assert f"\n{NAME}: " not in listed  # not among those that can be installed


def test_info_names_both_modes_and_what_is_missing() -> None:
    text = run_llm("gemma-coreml", "info", NAME).stdout
    for told in ("layout published", "ctx32k, ctx128k", "-o ring exact (default)", "-o ring as-published", "-o drafting"):
        assert told in text
    facts = json.loads(run_llm("gemma-coreml", "info", NAME, "--json").stdout)
    assert any("no sampling" in note for note in facts["notes"])


def test_it_answers_and_the_modes_part_beyond_the_ring() -> None:
    answer = ask()
    assert ask("-o", "ring", "exact") == answer
    assert ask("-o", "drafting", "as-published") == answer
    long = "the hat and the other that " * 6
    assert ask(prompt=long) != ask("-o", "ring", "as-published", prompt=long)


def test_a_conversation_and_a_tool_that_may_be_called() -> None:
    ask()
    result = run_llm("-c", "and the other", "-o", "max_tokens", "5")
    assert result.exit_code == 0, result.output
    function = "def add(a: int, b: int) -> int:\n    'Adds'\n    return a + b"
    assert run_llm("-m", "gemma4-local", "add", "--functions", function, "-o", "max_tokens", "5").exit_code == 0


def test_what_needs_logits_is_refused() -> None:
    told = "gives only the most likely token, no logits, and "
    assert f"{told}drawing at temperature 0.5 needs them. Use temperature 0" in refusal("-o", "temperature", "0.5")
    assert f"{told}a repetition penalty" in refusal("-o", "repetition_penalty", "1.1")
    assert f"{told}keeping to a JSON schema" in refusal("--schema", "name str")
    assert "llm gemma-coreml convert" in refusal("--schema", "name str")


def test_unknown_modes_are_refused() -> None:
    assert "Input should be 'exact' or 'as-published'" in refusal("-o", "ring", "fast")
    assert "Input should be 'transformers' or 'as-published'" in refusal("-o", "drafting", "fast")


def test_verify_passes_and_finds_a_changed_file(tmp_path: Path) -> None:
    result = run_llm("gemma-coreml", "verify", NAME)
    assert result.exit_code == 0, result.output
    assert "speculative = plain, greedy" in result.stdout
    assert "sampler" not in result.stdout
    table = tmp_path / "gemma-coreml" / NAME / "embed_fp16.bin"
    changed = bytearray(table.read_bytes())
    changed[0] ^= 1
    os.unlink(table)  # a hard link: the source must stay whole
    table.write_bytes(changed)
    result = run_llm("gemma-coreml", "verify", NAME)
    assert result.exit_code == 1
    assert "embed_fp16.bin" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere"),
        ((".", "--name", "../x"), "cannot be the name of a bundle"),
        (("empty", "--name", "x"), "manifest.json cannot be used: it cannot be read"),
    ],
)
def test_folders_that_cannot_be_installed(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    result = run_llm("gemma-coreml", "install", *arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.output
