"""The engine over the scripted runtime, with a real tokenizer: what other tests build on gives what the script says."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import scripted
from support.gemma4_tokenizer import gemma3_model

from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.engine.engine import Engine
from llm_gemma_coreml.engine.request import GenerationRequest
from llm_gemma_coreml.errors import GemmaCoreMLError

REPLY = "The cat sat on the mat. The cat sat on the mat. The cat sat on the hat. 🙂"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(gemma3_model())


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Engine, scripted.Script]]:
    script = scripted.write_scripted_bundle(tmp_path / "bundle", [REPLY, "Yes."], tokenizer=gemma3_model())
    with scripted.installed(), Engine.open(tmp_path / "bundle") as engine:
        yield engine, script


def ask(engine: Engine, ids: list[int], speculate: Any) -> tuple[list[int], Any]:
    request = GenerationRequest(tuple(ids), stop_ids=frozenset(engine.manifest.stop_ids), speculate=speculate)
    stream = engine.generate(request)
    return list(chain.from_iterable(stream)), stream.statistics


@pytest.mark.parametrize("speculate", ["off", "auto", 7])
def test_the_engine_says_what_the_script_says(
    opened: tuple[Engine, scripted.Script], tokenizer: Tokenizer, speculate: Any
) -> None:
    engine, script = opened
    prompt = [2, *tokenizer.encode_text("Where did the cat sit? " * 40)]  # more than a block and a window
    answer, statistics = ask(engine, prompt, speculate)
    assert answer == tokenizer.encode_text(REPLY)
    assert (statistics.finish_reason, statistics.stop_id) == ("stop", script.end)
    if speculate == 7:
        assert sum(counts.accepted for counts in statistics.drafters.values()) > 0
    following = [*prompt, *answer, *tokenizer.encode_text("\nReally? Tell me once more, in one word only.")]
    answer, statistics = ask(engine, following, speculate)
    assert answer == tokenizer.encode_text("Yes.")
    assert statistics.cached_tokens >= len(prompt) - 1
    assert script.prompts == [tuple(prompt), tuple(following)]


def test_a_script_that_has_ended_is_an_error(opened: tuple[Engine, scripted.Script]) -> None:
    engine, script = opened
    script.replies = []
    with pytest.raises(GemmaCoreMLError, match="one request more"):
        ask(engine, [2, 5, 6], "off")
