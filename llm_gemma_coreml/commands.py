"""The command group `llm gemma-coreml`. Everything slow is imported by the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.benchmark.command import bench
from llm_gemma_coreml.bundle.store import InstalledBundle, check_name, list_bundles
from llm_gemma_coreml.command_types import (
    BundleName,
    Counts,
    as_json,
    bundle_name,
    one_line_errors,
    write_json,
)


@click.group("gemma-coreml")
def gemma_coreml() -> None:
    """Commands for working with Gemma Core ML bundles"""


@gemma_coreml.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the bundle; default: from the source")
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits per weight; default: by the model's size")
@click.option("--contexts", type=Counts(), default="4096,32768,131072", show_default=True, help="Rungs")
@click.option("--widths", type=Counts(), default="1,2,4,8,128", show_default=True, help="Rows per call")
@click.option("--report", is_flag=True, help="Compare the quantised model with the source; takes longer")
@one_line_errors
def convert(source: Path, name: str | None, bits: str | None, contexts: Any, widths: Any, report: bool) -> None:
    """Convert a GGUF file or a safetensors directory SOURCE to a bundle"""
    if name is not None:
        check_name(name)
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


@gemma_coreml.command()
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
    for known in catalog.KNOWN_MODELS:
        if known.name not in {bundle.name for bundle in installed}:
            click.echo(f"{known.name}: {known.description}. {known.download}, {known.licence}")
            how = known.commands or ("(cannot be installed by this release)",)
            for line in ("Not installed:", *how):
                click.echo(f"  {line}")


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


@gemma_coreml.command()
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


@gemma_coreml.command()
@bundle_name
@click.option("-y", "--yes", is_flag=True, help="Do not ask")
@one_line_errors
def remove(name: str, yes: bool) -> None:
    """Delete the bundle NAME from the disk"""
    from llm_gemma_coreml.bundle import store

    bundle = catalog.installed_bundle(name)
    if not yes:
        click.confirm(f"Delete {bundle.path} ({bundle.size / 1e6:,.0f} MB)?", abort=True, err=True)
    store.remove_bundle(bundle.name)
    click.echo(f"Removed {bundle.name}", err=True)


@gemma_coreml.command()
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


@gemma_coreml.command()
@bundle_name
@click.option("--full", is_flag=True, help="Longer texts, every promotion; takes minutes")
@as_json
@one_line_errors
def verify(name: str, full: bool, as_json: bool) -> None:
    """Check on this machine that the bundle NAME computes what it should

    Exit code 1 if a check fails.
    """
    bundle = catalog.installed_bundle(name)
    from llm_gemma_coreml.engine.gates import run_gates
    from llm_gemma_coreml.progress import progress_bar

    with progress_bar() as progress:
        report = run_gates(bundle.path, full=full, progress=progress)
    if as_json:
        write_json(report.as_dict())
    else:
        click.echo(report.render())
    if not report.passed:
        raise SystemExit(1)


gemma_coreml.add_command(bench)
