"""Which models are known, which bundles are installed, and under which names `llm` finds them.

Imported at every start of `llm`: standard library only, and one small file read per installed bundle.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llm_gemma_coreml.bundle.store import InstalledBundle, bundles_folder, find_bundle, list_bundles
from llm_gemma_coreml.errors import BundleError, ModelNotInstalledError
from llm_gemma_coreml.known_models import KNOWN_MODELS, QUICK_START, KnownModel, known_model, model_of_repository

__all__ = ["KNOWN_MODELS", "KnownModel", "known_model", "model_of_repository"]
MODEL_PREFIX = "coreml/"
ALIASES_FILE = "aliases.json"
FAMILY_ALIASES = {"gemma3": "gemma3-local", "gemma4": "gemma4-local"}
"""The alias of each family; `llm gemma-coreml default NAME` says which bundle it means."""


def not_installed(model: KnownModel) -> ModelNotInstalledError:
    """The error that tells how to get `model`."""
    commands = "\n".join(f"  {command}" for command in model.commands)
    return ModelNotInstalledError(
        f"{model.name} is not installed. It is {model.description} ({model.download}; {model.licence}). "
        f"These commands install it:\n{commands}"
    )


class ModelEntry(NamedTuple):
    """One model to register. `locate` gives the bundle's folder: it builds the bundle, or raises an error."""

    model_id: str
    aliases: tuple[str, ...]
    can_think: bool
    locate: Callable[[], Path]
    is_published: bool = False
    """In the published layout, which can be run in several ways."""


def models() -> list[ModelEntry]:
    """All models to register: installed bundles, the quick start, and a stand-in for a family without one."""
    installed = list_bundles()
    meanings = _alias_meanings(installed)
    entries = [
        ModelEntry(
            MODEL_PREFIX + bundle.name,
            _aliases_of(bundle.name, meanings),
            bundle.template_kind == "gemma4",
            _locator(bundle),
            bundle.is_published,
        )
        for bundle in installed
    ]
    if all(bundle.name != QUICK_START for bundle in installed):
        aliases = _aliases_of(QUICK_START, meanings)
        entries.append(ModelEntry(MODEL_PREFIX + QUICK_START, aliases, False, locate_quick_start))
    for family, alias in FAMILY_ALIASES.items():
        if alias not in meanings:
            entries.append(ModelEntry(alias, (), family == "gemma4", _refusal(family)))
    return entries


def _locator(bundle: InstalledBundle) -> Callable[[], Path]:
    return lambda: bundle.path


def _refusal(family: str) -> Callable[[], Path]:
    def refuse() -> Path:
        raise not_installed(next(model for model in KNOWN_MODELS if model.family == family))

    return refuse


def _aliases_of(name: str, meanings: dict[str, str]) -> tuple[str, ...]:
    return tuple(alias for alias, bundle in meanings.items() if bundle == name)


def _alias_meanings(installed: list[InstalledBundle]) -> dict[str, str]:
    """Alias -> bundle: as `default` has set it, else the quick start, else the family's first by name.

    Bundles of random weights are none to talk to: only `default` makes an alias mean one.
    """
    random = {bundle.name for bundle in installed if bundle.is_random}
    families = {bundle.name: bundle.family for bundle in installed}
    families.setdefault(QUICK_START, "gemma3")
    chosen = _read_aliases()
    meanings = {}
    for family, alias in FAMILY_ALIASES.items():
        names = [name for name in families if families[name] == family]
        wanted = chosen.get(alias)
        if wanted in names:
            meanings[alias] = wanted
        elif QUICK_START in names:
            meanings[alias] = QUICK_START
        elif real := [name for name in names if name not in random]:
            meanings[alias] = min(real)
    return meanings


def alias_meanings() -> dict[str, str]:
    """What each alias means now: the name of a bundle. Aliases without a bundle are left out."""
    return _alias_meanings(list_bundles())


def _read_aliases() -> dict[str, str]:
    """The choices of `default`. An unreadable file is no choice: it must not break every llm command."""
    try:
        value = json.loads((bundles_folder() / ALIASES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {alias: name for alias, name in value.items() if isinstance(name, str)}


def set_default(name: str) -> str:
    """Let the family's alias mean the installed bundle `name`; the alias. Raises BundleError."""
    bundle = installed_bundle(name)
    alias = FAMILY_ALIASES.get(bundle.family)
    if alias is None:
        raise BundleError(f"{bundle.problem or name + ' is of no family with an alias'}.")
    path = bundle.path.parent / ALIASES_FILE
    text = json.dumps({**_read_aliases(), alias: name}, indent=2) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    return alias


def installed_bundle(name: str) -> InstalledBundle:
    """The installed bundle of that name; `coreml/NAME` and the aliases are understood too.

    Raises ModelNotInstalledError with the way to get it, or BundleError if no such model is known.
    """
    installed = list_bundles()
    plain = name.removeprefix(MODEL_PREFIX)
    plain = _alias_meanings(installed).get(plain, plain)
    found = next((bundle for bundle in installed if bundle.name == plain), None)
    if found is not None:
        return found
    known = known_model(plain)
    if known is not None:
        raise not_installed(known)
    names = ", ".join(bundle.name for bundle in installed) or "none"
    raise BundleError(f"There is no bundle {name!r}. Installed: {names}.")


def locate_quick_start() -> Path:
    """The quick-start bundle; built now, with its licence notice and a progress bar on stderr, if need be.

    Raises MissingDependencyError with the command that installs its weights, SourceError, BundleError.
    """
    path = find_bundle(QUICK_START)
    if path is not None:
        return path
    from llm_gemma_coreml.convert import build, quickstart
    from llm_gemma_coreml.progress import progress_bar

    if not quickstart.is_installed():
        raise not_installed(KNOWN_MODELS[0])
    print(quickstart.LICENCE_NOTICE, file=sys.stderr)
    with progress_bar() as progress:
        built: Path = build.build_quickstart(progress=progress)
        return built
