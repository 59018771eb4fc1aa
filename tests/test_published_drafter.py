"""The drafter of a published bundle: both ways of driving it against transformers' assistant, and what is said without it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import published_bundle as published
from support import published_drafter

from llm_gemma_coreml.convert.published_bundle import Origin, describe_published
from llm_gemma_coreml.drafting.published import PublishedAssistantFactory
from llm_gemma_coreml.engine.engine import Engine, open_runner
from llm_gemma_coreml.engine.published_mode import DraftingForm, PublishedMode, RingMode
from llm_gemma_coreml.engine.published_runner import PublishedRunner
from llm_gemma_coreml.engine.request import GenerationRequest
from llm_gemma_coreml.engine.session import Session


@pytest.fixture(scope="module")
def assistant() -> Any:
    return published_drafter.assistant()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, assistant: Any) -> published.Bundle:
    made = published.write_published(tmp_path_factory.mktemp("published") / "tiny")
    published_drafter.write_drafters(made.path, assistant)
    describe_published(made.path, "tiny", Origin("made up", {}))
    return made


def opened(path: Path, drafting: DraftingForm = "transformers", ring: RingMode = "exact") -> PublishedRunner:
    runner = open_runner(path, exact=True, published=PublishedMode(ring, drafting))
    assert isinstance(runner, PublishedRunner)
    return runner


def random_ids(count: int, seed: int = 0) -> list[int]:
    return [2, *np.random.default_rng(seed).integers(20, published.VOCABULARY, count - 1).tolist()]


def copied(bundle: published.Bundle, target: Path, without: str) -> Path:
    """The bundle without the files that match, installed anew."""
    shutil.copytree(bundle.path, target, ignore=shutil.ignore_patterns(without, "bundle.json", ".cache"))
    describe_published(target, target.name, Origin("made up", {}))
    return target


@pytest.fixture(params=["transformers", "as-published"])
def runner(request: pytest.FixtureRequest, bundle: published.Bundle) -> Iterator[PublishedRunner]:
    runner = opened(bundle.path, request.param)
    yield runner
    runner.close()


@pytest.mark.parametrize("length", [2, 20, published.WINDOW + 1, 50, 80])
def test_drafts_are_those_of_transformers(bundle: published.Bundle, assistant: Any, runner: PublishedRunner, length: int) -> None:
    """Within the window, past the ring's end, and in the second drafter after the promotion."""
    form = runner.mode.drafting
    agreed = 0
    for seed in range(4):
        ids = random_ids(length, seed)
        session = Session(runner)
        session.extend(ids[:-1])
        drafter = PublishedAssistantFactory().create(session)
        assert drafter is not None
        drafter.begin(ids, ())
        found = [token for token, _ in islice(drafter.steps(), 4)]
        agreed += found == published_drafter.drafts(bundle, assistant, ids, 4, form)
    assert agreed >= 3  # of four: a near tie may go the other way in fp16


def test_the_two_ways_differ(bundle: published.Bundle, assistant: Any) -> None:
    ids = random_ids(20)
    one, other = (published_drafter.drafts(bundle, assistant, ids, 4, first) for first in ("transformers", "as-published"))
    assert one != other


def test_rows_are_copied_as_they_come(bundle: published.Bundle, assistant: Any, runner: PublishedRunner) -> None:
    """Over rounds with rejected drafts the drafter sees the committed tokens only."""
    ids = random_ids(30, seed=7)
    session = Session(runner)
    session.extend(ids[:9])
    drafter = PublishedAssistantFactory().create(session)
    assert drafter is not None
    drafter.begin(ids[:10], ())
    agreed = 0
    for position in range(9, 27, 3):
        found = [token for token, _ in islice(drafter.steps(), 3)]
        agreed += found == published_drafter.drafts(bundle, assistant, ids[: position + 1], 3, runner.mode.drafting)
        session.step([*ids[position : position + 3], 5, 6])
        session.commit(3)
        drafter.observe(ids[position + 1 : position + 4], 0, 0)
    assert agreed >= 5


def test_steps_go_on_after_another_drafters_drafts(bundle: published.Bundle, assistant: Any) -> None:
    runner = opened(bundle.path)
    ids = random_ids(20, seed=8)
    session = Session(runner)
    session.extend(ids[:-1])
    drafter = PublishedAssistantFactory().create(session)
    assert drafter is not None
    drafter.begin(ids, ())
    own = [token for token, _ in islice(drafter.steps(), 3)]
    assert [token for token, _ in islice(drafter.steps(own[:2]), 1)] == own[2:]


@pytest.mark.parametrize("ring", ["exact", "as-published"])
@pytest.mark.parametrize("drafting", ["transformers", "as-published"])
def test_answers_do_not_depend_on_the_drafter(bundle: published.Bundle, ring: RingMode, drafting: DraftingForm) -> None:
    ids = tuple(random_ids(8, seed=3))
    count = published.WINDOW - 8 - 4 if ring == "as-published" else 40
    with Engine(opened(bundle.path, drafting, ring)) as engine:
        stream = engine.generate(GenerationRequest(ids, max_tokens=count, speculate=3))
        tokens = [token for part in stream for token in part]
    assert tokens == bundle.greedy(ids, count)
    assert stream.statistics.drafters["assistant"].drafted > 0
    assert not stream.statistics.warnings


def test_a_compiled_drafter_is_told_once_and_done_without(bundle: published.Bundle, tmp_path: Path) -> None:
    compiled = copied(bundle, tmp_path / "compiled", "drafter*.mlpackage")
    ids = tuple(random_ids(8, seed=3))
    with Engine(opened(compiled)) as engine:
        warnings = []
        for _ in range(2):
            engine.call(engine._cache.clear)  # a new session each time
            stream = engine.generate(GenerationRequest(ids, max_tokens=4))
            assert len([token for part in stream for token in part]) == 4
            warnings += stream.statistics.warnings
    (warning,) = warnings
    assert "drafter_ring32k.mlmodelc is compiled for Core ML, and the runtime 'portable' cannot read it" in warning
    assert "prompt lookup instead" in warning


def test_no_drafter_is_no_trouble(bundle: published.Bundle, tmp_path: Path) -> None:
    runner = opened(copied(bundle, tmp_path / "plain", "drafter*"))
    assert PublishedAssistantFactory().create(Session(runner)) is None


def test_beyond_the_only_drafter_nothing_is_drafted(bundle: published.Bundle, tmp_path: Path) -> None:
    session = Session(opened(copied(bundle, tmp_path / "short", "drafter_ring.*")))
    drafter = PublishedAssistantFactory().create(session)
    assert drafter is not None
    ids = random_ids(70)
    session.extend(ids[:-1])
    drafter.begin(ids, ())
    assert list(islice(drafter.steps(), 3)) == []
