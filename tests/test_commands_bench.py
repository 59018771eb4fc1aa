"""The benchmark's arithmetic and its processes, with times that are made up; the command over a scripted bundle."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from made_up_side import MadeUp
from plugin_environment import ChildLlm, run_llm
from scripted_llm import empty_log, llm_folder, script, scripted_bundles, write_base_bundle

from llm_gemma_coreml.benchmark import llamacpp, report
from llm_gemma_coreml.benchmark.run import Plan, measure
from llm_gemma_coreml.benchmark.side import BenchmarkError, SideProcess, process_memory, random_tokens

__all__ = ["empty_log", "llm_folder", "script", "scripted_bundles"]
PLAN = Plan(prefills=(64,), depths=(8, 32), rows=(1, 4), repeats=2, calls=3)


@pytest.fixture
def figures() -> dict[str, Any]:
    return measure({"fast": MadeUp(0.001), "slow": MadeUp(0.002)}, PLAN)


def test_medians_leave_the_first_call_out(figures: dict[str, Any]) -> None:
    fast = figures["sides"]["fast"]
    assert fast["prefill"] == {64: 1000.0}
    assert fast["decode"] == {8: 1000.0, 32: 1000.0}
    assert fast["calls"] == {8: {1: 1.0, 4: 4.0}, 32: {1: 1.0, 4: 4.0}}
    assert fast["spread"][8][1] == 0


def test_ratios_say_how_much_faster(figures: dict[str, Any]) -> None:
    fast, slow = figures["sides"].values()
    ratios = report.ratios(fast, slow)
    assert ratios["prefill"] == {64: 2.0}
    assert ratios["calls"][32] == {1: 2.0, 4: 2.0}
    assert ratios["memory"] == {"rss": 0.5}
    assert report.ratios(slow, fast)["calls"][8][1] == 0.5


def test_sides_take_turns() -> None:
    log: list[tuple[str, str, int]] = []
    measure({"a": MadeUp(0.001, log, "a"), "b": MadeUp(0.001, log, "b")}, PLAN)
    for rows in PLAN.rows:
        order = [name for name, what, count in log if (what, count) == ("calls", rows)]
        assert order == ["a", "b", "b", "a"] * len(PLAN.depths)


def test_progress_ends_at_its_total() -> None:
    told: list[tuple[str, int, int]] = []
    measure({"a": MadeUp(0.001)}, PLAN, lambda *step: told.append(step))
    assert told[-1][1] == told[-1][2]
    assert all(earlier[1] < later[1] for earlier, later in itertools.pairwise(told))


def test_the_table_has_all_figures(figures: dict[str, Any]) -> None:
    figures["ratios"] = report.ratios(*figures["sides"].values())
    text = report.render(figures)
    for part in ("fast", "slow", "ratio", "prefill 64", "4 rows at 32", "8.00 ms", "2.00x", "load", "memory (rss)"):
        assert part in text
    json.dumps(figures)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture(figures: dict[str, Any], tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"speed.{ending}"
    report.draw(figures, path)
    assert path.stat().st_size > 5000


def side(*arguments: str) -> SideProcess:
    return SideProcess("made up", "made_up_side", arguments)


def test_a_side_in_a_process() -> None:
    with side() as process:
        assert process.load() == 0.5
        assert process.prefill(10) == pytest.approx(0.01)
        assert process.calls(2, 3) == [99.0, 0.002, 0.002]
        assert process.memory() == {"rss": 1_000_000}


@pytest.mark.parametrize(("how", "said"), [("cannot-load", "no such model"), ("dies", "the last words")])
def test_a_side_that_fails_tells_why(how: str, said: str) -> None:
    with side(how) as process, pytest.raises(BenchmarkError, match=said):
        process.load()


def test_tokens_are_the_same_for_all_and_scattered() -> None:
    tokens = random_tokens(0, 1000, 262144)
    assert tokens[100:200] == random_tokens(100, 100, 262144)
    assert len(set(tokens)) > 990
    assert all(500 <= token < 262144 for token in tokens)


def test_memory_is_measured() -> None:
    memory = process_memory()
    assert memory["peak"] > 10_000_000


def test_a_directory_without_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="holds no libllama"):
        llamacpp.open_library(tmp_path)
    (tmp_path / "libllama.so").write_text("not a library")
    with pytest.raises(BenchmarkError, match="cannot be used"):
        llamacpp.open_library(tmp_path)


class Defaults:
    """A library whose context parameters are as given."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def llama_context_default_params(self) -> Any:
        return llamacpp._Parameters.from_buffer_copy(self.data.ljust(llamacpp._PARAMETER_BYTES, b"\0"))


def test_context_parameters_change_only_what_is_meant() -> None:
    head = b"".join(value.to_bytes(4, "little") for value in (512, 2048, 512, 1))
    known = head.ljust(120, b"\0") + bytes([0, 1, 1, 1, 1, 0])
    changed = bytes(llamacpp.context_parameters(Defaults(known), 9000).data)  # type: ignore[arg-type]
    assert int.from_bytes(changed[:4], "little") == 9000
    assert changed[120:126] == bytes([0, 1, 1, 1, 0, 0])
    with pytest.raises(BenchmarkError, match="other context parameters"):
        llamacpp.context_parameters(Defaults(b"\1" + known), 9000)  # type: ignore[arg-type]
    with pytest.raises(BenchmarkError, match="not where they were"):
        llamacpp.context_parameters(Defaults(head), 9000)  # type: ignore[arg-type]


def test_the_command_over_a_bundle(llm_folder: Path) -> None:
    write_base_bundle(llm_folder / "gemma-coreml" / "measured", [""] * 50)
    child = ChildLlm(llm_folder, runtime_plugin="support.scripted")
    few = ["--contexts", "8", "--prefills", "16", "--rows", "1,2", "--repeats", "1"]
    done = child.run("gemma-coreml", "bench", "measured", "--json", *few)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["sides"]["measured"]
    assert set(figures["calls"]["8"]) == {"1", "2"}
    assert figures["prefill"]["16"] > 0


def test_against_needs_to_know_where(script: object) -> None:
    result = run_llm("gemma-coreml", "bench", "base", "--against", "llama.cpp")
    assert result.exit_code == 2
    assert "--llama-cpp" in result.stderr
