"""Plug-in points of our own: runtimes and drafters, found through the entry point group `llm_gemma_coreml`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from llm_gemma_coreml.drafting.base import DrafterFactory
    from llm_gemma_coreml.runtime.base import Runtime

GROUP = "llm_gemma_coreml"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def register_runtimes(register: Callable[[Runtime], None]) -> None:
    """Call `register(runtime)` for each runtime. The first available one, in order of registration, is used."""


@hookspec
def register_drafters(register: Callable[[DrafterFactory], None]) -> None:
    """Call `register(factory)` for each drafter factory (see drafting/base.py)."""


@cache
def plugin_manager() -> pluggy.PluginManager:
    """The manager with the built-in plug-ins and those of installed distributions."""
    from llm_gemma_coreml import builtin

    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(sys.modules[__name__])
    manager.register(builtin)
    manager.load_setuptools_entrypoints(GROUP)
    return manager


def runtimes() -> list[Runtime]:
    """All registered runtimes, built-in ones first."""
    found: list[Runtime] = []
    plugin_manager().hook.register_runtimes(register=found.append)
    return found


def drafter_factories() -> list[DrafterFactory]:
    """All registered drafter factories, built-in ones first."""
    found: list[DrafterFactory] = []
    plugin_manager().hook.register_drafters(register=found.append)
    return found
