"""The command `verify`."""

from __future__ import annotations

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.command_types import as_json, bundle_name, one_line_errors, write_json


@click.command()
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
