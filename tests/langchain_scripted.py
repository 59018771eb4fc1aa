"""Fixtures: the chat model over scripted bundles of Gemma 4's and the base model's kind. Import them to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_llm import replies_by_text, write_base_bundle, write_gemma4_bundle
from support import scripted

from langchain_adapter import ChatGemmaCoreML
from llm_gemma_coreml.chat.tokenizer import Tokenizer

MakeModel = Callable[..., ChatGemmaCoreML]


@pytest.fixture(scope="session")
def langchain_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llm's folder with the bundles `gemma4`, `gemma4-other` and `base`."""
    folder = tmp_path_factory.mktemp("langchain") / "gemma-coreml"
    for name in ("gemma4", "gemma4-other"):
        write_gemma4_bundle(folder / name, [])
    write_base_bundle(folder / "base", [])
    return folder


@pytest.fixture
def bundles(langchain_bundles: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same for one test, with the scripted runtime."""
    monkeypatch.setenv("LLM_USER_PATH", str(langchain_bundles.parent))
    with scripted.installed():
        yield langchain_bundles


@pytest.fixture
def make_model(bundles: Path) -> MakeModel:
    """make_model((text in the prompt, reply), ..., model="gemma4", delay=0.0, field=value ...).

    The reply whose text stands last in the prompt is given.
    """

    def make(*replies: tuple[str, str], model: str = "gemma4", delay: float = 0.0, **fields: Any) -> ChatGemmaCoreML:
        script = scripted.script_of(bundles / model)
        script.replies = replies_by_text(Tokenizer(bundles / model / "tokenizer.model"), replies)
        script.delay = delay
        return ChatGemmaCoreML(**{"model": model, "temperature": 0, "seed": 1, **fields})

    return make
