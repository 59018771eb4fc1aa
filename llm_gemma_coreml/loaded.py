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
    from llm_gemma_coreml.engine.published_mode import DraftingForm, PublishedMode, RingMode


@dataclass(frozen=True)
class LoadedBundle:
    """An open bundle."""

    engine: Engine
    chat: Chat


@dataclass(frozen=True)
class EngineOptions:
    """How to open a bundle; see `Engine.open`. Bundles opened in different ways have engines of their own."""

    runtime: str | None = None
    threads: int | None = None
    exact: bool = False
    budget: int | None = None
    published: PublishedMode | None = None


def published_mode(ring: RingMode | None, drafting: DraftingForm | None) -> PublishedMode | None:
    """How to run a bundle in the published layout; None: the default, which suits every bundle. Raises RequestError."""
    if (ring, drafting) == (None, None):
        return None
    from llm_gemma_coreml.engine.published_mode import PublishedMode

    mode = PublishedMode(ring or "exact", drafting or "transformers")
    return None if mode == PublishedMode() else mode


_lock = threading.Lock()
_loaded: dict[tuple[Path, EngineOptions], LoadedBundle] = {}
_DEFAULT = EngineOptions()


def load(bundle: Path, options: EngineOptions = _DEFAULT) -> LoadedBundle:
    """The open bundle at that path, opened if need be. Raises BundleError, PackageError, MissingDependencyError."""
    key = (bundle.resolve(), options)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _open(*key)
        return _loaded[key]


def _open(bundle: Path, options: EngineOptions) -> LoadedBundle:
    from llm_gemma_coreml.engine.engine import Engine

    engine = Engine.open(
        bundle,
        runtime=options.runtime,
        threads=options.threads,
        exact=options.exact,
        budget=options.budget,
        published=options.published,
    )
    threading.Thread(target=_warm_up, args=(engine,), daemon=True).start()
    try:
        from llm_gemma_coreml.chat.chat import Chat

        return LoadedBundle(engine, Chat(bundle, engine.manifest))
    except BaseException:
        engine.close()
        raise


def _warm_up(engine: Engine) -> None:
    """Let the runtime prepare its functions on the engine's thread while this one reads tokenizer and template."""
    with contextlib.suppress(GemmaCoreMLError):  # the request that follows will meet it, and tell the user
        engine.call(lambda: engine.new_session().prefill([engine.manifest.bos_id]))


@atexit.register
def unload_all() -> None:
    """Close everything that is open."""
    with _lock:
        bundles = list(_loaded.values())
        _loaded.clear()
    for bundle in bundles:
        bundle.engine.close()
