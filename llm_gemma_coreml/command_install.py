"""The command `install`."""

from __future__ import annotations

from pathlib import Path

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.store import check_name
from llm_gemma_coreml.command_types import one_line_errors


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help="What to call it here; default: the folder's name")
@one_line_errors
def install(folder: Path, name: str | None) -> None:
    """Install a bundle in the published layout that is in FOLDER already

    The files are hard-linked where the disk is the same, else copied; FOLDER stays as it is.
    """
    name = name or folder.resolve().name
    check_name(name)
    from llm_gemma_coreml.convert.published_bundle import install_published
    from llm_gemma_coreml.progress import progress_bar

    with progress_bar() as progress:
        path = install_published(folder, name, progress)
    click.echo(f"Wrote {path}", err=True)
    click.echo(catalog.MODEL_PREFIX + path.name)
