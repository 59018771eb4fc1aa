"""What to try when a check of Core ML fails: the builder's risky choices, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llm_gemma_coreml.bundle.manifest import Manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.engine import gate_first_checks as first
from llm_gemma_coreml.engine.gate_pair import Check

_AGAIN = "convert SOURCE --name OTHER-NAME"
_FEWER_LAYERS = "fewer layers in a package (--layers-per-package 6)"
_ONE_FUNCTION = "one function in each package (--widths 1 --contexts 1024)"
_SEND = "please send the report: nobody has seen this yet"


def forms_of(bundle_path: Path, manifest: Manifest) -> dict[str, str]:
    """How the bundle's packages write rows and form attention, found in their operations: {"write_form", "attention_form"}."""
    package = open_package(bundle_path / manifest.layer_packages[0].path)
    types = {operation.type for operation in package.functions[next(iter(package.functions))].operations}
    writes = "slice_update" if "slice_update" in types else "gather" if "gather" in types else "one_hot"
    attention = "sdpa" if "scaled_dot_product_attention" in types else "explicit"
    return {"write_form": writes, "attention_form": attention}


def advice(checks: Sequence[Check], forms: dict[str, str], phone: bool = False) -> list[str]:
    """What to try, the most likely first; nothing if all checks pass. phone: made with `--target iphone`."""
    failed = {check.name: check for check in checks if not check.passed}
    if not failed:
        return []
    write, attention = _other_write(forms["write_form"]), _other_attention(forms["attention_form"])
    again = f"{_AGAIN} --target iphone" if phone else _AGAIN
    lines: list[str] = []
    if first.LOADING in failed:
        smaller = _ONE_FUNCTION if phone else _FEWER_LAYERS
        lines += [f"It does not load. Try {again} {write}; then {attention}; then {smaller}."]
    if first.WRITES in failed:
        lines += [f"Rows go to wrong places. Try {again} {write}."]
    elif first.SHARING in failed and not {first.WIDTHS, first.RUNGS} & set(failed):
        lines += [f"A state does not pass from one function to another. Try {again} --widths 1 --contexts 4096, and {_SEND}."]
    wrong_widths = _wrong_widths(failed.get(first.WIDTHS))
    if wrong_widths and first.WRITES not in failed:
        known = "" if min(wrong_widths) < 10 else " (macOS 26.2 is known to compute fused attention wrongly from 10 rows on)"
        lines += [f"Widths {', '.join(map(str, wrong_widths))} compute something else{known}. Try {again} {attention}."]
    if any(_not_finite(check) for check in failed.values()):
        lines += [f"There are infinite or undefined values: fp16 overflows somewhere. Try {again} {attention}, and {_SEND}."]
    if any("ended in the middle" in check.detail for check in failed.values()):
        lines += [f"The process crashed. Try --compute-units all, then {again} {write}, then {attention}."]
    if not lines:
        lines += [f"Try {again} {attention}, then {write}; if the margins of the differing positions are small, {_SEND}."]
    return lines


def _other_write(present: str) -> str:
    return " or ".join(f"--write-form {form}" for form in ("slice_update", "one_hot", "gather") if form != present)


def _other_attention(present: str) -> str:
    return f"--attention-form {'sdpa' if present == 'explicit' else 'explicit'}"


def _wrong_widths(check: Check | None) -> list[int]:
    widths = {} if check is None else check.figures.get("widths", {})
    return [int(width) for width, figures in widths.items() if not figures["passed"]]


def _not_finite(check: Check) -> bool:
    parts = [check.figures, *check.figures.get("widths", {}).values(), *check.figures.get("rungs", {}).values()]
    return any(part.get("not_finite") for part in parts)
