"""The gates: checks with which anyone can see that a bundle computes what it should on their machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from llm_gemma_coreml.bundle.checksums import verify_files
from llm_gemma_coreml.bundle.inspection import check_packages
from llm_gemma_coreml.bundle.manifest import Manifest, load_manifest
from llm_gemma_coreml.engine import gate_checks
from llm_gemma_coreml.engine.engine import open_runner
from llm_gemma_coreml.engine.gate_checks import Subject
from llm_gemma_coreml.engine.gate_results import GateReport, GateResult
from llm_gemma_coreml.engine.gate_sampler import sampler_follows_distribution
from llm_gemma_coreml.engine.runner import Runner
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError
from llm_gemma_coreml.runtime.base import Runtime

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, gates done, gates in all)."""

BITWISE_RUNTIMES = frozenset({"portable"})
"""Runtimes that promise equal bits, however the tokens are cut into calls."""
BITWISE_LAYOUTS = frozenset({"ladder"})
"""Layouts whose packages can keep that promise."""
MARGIN_BOUND = 0.1
"""For other runtimes: tokens may differ where the runtime's own top-2 margin (logits) is below this."""

MODEL_GATES: tuple[Callable[[Subject], GateResult], ...] = (
    gate_checks.speculative_equals_plain,
    gate_checks.ring_equals_full_cache,
    gate_checks.block_prefill_equals_single_tokens,
    gate_checks.promoted_equals_wide,
    gate_checks.revisited_equals_fresh,
    gate_checks.sampled_equals_plain,
    sampler_follows_distribution,
)
LOGIT_GATES = (gate_checks.sampled_equals_plain, sampler_follows_distribution)
"""Gates that need a head which gives logits."""


def run_gates(
    bundle_path: Path, full: bool = False, progress: Progress | None = None, runtime: Runtime | str | None = None
) -> GateReport:
    """Run all gates on an installed bundle: the short set, or with `full` longer texts and every promotion.

    runtime: as for `Engine.open`. Files that do not match are a failed gate, and then the model is not run. Raises
    BundleError if the bundle cannot be read at all, and what the runtime raises.
    """
    manifest = load_manifest(bundle_path)
    report = progress or _no_progress
    report("Files", 0, 1)
    files = files_are_whole(manifest, bundle_path)
    report("Files", 1, 1)
    if not files.passed:
        return GateReport((files,), full, "none")
    runner = open_runner(bundle_path, runtime=runtime)
    try:
        results = run_model_gates(runner, full, report)
        return GateReport((files, *results), full, runner.runtime_name)
    finally:
        runner.close()


def run_model_gates(
    runner: Runner,
    full: bool = False,
    progress: Progress | None = None,
    gates: Sequence[Callable[[Subject], GateResult]] = MODEL_GATES,
) -> list[GateResult]:
    """Run the gates that need the model on an open one; those that need logits only if it gives them."""
    report = progress or _no_progress
    gates = model_gates(runner.manifest, gates)
    subject = subject_of(runner, full)
    results: list[GateResult] = []
    report("Gates", 0, len(gates))
    for gate in gates:
        results.append(run_gate(gate, subject))
        report("Gates", len(results), len(gates))
    return results


def model_gates(
    manifest: Manifest, gates: Sequence[Callable[[Subject], GateResult]] = MODEL_GATES
) -> list[Callable[[Subject], GateResult]]:
    """Those of `gates` that a bundle can be put through."""
    return [gate for gate in gates if manifest.head_output == "logits" or gate not in LOGIT_GATES]


def subject_of(runner: Runner, full: bool) -> Subject:
    """An open model for the gates; equal bits are asked of runtimes and layouts that promise them."""
    bitwise = runner.runtime_name in BITWISE_RUNTIMES and runner.manifest.layout in BITWISE_LAYOUTS
    return Subject(runner, 0.0 if bitwise else MARGIN_BOUND, full)


def run_gate(gate: Callable[[Subject], GateResult], subject: Subject) -> GateResult:
    """The gate's result; a run that breaks off is a failure."""
    try:
        return gate(subject)
    except (GemmaCoreMLError, ValueError) as error:
        return GateResult(gate.__name__.replace("_", " "), 0, 1, None, False, f"broke off: {error}")


def files_are_whole(manifest: Manifest, bundle_path: Path) -> GateResult:
    """Every file has its SHA-256; states are declared alike in all functions; weights are stored once."""
    name = "files, states, weights shared"
    try:
        verify_files(manifest, bundle_path)
        check_packages(manifest, bundle_path)
    except BundleError as error:
        return GateResult(name, 0, 1, None, False, str(error))
    return GateResult(name, 0, 0, None, True, f"{len(manifest.files)} files")


def _no_progress(work: str, done: int, total: int) -> None:
    return None
