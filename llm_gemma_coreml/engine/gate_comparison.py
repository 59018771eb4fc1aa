"""Compares a runtime that cannot promise equal bits (Core ML) with the portable one, gate by gate, and reports it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llm_gemma_coreml.bundle.inspection import is_palettised
from llm_gemma_coreml.bundle.manifest import MANIFEST_FILE, Manifest, load_manifest
from llm_gemma_coreml.engine.engine import open_runner
from llm_gemma_coreml.engine.gate_advice import advice, forms_of
from llm_gemma_coreml.engine.gate_agreement import RULE
from llm_gemma_coreml.engine.gate_checks import Subject
from llm_gemma_coreml.engine.gate_first_checks import FIRST_CHECKS
from llm_gemma_coreml.engine.gate_machine import machine_facts
from llm_gemma_coreml.engine.gate_pair import Check, Pair
from llm_gemma_coreml.engine.gate_report_file import ReportFile
from llm_gemma_coreml.engine.gate_results import GateResult
from llm_gemma_coreml.engine.gates import MARGIN_BOUND, Progress, files_are_whole, model_gates, run_gate, subject_of
from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Runtime

FILES = "files, states, weights shared"


def compare_with_portable(
    bundle_path: Path,
    runtime: Runtime | str,
    report: Path,
    *,
    full: bool = False,
    compute_units: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check `runtime` on an installed bundle and write the file `report`, which is returned as plain values too.

    If the process dies in a check, the same call leaves that check out and goes on. Raises BundleError if the bundle
    cannot be read, RequestError if `report` is another file, and what opening the runtimes raises.
    """
    manifest = load_manifest(bundle_path)
    heading = {"machine": machine_facts(), "bundle": _bundle_facts(bundle_path, manifest), "full": full}
    heading |= {"runtime": runtime if isinstance(runtime, str) else runtime.name, "compute_units": compute_units}
    file = ReportFile(report, heading, [str(bundle_path), str(bundle_path.resolve()), manifest.name])
    tell = progress or (lambda work, done, total: None)
    tell("Files", 0, 1)
    whole = file.run(FILES, lambda: _as_check(files_are_whole(manifest, bundle_path)))
    tell("Files", 1, 1)
    if whole.passed:
        _run_checks(bundle_path, runtime, file, full, tell)
    return file.finish(RULE.format(bound=MARGIN_BOUND), _advice(bundle_path, manifest, file))


def _run_checks(bundle_path: Path, runtime: Runtime | str, file: ReportFile, full: bool, tell: Progress) -> None:
    checked = open_runner(bundle_path, runtime=runtime)
    # Exact: its fast form rounds activations to 8 bits, which Core ML does not.
    reference = open_runner(bundle_path, runtime="portable", exact=True)
    try:
        pair = Pair(checked, reference, MARGIN_BOUND, full)
        subject = subject_of(checked, full)
        work: dict[str, Callable[[], Check]] = {name: partial(check, pair) for name, check in FIRST_CHECKS.items()}
        for gate in model_gates(checked.manifest):
            work[f"gate: {gate.__name__.replace('_', ' ')}"] = partial(_through_gate, gate, subject)
        for number, (name, check) in enumerate(work.items()):
            tell(name, number, len(work))
            file.run(name, partial(_timed, name, check))
        tell("Checks", len(work), len(work))
    finally:
        checked.close()
        reference.close()


def _timed(name: str, check: Callable[[], Check]) -> Check:
    """The check's result under the name of the report, with the time that it took; a run that breaks off is a failure."""
    started = time.perf_counter()
    try:
        found = check()
    except (GemmaCoreMLError, ValueError) as error:
        found = Check(name, False, f"broke off: {error}")
    return Check(name, found.passed, found.detail, found.figures | {"seconds": round(time.perf_counter() - started, 2)})


def _through_gate(gate: Callable[[Subject], GateResult], subject: Subject) -> Check:
    return _as_check(run_gate(gate, subject))


def _as_check(result: GateResult) -> Check:
    return Check(result.name, result.passed, result.detail, asdict(result))


def _advice(bundle_path: Path, manifest: Manifest, file: ReportFile) -> list[str]:
    if manifest.layout != "ladder" or any(check.name == FILES and not check.passed for check in file.checks):
        return []
    return advice(file.checks, forms_of(bundle_path, manifest), is_palettised(manifest))


def _bundle_facts(bundle_path: Path, manifest: Manifest) -> dict[str, Any]:
    """What the model is, without the names that a user may have chosen."""
    facts: dict[str, Any] = {
        key: getattr(manifest, key)
        for key in ("family", "layout", "hidden_size", "vocabulary_size", "quantisation", "rungs", "widths", "ring_capacity")
    }
    facts |= {"layers": len(manifest.layer_types), "packages": len(manifest.layer_packages)}
    facts["manifest_sha256"] = hashlib.sha256((bundle_path / MANIFEST_FILE).read_bytes()).hexdigest()
    if manifest.layout == "ladder":
        facts |= forms_of(bundle_path, manifest)
    return facts


def render(report: dict[str, Any]) -> str:
    """The report as a table for a terminal."""
    lines = [f"{'check':<60} verdict"]
    for check in report["checks"]:
        lines.append(f"{check['name']:<60} {'pass' if check['passed'] else 'FAIL'}")
        if check["detail"]:
            lines.append(f"    {check['detail']}")
    lines.append(report["rule"])
    lines += [f"To try: {line}" for line in report["advice"]]
    lines.append(f"{'All checks pass' if report['passed'] else 'A check FAILS'} on the runtime {report['runtime']!r}.")
    return "\n".join(lines)
