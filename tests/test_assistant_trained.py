"""A trained pair: the assistant's drafts are mostly right, the text is that of plain decoding, and failures do no harm."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_environment import run_llm
from support.sessions import open_runner
from support.trained_pair import MadeUpText, TrainedPair, trained_pair

from llm_gemma_coreml.bundle.store import FOLDER
from llm_gemma_coreml.convert.build import build_bundle
from llm_gemma_coreml.drafting.assistant import AssistantFactory
from llm_gemma_coreml.drafting.base import DrafterFactory
from llm_gemma_coreml.drafting.prompt_lookup import PromptLookupFactory
from llm_gemma_coreml.engine.cost_model import CallCosts
from llm_gemma_coreml.engine.decoding import Decoding
from llm_gemma_coreml.engine.gate_runs import Output, RecordedSession, plain
from llm_gemma_coreml.engine.model_runner import ModelRunner
from llm_gemma_coreml.engine.request import GenerationRequest, GenerationStatistics, SamplingParameters, Speculate
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.errors import GemmaCoreMLError

COUNT = 260
"""Tokens after a prompt of PROMPT: over the window, the wrap of the ring at 256 and a promotion."""
PROMPT = tuple(MadeUpText(99).ids(60))
GREEDY, SAMPLED = SamplingParameters(), SamplingParameters(temperature=1.0, seed=3)
BOTH = (PromptLookupFactory(), AssistantFactory())


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> TrainedPair:
    return trained_pair(request.config)


@pytest.fixture(scope="module")
def bundle(pair: TrainedPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    return build_bundle(
        pair.target, "pair", 8, (256, 512), (1, 2, 4, 8, 128), folder=folder, drafter=pair.assistant, layers_per_package=3
    )


@pytest.fixture
def runner(bundle: Path) -> ModelRunner:
    return open_runner(bundle)


def decode(
    runner: ModelRunner,
    factories: Sequence[DrafterFactory],
    speculate: Speculate,
    sampling: SamplingParameters = GREEDY,
    count: int = COUNT,
    before_round: Callable[[int], None] = lambda number: None,
) -> tuple[Output, GenerationStatistics]:
    """The output of the decoding loop that answers requests, and its statistics."""
    session = RecordedSession(Session(runner))
    speculator = Speculator(session, runner.manifest.vocabulary_size, CallCosts(runner.verify_widths), factories)
    statistics = GenerationStatistics()
    request = GenerationRequest(PROMPT, count, sampling=sampling, speculate=speculate)
    tokens: list[int] = []
    for number, part in enumerate(Decoding(session, request, speculator, statistics).run()):
        tokens += part
        before_round(number)
    return Output(tuple(tokens), tuple(session.rows)), statistics


def expected(runner: ModelRunner, sampling: SamplingParameters = GREEDY, count: int = COUNT) -> Output:
    """Plain decoding, one row a call, from the definition."""
    session = Session(runner)
    session.extend(PROMPT[:-1])
    return plain(session, PROMPT[-1], count, sampling)


def assert_same(found: Output, wanted: Output) -> None:
    """The same tokens, and after each of them the same logits, bit for bit."""
    assert found.tokens == wanted.tokens
    assert found.rows == wanted.rows[: len(found.rows)]
    assert len(found.rows) >= len(wanted.rows) - 1


@pytest.mark.parametrize("speculate", [3, 7])
def test_most_drafts_are_right_and_the_text_is_plain(runner: ModelRunner, speculate: int) -> None:
    found, statistics = decode(runner, [AssistantFactory()], speculate)
    assert_same(found, expected(runner))
    counts = statistics.drafters["assistant"]
    assert statistics.warnings == []
    assert counts.accepted / counts.drafted > 0.5
    assert COUNT / statistics.rounds > 2
    assert statistics.promotions == 1


def test_sampled_text_is_plain_too(runner: ModelRunner) -> None:
    found, statistics = decode(runner, [AssistantFactory()], 3, SAMPLED)
    assert_same(found, expected(runner, SAMPLED))
    counts = statistics.drafters["assistant"]
    assert counts.accepted / counts.drafted > 0.5
    assert COUNT / statistics.rounds > 2


@pytest.mark.parametrize("speculate", ["auto", 4])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prompt_lookup_and_assistant_together(
    runner: ModelRunner, sampling: SamplingParameters, speculate: Speculate
) -> None:
    found, statistics = decode(runner, BOTH, speculate, sampling)
    assert_same(found, expected(runner, sampling))
    assert statistics.warnings == []
    if speculate == 4:
        assert statistics.as_dict()["drafters"]["assistant"]["accepted"] > 0  # type: ignore[index]


def test_wrong_drafts_give_the_same_text(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the drafter is handed matters: with another token its drafts are mostly wrong."""
    step = runner.assistant_step

    def other(states: Any, slots: Any, token: int, hidden: Any) -> Any:
        return step(states, slots, (token + 1) % runner.manifest.vocabulary_size, hidden)

    monkeypatch.setattr(runner, "assistant_step", other)
    found, statistics = decode(runner, [AssistantFactory()], 3, count=60)
    assert_same(found, expected(runner, count=60))
    assert statistics.drafters["assistant"].accepted / statistics.drafters["assistant"].drafted < 0.5


