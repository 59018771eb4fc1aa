"""The bundles that this process holds open: one engine for each, kept until the process ends."""

from __future__ import annotations

import atexit
import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm_gemma_coreml.errors import GemmaCoreMLError

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
    from llm_gemma_coreml.engine.engine import Engine

    engine = Engine.open(bundle, context=context)
    threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
    try:
        from llm_gemma_coreml.chat.chat import Chat

        return LoadedBundle(engine, Chat(bundle, engine.manifest), context)
    except BaseException:
        engine.close()
        raise


def _warm_up(engine: Engine) -> None:
    """Let the runtime prepare its functions on the engine's thread while this one reads tokenizer and template."""
    with contextlib.suppress(GemmaCoreMLError):  # the request that follows will meet it, and tell the user
        engine.call(lambda: engine.new_session().prefill([engine.manifest.bos_id]))


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
