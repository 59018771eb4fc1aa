"""The command `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.manifest_checks import is_valid_name
from llm_gemma_coreml.bundle.store import check_name
from llm_gemma_coreml.command_types import Counts, one_line_errors


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the bundle; default: from the source")
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits per weight; default: by the model's size")
@click.option("--contexts", type=Counts(), default="4096,32768,131072", show_default=True, help="Rungs")
@click.option("--widths", type=Counts(), default="1,2,4,8,128", show_default=True, help="Rows per call")
@click.option("--report", is_flag=True, help="Compare the quantised model with the source; takes longer")
@one_line_errors
def convert(source: Path, name: str | None, bits: str | None, contexts: Any, widths: Any, report: bool) -> None:
    """Convert SOURCE to a bundle: a GGUF file, a safetensors directory, or the name of a downloaded checkpoint"""
    if name is not None:
        check_name(name)
    source, name = _source_of(source, name)
    from llm_gemma_coreml.convert.build import build_bundle
    from llm_gemma_coreml.progress import progress_bar

    with progress_bar() as progress:
        path = build_bundle(
            source,
            name=name,
            bits=None if bits is None else int(bits),
            contexts=contexts,
            widths=widths,
            report=report,
            progress=progress,
        )
    click.echo(f"Wrote {path}", err=True)
    click.echo(catalog.MODEL_PREFIX + path.name)


def _source_of(source: Path, name: str | None) -> tuple[Path, str | None]:
    """What to convert, and the bundle's name: that of the checkpoint, if `source` is one that was downloaded."""
    if source.exists() or not is_valid_name(str(source)):
        return source, name
    from llm_gemma_coreml.download.checkpoints import find_checkpoint

    found = find_checkpoint(str(source))
    if found is not None:
        return found, name or str(source)
    known = catalog.known_model(str(source))
    if known is not None and known.kind == "checkpoint":
        raise catalog.not_installed(known)
    return source, name
