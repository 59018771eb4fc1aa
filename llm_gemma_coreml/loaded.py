"""The bundles that this process holds open: one engine for each, kept until the process ends."""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_gemma_coreml.chat.chat import Chat
    from llm_gemma_coreml.engine.engine import Engine


@dataclass(frozen=True)
class LoadedBundle:
    """An open bundle. `context`: the cap that it was opened with, in tokens; None is no cap."""

    engine: Engine
    chat: Chat
    context: int | None


_lock = threading.Lock()
_loaded: dict[Path, LoadedBundle] = {}


def load(bundle: Path, context: int | None = None) -> LoadedBundle:
    """The open bundle at that path, opened if need be; opened anew if `context` is another than before.

    Raises BundleError, PackageError, MissingDependencyError, RequestError.
    """
    key = bundle.resolve()
    with _lock:
        found = _loaded.get(key)
        if found is not None and found.context == context:
            return found
        if found is not None:
            del _loaded[key]
            found.engine.close()
        opened = _open(key, context)
        _loaded[key] = opened
        return opened


def _open(bundle: Path, context: int | None) -> LoadedBundle:
    from llm_gemma_coreml.chat.chat import Chat

    chat = Chat(bundle)
    from llm_gemma_coreml.engine.engine import Engine

    return LoadedBundle(Engine.open(bundle, context=context), chat, context)


def unload(bundle: Path) -> None:
    """Close the bundle at that path if it is open."""
    with _lock:
        found = _loaded.pop(bundle.resolve(), None)
    if found is not None:
        found.engine.close()


@atexit.register
def unload_all() -> None:
    """Close everything that is open."""
    with _lock:
        bundles = list(_loaded.values())
        _loaded.clear()
    for bundle in bundles:
        bundle.engine.close()