def test_a_drafter_that_fails_at_run_time_is_switched_off(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = 0, runner.assistant_step

    def failing(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 40:
            raise GemmaCoreMLError("ONNX Runtime failed in a translated function: out of order")
        return step(*arguments)

    monkeypatch.setattr(runner, "assistant_step", failing)
    found, statistics = decode(runner, [AssistantFactory()], 3)
    assert_same(found, expected(runner))
    (warning,) = statistics.warnings
    assert "'assistant' is off for this session" in warning
    assert "out of order" in warning
    assert steps == 41
    assert statistics.rounds > COUNT - 60


def test_a_drafter_that_gives_no_numbers_is_switched_off(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = np.full(runner.manifest.vocabulary_size, np.nan, np.float32)
    monkeypatch.setattr(runner, "assistant_step", lambda states, slots, token, hidden: (nothing, hidden))
    found, statistics = decode(runner, [AssistantFactory()], "auto", count=60)
    assert_same(found, expected(runner, count=60))
    (warning,) = statistics.warnings
    assert "not finite" in warning


def test_a_drafter_whose_functions_are_missing_is_switched_off(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "rungs", (384, 512))  # there are no functions of that name
    monkeypatch.setattr(type(runner), "run", _in_wide_functions(type(runner).run))
    found, statistics = decode(runner, [AssistantFactory()], 3, count=40)
    assert len(found.tokens) == 40
    (warning,) = statistics.warnings
    assert "assistant_context_384" in warning


def _in_wide_functions(run: Any) -> Any:
    def wide(runner: ModelRunner, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "rungs", (512,))
            return run(runner, *arguments)

    return wide


def test_no_assistant_without_a_drafter(runner: ModelRunner) -> None:
    runner.manifest = replace(runner.manifest, drafter=None)
    session = Session(runner)
    assert AssistantFactory().create(session) is None
    session.extend(PROMPT)
    with pytest.raises(GemmaCoreMLError, match="has no assistant"):
        runner.assistant_step(session.states, session.slots, 5, session.last_hidden)
    with pytest.raises(GemmaCoreMLError, match="has no assistant"):
        runner.load_assistant()


def test_the_gates_run_with_the_assistant(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_gemma_coreml.drafting.assistant import Assistant
    from llm_gemma_coreml.engine.gate_checks import Subject, sampled_equals_plain, speculative_equals_plain

    drafted = 0
    steps = Assistant.steps

    def counted(drafter: Assistant, prefix: Sequence[int] = ()) -> Any:
        nonlocal drafted
        for step in steps(drafter, prefix):
            drafted += 1
            yield step

    monkeypatch.setattr(Assistant, "steps", counted)
    runner = open_runner(bundle)
    for gate in (speculative_equals_plain, sampled_equals_plain):
        drafted = 0
        result = gate(Subject(runner, 0.0, False))
        assert result.passed, result.detail
        assert drafted > 20


def test_llm_drafts_with_the_assistant(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    shutil.copytree(bundle, tmp_path / FOLDER / "pair")
    asking = ("-m", "coreml/pair", "One and two", "-u", "-o", "temperature", "0", "-o", "max_tokens", "80", "-o", "speculate")
    plainly, drafted = run_llm(*asking, "off"), run_llm(*asking, "4")
    assert plainly.exit_code == drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plainly.stdout
    assert "assistant" in drafted.stderr
    assert "assistant" not in plainly.stderr
