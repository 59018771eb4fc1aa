"""The benchmark of speculation: its prompts, what counts as degenerate, and how figures are put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_gemma_coreml.benchmark import speculation
from llm_gemma_coreml.benchmark.speculation_prompts import KINDS, cases
from llm_gemma_coreml.errors import RequestError


def result(kind: str, **figures: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "output_tokens": 96,
        "degenerate": False,
        "same_text": True,
        "drafted": 10,
        "accepted": 5,
        "tokens_per_round": 2.0,
        "plain_tokens_per_second": 50.0,
        "tokens_per_second": 100.0,
        "speedups": [1.0, 2.0, 3.0],
    } | figures


def test_every_kind_has_at_least_two_prompts() -> None:
    found = cases()
    assert {case.kind for case in found} == set(KINDS)
    assert all(sum(case.kind == kind for case in found) >= 2 for kind in KINDS)
    assert len({case.text for case in found}) == len(found)


def test_missing_texts_are_an_error_that_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--texts"):
        cases(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([*range(40), *[1, 2, 3] * 20], True),
        ([7] * 50, True),
        (list(range(96)), False),
        ([*[1, 2, 3] * 10, *range(60)], False),
        ([], True),
    ],
    ids=["period of three", "one token", "no repetition", "a loop that ended", "nothing"],
)
def test_loops_are_found(tokens: list[int], loops: bool) -> None:
    assert speculation.is_loop(tokens) == (loops and bool(tokens))


def test_degenerate_prompts_stay_out_of_the_headline() -> None:
    kinds = speculation._by_kind(
        [
            result("prose"),
            result("prose", speedups=[1.5], accepted=10),
            result("prose", degenerate=True, speedups=[9.0]),
            result("prose", output_tokens=3, speedups=[], drafted=0, same_text=False),
        ]
    )
    assert kinds["prose"]["prompts"] == 2
    assert kinds["prose"]["speedup"] == 1.75
    assert kinds["prose"]["acceptance"] == 0.75
    assert kinds["prose"]["speedup_highest"] == 3.0
    assert kinds["prose, degenerate"]["prompts"] == 2
    text = speculation.render({"kinds": kinds, "repeats": 3})
    assert "TEXT DIFFERS" in text.splitlines()[2]
    assert "TEXT DIFFERS" not in text.splitlines()[1]


def test_drawing_writes_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kinds = speculation._by_kind([result("prose"), result("json")])
    speculation.draw({"bundle": "tiny", "kinds": kinds}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
