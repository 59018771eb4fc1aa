"""The command `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.command_types import as_json, bundle_name, one_line_errors, write_json

REPORT = click.Path(dir_okay=False, path_type=Path)
UNITS = ("cpuAndGPU", "all", "cpuAndNeuralEngine", "cpuOnly")


@click.command()
@bundle_name
@click.option("--full", is_flag=True, help="Longer texts, every promotion; takes minutes")
@click.option("--runtime", help="Check this runtime instead of the usual one; coreml is compared with the portable one")
@click.option("--report", type=REPORT, default="coreml-report.json", show_default=True, help="What --runtime coreml writes")
@click.option("--compute-units", type=click.Choice(UNITS), help="Where Core ML runs the packages")
@as_json
@one_line_errors
def verify(name: str, full: bool, runtime: str | None, report: Path, compute_units: str | None, as_json: bool) -> None:
    """Check on this machine that the bundle NAME computes what it should

    With --runtime coreml (on a Mac): checks Core ML against the portable runtime on the same bundle, gate by gate, and writes
    one report file without personal data, to be sent with a bug report. If the process crashes, run the command again: it
    leaves out what crashed.

    Exit code 1 if a check fails.
    """
    bundle = catalog.installed_bundle(name)
    if runtime == "coreml":
        found = _compare(bundle.path, full, report, compute_units)
        if as_json:
            write_json(found)
        passed = bool(found["passed"])
    else:
        passed = _run_gates(bundle.path, full, runtime, as_json)
    if not passed:
        raise SystemExit(1)


def _run_gates(bundle_path: Path, full: bool, runtime: str | None, as_json: bool) -> bool:
    from llm_gemma_coreml.engine.gates import run_gates
    from llm_gemma_coreml.progress import progress_bar

    with progress_bar() as progress:
        report = run_gates(bundle_path, full=full, progress=progress, runtime=runtime)
    if as_json:
        write_json(report.as_dict())
    else:
        click.echo(report.render())
    return report.passed


def _compare(bundle_path: Path, full: bool, report: Path, compute_units: str | None) -> dict[str, Any]:
    from llm_gemma_coreml.engine.engine import choose_runtime
    from llm_gemma_coreml.engine.gate_comparison import compare_with_portable, render
    from llm_gemma_coreml.progress import progress_bar
    from llm_gemma_coreml.runtime.coreml import CoreMLRuntime
    from llm_gemma_coreml.runtime.coreml.compute_units import choose_compute_units

    choose_runtime("coreml")  # says why, where it is not available
    units = choose_compute_units(compute_units)
    with progress_bar() as progress:
        found = compare_with_portable(
            bundle_path, CoreMLRuntime(units), report, full=full, compute_units=units, progress=progress
        )
    click.echo(render(found), err=True)
    click.echo(f"Wrote {report}: please send it with your report, whatever it says.", err=True)
    return found
