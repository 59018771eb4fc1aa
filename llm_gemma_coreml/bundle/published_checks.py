"""Checks that the packages of a published bundle declare what its configuration says: functions, inputs, outputs, states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from llm_gemma_coreml.bundle.manifest import Manifest, StateEntry, resolve_inside
from llm_gemma_coreml.bundle.package import Package, open_package
from llm_gemma_coreml.bundle.program import TensorType
from llm_gemma_coreml.bundle.published import REMEDY, PublishedConfig, read_published
from llm_gemma_coreml.errors import PackageError

_STATE_NAME = re.compile(r"([kv])_(\d{1,5})")
_FLOATS = ("float16", "float32")
Shape = tuple[int | None, ...]
"""None: any size that a call may have rows."""


def check_published_bundle(manifest: Manifest, folder: Path) -> None:
    """Check an installed bundle: its own two files, `bundle.json` and the packages agree. Raises BundleError, PackageError."""
    states = check_published_packages(read_published(folder).config, folder)
    if states != manifest.states:
        raise PackageError(f"The packages in {folder} declare other states than bundle.json. Install the bundle again.")


def check_published_packages(config: PublishedConfig, folder: Path) -> tuple[StateEntry, ...]:
    """Check all packages of the bundle in `folder`; returns the states that they declare, in the order of the layers.

    Reads every function, which takes seconds for a large bundle. Raises PackageError, BundleError.
    """
    states: list[StateEntry] = []
    for name, first, end in config.chunks:
        package = open_package(resolve_inside(folder, name))
        states += _checked_states(config, package, name, range(first, end))
        for window, function in config.functions:
            _check_function(package, function, _chunk_inputs(config, window), "hidden")
    head = open_package(resolve_inside(folder, config.head))
    _check_function(head, head.default_function, {"hidden": (None, config.hidden_size)}, "token")
    return tuple(states)


def _chunk_inputs(config: PublishedConfig, window: int) -> dict[str, Shape]:
    """The inputs of a chunk's function over that many slots of the full layers."""
    sliding, full = config.head_dim_sliding, config.head_dim_full
    return {
        "hidden_in": (None, config.hidden_size),
        "onehot_s": (None, config.ring_length),
        "onehot_f": (None, window),
        "cos_s": (None, sliding),
        "sin_s": (None, sliding),
        "cos_f": (None, full),
        "sin_f": (None, full),
        "mask_s": (None, config.ring_length),
        "mask_f": (None, window),
    }


def _check_function(package: Package, name: str, inputs: Mapping[str, Shape], output: str) -> None:
    found = package.declared_inputs(name)
    for key in sorted(found.keys() | inputs.keys()):
        if key not in inputs or key not in found or not _fits(found[key], inputs[key]):
            raise PackageError(
                f"{package.path}: function {name!r} has the input {key!r} as {_told(found.get(key))}, expected "
                f"{_told_shape(inputs.get(key))}. {REMEDY}"
            )
    outputs = package.functions[name].outputs
    if output not in outputs:
        raise PackageError(f"{package.path}: function {name!r} has the outputs {', '.join(outputs)}, but no {output!r}. {REMEDY}")


def _fits(found: TensorType, expected: Shape) -> bool:
    sizes_fit = all(want is None or have == want for have, want in zip(found.shape, expected, strict=False))
    flexible = all(have == -1 for have, want in zip(found.shape, expected, strict=False) if want is None)
    return found.dtype in _FLOATS and len(found.shape) == len(expected) and sizes_fit and flexible


def _told(found: TensorType | None) -> str:
    return "nothing" if found is None else f"{found.dtype} [{', '.join('rows' if n < 0 else str(n) for n in found.shape)}]"


def _told_shape(expected: Shape | None) -> str:
    return "no such input" if expected is None else f"[{', '.join('rows' if n is None else str(n) for n in expected)}]"


def _checked_states(config: PublishedConfig, package: Package, name: str, layers: range) -> list[StateEntry]:
    """The chunk's states: k_<layer> and v_<layer> of all its layers, fp16 [kv heads, rows, head dim]."""
    found = package.states()
    entries: list[StateEntry] = []
    for layer in layers:
        for state in (f"k_{layer}", f"v_{layer}"):
            if state not in found:
                raise PackageError(f"{package.path} has no state {state!r}. {REMEDY}")
            entries.append(_state_entry(config, package, name, state, found[state]))
    for state in found:
        match = _STATE_NAME.fullmatch(state)
        if match is None or int(match[2]) not in layers:
            raise PackageError(f"{package.path} has the state {state!r}, which belongs to none of its layers. {REMEDY}")
    return entries


def _state_entry(config: PublishedConfig, package: Package, path: str, state: str, found: TensorType) -> StateEntry:
    layer = int(state[2:])
    kind = config.layer_types[layer]
    sliding = kind == "sliding"
    rows, dim = (config.ring_length, config.head_dim_sliding) if sliding else (config.full_length, config.head_dim_full)
    heads = config.kv_heads_sliding if sliding else config.kv_heads_full
    shape = found.shape
    fits = len(shape) == 3 and shape[1:] == (rows, dim) and 1 <= shape[0] <= config.query_heads
    if found.dtype != "float16" or not fits or (heads is not None and shape[0] != heads):
        expected = f"float16 [{heads or 'kv heads'}, {rows}, {dim}]"
        raise PackageError(f"{package.path} declares the state {state!r} as {_told(found)}, expected {expected}. {REMEDY}")
    return StateEntry(state, path, layer, kind, (shape[0], rows, dim))
