"""The parts of README and docs that cog generates are what the code says now."""

from __future__ import annotations

from pathlib import Path

import pytest
from cogapp import Cog

PROJECT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/plan.md", "docs/models.md")


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_current(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(PROJECT)
    assert Cog().main(["cog", "--check", page]) == 0, f"run: cog -r {page}\n{capsys.readouterr().out}"


def test_every_option_of_every_model_is_described() -> None:
    from llm_gemma_coreml.options import ThinkingOptions

    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for name, field in ThinkingOptions.model_fields.items():
        assert f"- **{name}**: {field.description}" in text, name
