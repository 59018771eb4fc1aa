"""The command `download`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.command_types import CompletedName, one_line_errors
from llm_gemma_coreml.errors import ModelNotInstalledError

if TYPE_CHECKING:
    from llm_gemma_coreml.download.hub import Repository
    from llm_gemma_coreml.download.selection import Selection


_names = CompletedName("name", lambda: (model.name for model in catalog.KNOWN_MODELS if model.repository))


@click.command()
@click.argument("wanted", metavar="NAME|REPO", type=_names)
@click.option("--revision", help="Branch, tag or commit; default: main")
@click.option("--name", help="What to call it here; default: its name in the catalogue, or the repository's")
@click.option("--file", "gguf", help="Which GGUF file to take, if the repository has several")
@one_line_errors
def download(wanted: str, revision: str | None, name: str | None, gguf: str | None) -> None:
    """Download the model NAME of the catalogue, or the repository REPO (OWNER/NAME) of the hub

    A bundle can be used at once; a checkpoint has to be converted: llm gemma-coreml convert NAME. An interrupted
    download goes on where it stopped when the command is given again. HF_ENDPOINT and HF_TOKEN are honoured.
    """
    from llm_gemma_coreml.bundle.store import check_name

    repository_name, default_name, known = _resolve(wanted)
    name = name or default_name
    check_name(name)
    if (path := _already_there(name)) is not None:
        click.echo(f"{name} is in {path} already. To fetch it anew: llm gemma-coreml remove {name}", err=True)
        return
    from llm_gemma_coreml.download import hub, selection
    from llm_gemma_coreml.download.install import install
    from llm_gemma_coreml.progress import progress_bar

    repository = hub.look_up(repository_name, revision)
    selected = selection.select(repository, gguf)
    _introduce(repository, selected, known)
    with progress_bar(in_bytes=True) as progress:
        done = install(repository, selected, name, lambda count, total: progress("Downloading", count, total))
    click.echo(f"Wrote {done.path}", err=True)
    if done.kind in selection.CHECKPOINTS:
        click.echo(f"It can be converted now: llm gemma-coreml convert {name}", err=True)
        click.echo(name)
    else:
        click.echo(catalog.MODEL_PREFIX + name)


def _resolve(wanted: str) -> tuple[str, str, catalog.KnownModel | None]:
    """Repository, name here, and the catalogue's entry, if there is one. Raises ModelNotInstalledError."""
    known = catalog.known_model(wanted) or catalog.model_of_repository(wanted)
    if known is not None and known.repository:
        return known.repository, known.name, known
    if known is not None:
        raise catalog.not_installed(known)
    if wanted.count("/") == 1:
        return wanted, wanted.partition("/")[2], None
    names = ", ".join(model.name for model in catalog.KNOWN_MODELS if model.repository)
    raise ModelNotInstalledError(
        f"{wanted!r} is not in the catalogue. Give one of its names ({names}) or a repository as OWNER/NAME."
    )


def _already_there(name: str) -> Path | None:
    from llm_gemma_coreml.bundle.store import find_bundle
    from llm_gemma_coreml.download.checkpoints import find_checkpoint

    known = catalog.known_model(name)
    found = None if known is not None and known.kind == "checkpoint" else find_bundle(name)
    return found or find_checkpoint(name)


def _introduce(repository: Repository, selected: Selection, known: catalog.KnownModel | None) -> None:
    """What is about to be fetched, and under which licence, on stderr."""
    licence = known.licence if known is not None else repository.licence or f"not given; see {repository.page}"
    size = f"{len(selected.files)} files, {selected.size / 1e9:.2f} GB"
    click.echo(f"{repository.name} at {repository.commit[:12]}: {size}", err=True)
    click.echo(f"Licence: {licence}. By using the model you accept it.", err=True)
    if known is not None and known.memory:
        click.echo(f"Memory needed: {known.memory}. Runs on: {known.runs_on}.", err=True)
