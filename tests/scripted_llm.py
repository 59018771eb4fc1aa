"""Fixtures: llm in a folder of its own, with scripted bundles installed. Import them into a test module to use them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support import scripted
from support.gemma4_tokenizer import gemma3_model, gemma4_model

from llm_gemma_coreml.chat.tokenizer import Tokenizer

BASE = "coreml/base"
GEMMA4 = "coreml/gemma4"
TEMPLATES = Path(__file__).parent.parent / "llm_gemma_coreml" / "chat" / "templates"
NO_REPLY = " I have no script for that."

SetScript = Callable[..., None]


def write_base_bundle(folder: Path, replies: scripted.Replies, delay: float = 0.0) -> Path:
    """A bundle of the base model's kind in `folder`."""
    scripted.write_scripted_bundle(folder, replies, tokenizer=gemma3_model(), name=folder.name, delay=delay, end=1)
    return folder


def write_gemma4_bundle(folder: Path, replies: scripted.Replies) -> Path:
    """A bundle of Gemma 4's kind in `folder`."""
    scripted.write_scripted_bundle(
        folder,
        replies,
        tokenizer=gemma4_model(),
        name=folder.name,
        template_kind="gemma4",
        template=(TEMPLATES / "gemma4.jinja").read_text(encoding="utf-8"),
    )
    return folder


@pytest.fixture(scope="session")
def scripted_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles `base` (transcript) and `gemma4`."""
    folder = tmp_path_factory.mktemp("scripted")
    write_base_bundle(folder / "base", [])
    write_gemma4_bundle(folder / "gemma4", [])
    return folder


@pytest.fixture(scope="session")
def empty_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llm's database without an entry. Making one takes llm a second."""
    import sqlite_utils
    from llm.migrations import migrate

    path = tmp_path_factory.mktemp("log") / "logs.db"
    with sqlite_utils.Database(path) as database:
        migrate(database)
    return path


@pytest.fixture
def llm_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted_bundles: Path, empty_log: Path) -> Path:
    """llm's folder for this test. The bundles are links, so that an engine is opened once for all tests."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    shutil.copy(empty_log, tmp_path)
    (tmp_path / "gemma-coreml").mkdir()
    for bundle in scripted_bundles.iterdir():
        (tmp_path / "gemma-coreml" / bundle.name).symlink_to(bundle, target_is_directory=True)
    return tmp_path


@pytest.fixture
def script(llm_folder: Path, scripted_bundles: Path) -> Iterator[SetScript]:
    """Sets what the models say: script((text in the prompt, reply), ..., delay=0.0).

    The reply whose text stands last in the prompt is given.
    """

    def set_script(*replies: tuple[str, str], delay: float = 0.0) -> None:
        for bundle in scripted_bundles.iterdir():
            known = scripted.script_of(bundle)
            known.replies = replies_by_text(Tokenizer(bundle / "tokenizer.model"), replies)
            known.delay = delay

    set_script()
    with scripted.installed():
        yield set_script


def replies_by_text(tokenizer: Tokenizer, replies: Sequence[tuple[str, str]]) -> Callable[[tuple[int, ...]], str]:
    """Of the replies, the one whose text stands last in the prompt."""

    def reply(prompt: tuple[int, ...]) -> str:
        text = "".join(tokenizer.piece(token) for token in prompt).replace("\u2581", " ")
        places = [(text.rfind(key), answer) for key, answer in replies if key in text]
        return max(places, key=lambda place: place[0])[1] if places else NO_REPLY

    return reply
