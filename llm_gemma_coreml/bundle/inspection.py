"""What is in a bundle: facts for people, and the checks that its packages are what the manifest says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm_gemma_coreml.bundle.manifest import (
    Manifest,
    assistant_function_name,
    head_function_name,
    layers_function_name,
    load_manifest,
)
from llm_gemma_coreml.bundle.package import Package, open_package
from llm_gemma_coreml.bundle.program import TensorType
from llm_gemma_coreml.errors import PackageError

_REMEDY = "Convert the model again."
_STATE_ITEM_BYTES = 2
_BLOB_OVERHEAD_BYTES = 128
"""A blob's header and at most as much padding."""
_UNSHARED_FRACTION = 0.01
_UNSHARED_BYTES = 16384
"""Small tables may differ between functions; weights may not."""


def check_packages(manifest: Manifest, bundle_path: Path) -> None:
    """Check every package of a bundle of ours against the manifest.

    All functions declare the same states with the manifest's shapes; a function exists for each rung and
    width; the weights are stored once, shared by all functions, and the size of the weight files shows it.
    Reads every function, which takes seconds for a large bundle. Raises PackageError.
    """
    if manifest.layout == "published":
        from llm_gemma_coreml.bundle.published_checks import check_published_bundle

        check_published_bundle(manifest, bundle_path)
        return
    for entry in manifest.layer_packages:
        package = open_package(bundle_path / entry.path)
        names = [layers_function_name(rung, width) for rung in manifest.rungs for width in manifest.widths]
        states = {s.name: TensorType("float16", s.shape) for s in manifest.states if s.package == entry.path}
        drafting = _assistant_functions(manifest, entry.path)
        _check_functions(package, [*names, *drafting])
        _check_states(package, states)
        check_shared_weights(package, drafting)
    head = open_package(bundle_path / manifest.head_package)
    _check_functions(head, [head_function_name(width) for width in manifest.head_widths])
    _check_states(head, {})
    check_shared_weights(head)


def _assistant_functions(manifest: Manifest, package: str) -> list[str]:
    """Names of the assistant's functions in that package; none if it is elsewhere, or if there is none."""
    held = manifest.drafter is not None and manifest.drafter.path == package
    return [assistant_function_name(rung) for rung in manifest.rungs] if held else []


def _check_functions(package: Package, expected: Iterable[str]) -> None:
    missing = [name for name in expected if name not in package.functions]
    if missing:
        raise PackageError(f"{package.path} lacks the functions {', '.join(missing)}. {_REMEDY}")


def _check_states(package: Package, expected: dict[str, TensorType]) -> None:
    found = package.states()
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise PackageError(
                f"{package.path} declares the state {name!r} as {found.get(name)}, the manifest as "
                f"{expected.get(name)}. {_REMEDY}"
            )


def check_shared_weights(package: Package, apart: Collection[str] = ()) -> None:
    """Check that all functions use the same blobs, and that the weight files hold little else.

    apart: functions of another model in the same package; they share among themselves.
    Raises PackageError with the counts of bytes.
    """
    used = {name: blob_sizes(package, name) for name in package.functions}
    distinct = {place: size for blobs in used.values() for place, size in blobs.items()}
    total = sum(distinct.values())
    groups = [[used[name] for name in used if (name in apart) == other] for other in (False, True)]
    lonely = {place for group in groups for blobs in group for place in blobs if not all(place in each for each in group)}
    unshared = sum(distinct[place] for place in lonely)
    allowed = max(_UNSHARED_BYTES, int(total * _UNSHARED_FRACTION))
    if unshared > allowed:
        raise PackageError(
            f"{package.path}: {unshared} of {total} bytes of weights are not shared by all functions. "
            f"{_REMEDY}"
        )
    stored = weight_bytes(package.path)
    if stored > total + allowed + _BLOB_OVERHEAD_BYTES * (len(distinct) + 1):
        raise PackageError(
            f"{package.path}: the weight files have {stored} bytes, the functions use {total}. "
            f"{_REMEDY}"
        )


def blob_sizes(package: Package, function: str) -> dict[tuple[str, int], int]:
    """Bytes of each weight that a function uses, by file and offset."""
    blobs = (constant.blob for constant in package.functions[function].all_constants())
    return {(blob.file, blob.data_offset): blob.size for blob in blobs if blob is not None}


def weight_bytes(package_path: Path) -> int:
    """Bytes of all weight files of the package."""
    return sum(file.stat().st_size for file in open_package(package_path).weight_files())


def is_palettised(manifest: Manifest) -> bool:
    """Whether the layers' weights are indices into tables, as `convert --target iphone` makes them."""
    return "palettes" in manifest.quantisation.get("body", "")


