"""The commands that manage what is on the disk: `models`, `info`, `remove`, `default`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.store import InstalledBundle, interrupted_conversions, list_bundles
from llm_gemma_coreml.command_types import BundleName, as_json, bundle_name, one_line_errors, write_json
from llm_gemma_coreml.errors import BundleError


@click.command()
@as_json
@one_line_errors
def models(as_json: bool) -> None:
    """List the installed bundles, and the models that can be installed"""
    installed = list_bundles()
    meanings = catalog.alias_meanings()
    if as_json:
        write_json([_bundle_facts(bundle, meanings) for bundle in installed])
        return
    for bundle in installed:
        facts = _bundle_facts(bundle, meanings)
        names = "".join(f", {alias}" for alias in facts["aliases"])
        state = facts["problem"] or f"{bundle.size / 1e6:,.0f} MB in {bundle.path}"
        click.echo(f"{facts['model_id']}{names}: {state}")
    for interrupted in interrupted_conversions():
        click.echo(
            f"{interrupted.name}: interrupted conversion, {interrupted.size / 1e6:,.0f} MB. The same `convert` goes on with it, "
            f"`remove {interrupted.name}` deletes it"
        )
    for line in _what_is_downloaded():
        click.echo(line)
    for known in catalog.KNOWN_MODELS:
        if known.name not in {bundle.name for bundle in installed}:
            needs = f"needs {known.memory} of memory, " if known.memory else ""
            click.echo(f"{known.name}: {known.description}. {known.download}; {needs}{known.runs_on}; {known.licence}")
            for line in ("Not installed:", *known.commands):
                click.echo(f"  {line}")


def _what_is_downloaded() -> Iterator[str]:
    from llm_gemma_coreml.download.checkpoints import list_downloads

    for download in list_downloads():
        what = "checkpoint" if download.complete else "unfinished download"
        yield f"{download.name}: {what} of {download.repository}, {download.size / 1e6:,.0f} MB in {download.path}"


def _bundle_facts(bundle: InstalledBundle, meanings: dict[str, str]) -> dict[str, Any]:
    return {
        "name": bundle.name,
        "model_id": catalog.MODEL_PREFIX + bundle.name,
        "aliases": [alias for alias, name in meanings.items() if name == bundle.name],
        "family": bundle.family,
        "contexts": list(bundle.contexts),
        "bytes": bundle.size,
        "path": str(bundle.path),
        "problem": bundle.problem,
    }


@click.command()
@bundle_name
@as_json
@one_line_errors
def info(name: str, as_json: bool) -> None:
    """Show the functions, states, weights and memory of the bundle NAME"""
    bundle = catalog.installed_bundle(name)
    from llm_gemma_coreml.bundle import inspection

    facts = inspection.inspect(bundle.path)
    if as_json:
        write_json(facts)
    else:
        click.echo(inspection.render(facts))


@click.command()
@bundle_name
@click.option("-y", "--yes", is_flag=True, help="Do not ask")
@click.option("--checkpoint", is_flag=True, help="The downloaded checkpoint or unfinished download of that name, not the bundle")
@one_line_errors
def remove(name: str, yes: bool, checkpoint: bool) -> None:
    """Delete the bundle NAME from the disk; without such a bundle, what was downloaded or half converted under that name"""
    from llm_gemma_coreml.bundle import store
    from llm_gemma_coreml.download import checkpoints

    interrupted = next((found for found in store.interrupted_conversions() if found.name == name), None)
    downloads = [found for found in checkpoints.list_downloads() if found.name == name]
    if checkpoint and not downloads:
        raise BundleError(f"No checkpoint {name!r} was downloaded. `llm gemma-coreml models` lists what there is.")
    if checkpoint or (downloads and all(bundle.name != name for bundle in list_bundles())):
        for found in downloads:
            _confirm(found.path, found.size, yes)
            checkpoints.remove_download(found)
    elif interrupted is not None and all(bundle.name != name for bundle in list_bundles()):
        _confirm(interrupted.path, interrupted.size, yes)
        store.remove_bundle(name)
    else:
        bundle = catalog.installed_bundle(name)
        _confirm(bundle.path, bundle.size, yes)
        store.remove_bundle(bundle.name)
    click.echo(f"Removed {name}", err=True)


def _confirm(path: Path, size: int, yes: bool) -> None:
    if not yes:
        click.confirm(f"Delete {path} ({size / 1e6:,.0f} MB)?", abort=True, err=True)


@click.command()
@click.argument("name", type=BundleName(), required=False)
@one_line_errors
def default(name: str | None) -> None:
    """Let the alias of its family (gemma3-local, gemma4-local) mean the bundle NAME

    Without NAME: show what the aliases mean.
    """
    if name is not None:
        alias = catalog.set_default(name)
        click.echo(f"{alias} is now {catalog.MODEL_PREFIX}{name}", err=True)
        return
    for alias, bundle in catalog.alias_meanings().items():
        click.echo(f"{alias}: {catalog.MODEL_PREFIX}{bundle}")
