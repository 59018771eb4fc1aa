"""The benchmark of speculation with another program beside ours: made up, and llama.cpp's libraries where they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plugin_environment import run_llm
from scripted_llm import empty_log, llm_folder, script, scripted_bundles

from llm_gemma_coreml.benchmark import llamacpp, speculation
from llm_gemma_coreml.benchmark.llamacpp_lookup import LlamaCppLookup, LookupProcess, NgramDrafts
from llm_gemma_coreml.benchmark.side import BenchmarkError, Continuation
from llm_gemma_coreml.benchmark.speculation_prompts import Case

__all__ = ["empty_log", "llm_folder", "script", "scripted_bundles"]
TEXT = list(range(100, 196))


class MadeUp:
    """Continues everything by `tokens`, at two speeds. Records its turns."""

    def __init__(self, name: str, plain: float, drafting: float, log: list[tuple[str, bool]], tokens: list[int]) -> None:
        self.name, self.seconds, self.log, self.tokens = name, {False: plain, True: drafting}, log, tokens

    def __call__(self, ids: Sequence[int], drafting: bool, count: int, stop_ids: Sequence[int]) -> Continuation:
        self.log.append((self.name, drafting))
        rounds = 19 if drafting else 95
        return Continuation(self.tokens, self.seconds[drafting], rounds, 80, 76)


def measured(theirs: list[int]) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    log: list[tuple[str, bool]] = []
    sides: dict[str, speculation.Continue] = {
        speculation.OURS: MadeUp("ours", 0.95, 0.475, log, TEXT),
        speculation.RIVAL: MadeUp("theirs", 1.9, 0.475, log, theirs),
    }
    return speculation._measure(sides, Case("prose", "text"), (2, 5), 2, 96, [1]), log


def test_sides_and_pairs_take_turns() -> None:
    _, log = measured(TEXT)
    pairs = [(log[at][0], log[at][1], log[at + 1][1]) for at in range(0, len(log), 2)]
    assert pairs[:4] == [
        ("ours", True, False),
        ("theirs", True, False),
        ("theirs", False, True),
        ("ours", False, True),
    ]
    assert len(pairs) == 6


def test_each_side_is_held_against_its_own_plain_decoding() -> None:
    result, _ = measured(TEXT)
    assert result["plain_tokens_per_second"] == 100
    assert result["speedups"] == [2.0, 2.0]
    theirs = result[speculation.RIVAL]
    assert theirs["plain_tokens_per_second"] == 50
    assert theirs["speedups"] == [4.0, 4.0]
    assert theirs["tokens_per_round"] == 5.0
    text = speculation.render({"kinds": speculation._by_kind([result]), "repeats": 2})
    lines = [line.split() for line in text.splitlines()]
    assert ["free", "prose", "ours", "5.00", "2.00x", "100.0", "200.0"] in lines
    assert ["free", "prose", "llama.cpp", "5.00", "4.00x", "50.0", "200.0"] in lines


@pytest.mark.parametrize("theirs", [[7] * 96, TEXT[:3]], ids=["a loop", "too short"])
def test_a_loop_on_either_side_stays_out_of_the_headline(theirs: list[int]) -> None:
    result, _ = measured(theirs)
    assert set(speculation._by_kind([result])) == {"prose, degenerate"}


class Scripted(LlamaCppLookup):
    """The real loop over a model that counts upwards, and drafts of which the third is wrong."""

    def __init__(self) -> None:
        super().__init__(Path(), Path(), 1, 64, 12, 48)
        self.held: list[int] = []
        self._drafts: Any = self

    def reset(self, tokens: Sequence[int]) -> None:
        self.known = list(tokens)

    def append(self, token: int) -> None:
        self.known.append(token)

    def after(self, token: int) -> list[int]:
        assert [*self.known, token] == list(range(token + 1))
        return [token + 1, token + 2, 0, token + 4]

    def _forget(self) -> None:
        self.held, self._position = [], 0

    def _rewind(self, position: int) -> None:
        self.held, self._position = self.held[:position], position

    def _decode(self, tokens: Sequence[int], all_logits: bool) -> float:
        self.held += tokens
        self._position, self._rows = len(self.held), list(tokens)
        return 0.0

    def _choice(self, row: int) -> int:
        return self._rows[row] + 1


@pytest.mark.parametrize("count", range(1, 12))
def test_the_loop_accepts_what_the_model_chooses_and_no_more(count: int) -> None:
    side = Scripted()
    plain, drafting = (side.generate([0, 1, 2], mode, count, [99]) for mode in (False, True))
    assert plain["tokens"] == drafting["tokens"] == list(range(3, 3 + count))
    assert plain["rounds"] == count - 1
    assert drafting["rounds"] == (count + 1) // 3
    assert side.held == list(range(len(side.held)))


def test_the_loop_ends_before_a_stop_id() -> None:
    side = Scripted()
    for stop in (3, 4, 5, 6, 7):
        tokens = [side.generate([0, 1, 2], mode, 20, [stop])["tokens"] for mode in (False, True)]
        assert tokens == [list(range(3, stop))] * 2


def test_a_library_without_the_function(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="holds no libllama-common"):
        NgramDrafts(tmp_path, 12, 48, 100)
    (tmp_path / "libllama-common.so").write_text("not a library")
    with pytest.raises(BenchmarkError, match="does not offer prompt lookup"):
        NgramDrafts(tmp_path, 12, 48, 100)
    source = next((Path(path) for path in ("/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6") if Path(path).exists()), None)
    if source is not None:
        (tmp_path / "libllama-common.so").unlink()
        (tmp_path / "libllama-common.so").symlink_to(source)
        with pytest.raises(BenchmarkError, match="common_ngram_simple_draft"):
            NgramDrafts(tmp_path, 12, 48, 100)


def test_against_with_speculation_needs_to_know_where(script: object) -> None:
    result = run_llm("gemma-coreml", "bench", "base", "--speculation", "--against", "llama.cpp")
    assert result.exit_code == 2
    assert "--llama-cpp" in result.stderr


@pytest.fixture
def libraries() -> Path:
    folder = os.environ.get("LLAMA_CPP_LIBRARIES")
    if not folder or not list(Path(folder).glob("libllama-common*")):
        pytest.skip("LLAMA_CPP_LIBRARIES does not name a folder with llama.cpp's shared libraries")
    return Path(folder)


def test_drafts_of_the_real_library(libraries: Path) -> None:
    llamacpp.open_library(libraries)
    drafts = NgramDrafts(libraries, 3, 5, room=64)
    drafts.reset([9, *range(20, 40), 20, 21])
    assert drafts.after(22) == [23, 24, 25, 26, 27]
    assert drafts.after(30) == []
    drafts.append(22)
    assert drafts.after(23) == [24, 25, 26, 27, 28]


def test_the_real_library_continues_alike_with_drafts(libraries: Path) -> None:
    model = os.environ.get("LLAMA_CPP_GGUF")
    if not model:
        pytest.skip("LLAMA_CPP_GGUF does not name a model file")
    ids = [2, *list(range(5000, 5040)) * 3]
    arguments = [str(libraries), model, "1", "256", "3", "8"]
    with LookupProcess("llama.cpp", "llm_gemma_coreml.benchmark.llamacpp_lookup", arguments) as process:
        process.load()
        plain, drafting = (process.continuation(ids, mode, 32, [1]) for mode in (False, True))
    assert plain.tokens == drafting.tokens
    assert drafting.rounds < plain.rounds == len(plain.tokens) - 1
