"""The command `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.manifest_checks import is_valid_name
from llm_gemma_coreml.bundle.store import check_name
from llm_gemma_coreml.command_types import Counts, one_line_errors

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.source import Source


@click.command()
@click.argument("source", type=click.Path(path_type=Path), required=False)
@click.option("--random", metavar="MODEL", help="Random weights in the shape of MODEL (gemma-4-12b, ...), for tests of scale")
@click.option("--seed", type=click.IntRange(min=0), help="Other random weights; default: 0")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="tokenizer.model or tokenizer.json for --random")
@click.option(
    "--drafter",
    type=click.Path(path_type=Path),
    help="The model's assistant, to be built in: a safetensors directory, or the name of a downloaded one; random with --random",
)
@click.option("--name", help="Name of the bundle; default: from the source")
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits per weight; default: by the model's size")
@click.option("--contexts", type=Counts(), default="4096,32768,131072", show_default=True, help="Rungs")
@click.option("--widths", type=Counts(), default="1,2,4,8,128", show_default=True, help="Rows per call")
@click.option(
    "--target",
    type=click.Choice(["mac", "iphone"]),
    default="mac",
    help="iphone: 4-bit palettised weights, a layer a package, contexts 1024,4096 and widths 1,4 unless others are given",
)
@click.option("--layers-per-package", type=click.IntRange(min=1), help="Default: by the model's size")
@click.option(
    "--write-form",
    type=click.Choice(["slice_update", "one_hot", "gather"]),
    default="slice_update",
    help="How rows get into a state: another one if Core ML cannot do the usual (verify --runtime coreml says so)",
)
@click.option(
    "--attention-form",
    type=click.Choice(["explicit", "sdpa"]),
    default="explicit",
    help="Attention in single operations, or Core ML's own operation",
)
@click.option("--report", is_flag=True, help="Compare the quantised model with the source; takes longer")
@one_line_errors
def convert(
    source: Path | None,
    random: str | None,
    seed: int | None,
    tokenizer: Path | None,
    drafter: Path | None,
    name: str | None,
    bits: str | None,
    contexts: Any,
    widths: Any,
    target: str,
    layers_per_package: int | None,
    write_form: str,
    attention_form: str,
    report: bool,
) -> None:
    """Convert SOURCE to a bundle: a GGUF file, a safetensors directory, or the name of a downloaded checkpoint

    After an interruption the same command goes on with the packages that were finished.
    """
    if (source is None) == (random is None):
        raise click.UsageError("Give either SOURCE or --random MODEL.")
    if random is None and (seed is not None or tokenizer is not None):
        raise click.UsageError("--seed and --tokenizer go with --random only.")
    if name is not None:
        check_name(name)
    opened: Source | Path
    if source is not None:
        opened, name = _source_of(source, name)
    else:
        from llm_gemma_coreml.convert.random_source import RandomSource

        opened = RandomSource.of_model(str(random), seed or 0, tokenizer)
    from llm_gemma_coreml.convert.build import build_bundle
    from llm_gemma_coreml.progress import progress_bar

    with progress_bar() as progress:
        path = build_bundle(
            opened,
            name=name,
            bits=None if bits is None else int(bits),
            contexts=contexts,
            widths=widths,
            report=report,
            progress=progress,
            drafter=_drafter_of(drafter, random, seed or 0),
            target=target,
            layers_per_package=layers_per_package,
            write_form=write_form,
            attention_form=attention_form,
        )
    click.echo(f"Wrote {path}", err=True)
    click.echo(catalog.MODEL_PREFIX + path.name)


def _drafter_of(drafter: Path | None, random: str | None, seed: int) -> Source | Path | None:
    """The assistant to build in: one of random weights for a model of random weights."""
    if drafter is None or random is None:
        return None if drafter is None else _source_of(drafter, None)[0]
    if str(drafter) != "random":
        raise click.UsageError("With --random a drafter's weights are random too: --drafter random.")
    from llm_gemma_coreml.convert.random_source import RandomSource

    return RandomSource.of_assistant(random, seed)


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