def cache_bytes(manifest: Manifest) -> tuple[int, int]:
    """Bytes of K/V: of the rings (constant), and what each token of context adds in full layers."""
    ring = per_token = 0
    for state in manifest.states:
        heads, rows, head_dim = state.shape
        if state.kind == "sliding":
            ring += heads * rows * head_dim * _STATE_ITEM_BYTES
        else:
            per_token += heads * head_dim * _STATE_ITEM_BYTES
    return ring, per_token


def inspect(bundle_path: Path) -> dict[str, Any]:
    """Facts about the bundle, ready for JSON. Sizes are bytes; windows and rungs are tokens.

    Reads the manifest and the packages' declarations, no operations. Raises BundleError.
    """
    manifest = load_manifest(bundle_path)
    ring, per_token = cache_bytes(manifest)
    return {
        "name": manifest.name,
        "path": str(bundle_path),
        "family": manifest.family,
        "template": manifest.template_kind,
        "layout": manifest.layout,
        "source": manifest.source,
        "licence": manifest.licence,
        "licence_url": manifest.licence_url,
        "vocabulary": manifest.vocabulary_size,
        "hidden_size": manifest.hidden_size,
        "layers": {kind: manifest.layer_types.count(kind) for kind in ("sliding", "full")},
        "sliding_window": manifest.sliding_window,
        "ring_capacity": manifest.ring_capacity,
        "rungs": list(manifest.rungs),
        "widths": list(manifest.widths),
        "quantisation": manifest.quantisation,
        "drafter": None if manifest.drafter is None else asdict(manifest.drafter),
        "packages": [_package_facts(bundle_path, path) for path in manifest.package_paths()],
        "cache": {
            "ring_bytes": ring,
            "bytes_per_token": per_token,
            "rungs": [{"rung": rung, "bytes": ring + rung * per_token} for rung in manifest.rungs],
        },
        "bytes": sum(entry.size for entry in manifest.files),
        "notes": list(manifest.notes),
    }


def _package_facts(bundle_path: Path, relative: str) -> dict[str, Any]:
    if not relative.endswith(".mlpackage"):  # a compiled form, which only Core ML reads
        return {"path": relative, "functions": [], "states": {}, "weight_bytes": 0}
    package = open_package(bundle_path / relative)
    return {
        "path": relative,
        "functions": sorted(package.functions, key=_natural_order),
        "states": {name: [state.dtype, *state.shape] for name, state in package.states().items()},
        "weight_bytes": weight_bytes(package.path),
    }


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Sorts "width_2" before "width_128"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", name)]


def render(facts: dict[str, Any]) -> str:
    """The facts of `inspect` as text for a terminal."""
    layers, cache = facts["layers"], facts["cache"]
    quantised = ", ".join(f"{part} {how}" for part, how in facts["quantisation"].items())
    lines = [
        f"{facts['name']} ({facts['family']}, template {facts['template']}, layout {facts['layout']})",
        f"  folder      {facts['path']}, {_megabytes(facts['bytes'])}",
        f"  source      {facts['source']}",
        f"  licence     {facts['licence']} {facts['licence_url']}".rstrip(),
        f"  layers      {layers['sliding']} sliding (window {facts['sliding_window']}, "
        f"ring of {facts['ring_capacity']} slots), {layers['full']} full; hidden size {facts['hidden_size']}",
        f"  vocabulary  {facts['vocabulary']} tokens",
        f"  weights     {quantised}",
    ]
    if (drafter := facts["drafter"]) is not None:
        lines.append(
            f"  drafter     assistant of {drafter['layers']} layers, hidden size {drafter['hidden_size']}, in {drafter['path']}; "
            f"reads K/V of layers {drafter['sliding_source_layer']} and {drafter['full_source_layer']}; {drafter['source']}"
        )
    for package in facts["packages"]:
        lines.append(f"  package     {package['path']}: {_megabytes(package['weight_bytes'])} of weights")
        lines.append(f"    functions {', '.join(package['functions'])}")
        lines += [f"    states    {text}" for text in _grouped_states(package["states"])]
    lines.append(
        f"  K/V memory  {_megabytes(cache['ring_bytes'])} of rings, "
        f"and {cache['bytes_per_token']} bytes for each token of context"
    )
    lines += [f"    {entry['rung']:>9} tokens: {_megabytes(entry['bytes'])}" for entry in cache["rungs"]]
    lines += [f"  note        {note}" for note in facts["notes"]]
    return "\n".join(lines)


def _grouped_states(states: dict[str, list[Any]]) -> list[str]:
    """One line for all states of the same type and shape."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, (dtype, *shape) in states.items():
        groups.setdefault((dtype, *shape), []).append(name)
    return [f"{dtype}{shape}: {', '.join(names)}" for (dtype, *shape), names in groups.items()]


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
