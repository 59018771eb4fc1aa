"""All figures of a plan: one model on one device, as plain values for JSON, tables and pictures."""

from __future__ import annotations

from typing import Any

from llm_gemma_coreml.convert.target import MOST_STATES, NEURAL_ENGINE_BYTES
from llm_gemma_coreml.planning import step
from llm_gemma_coreml.planning.devices import Device
from llm_gemma_coreml.planning.figures import Basis, Figure, computed
from llm_gemma_coreml.planning.shapes import ModelShape, expanded
from llm_gemma_coreml.planning.speculation import ACCEPTANCES, break_even, speedup, tokens_per_round

_VERIFY_ROWS = (4, 8)
_MOST_VERIFY_ROWS = 16
"""Wider functions are there for prompts."""
_PROMPT = 1000


def plan(shape: ModelShape, device: Device) -> dict[str, Any]:
    """The plan of `shape` on `device`. Each figure is {"value", "unit", "basis", "source"}; rungs are in order."""
    said = []
    if device.kind == "here" and shape.palettised:
        said.append(f"The portable runtime expands palettised weights to fp32; {shape.weight_bytes / 1e6:,.0f} MB are stored.")
        shape = expanded(shape)
    return {
        "model": {
            "name": shape.name,
            "origin": shape.origin,
            "layout": shape.layout,
            "weights": _figure(shape.weight_bytes, "bytes", shape.weights_basis, shape.origin),
            "other": _figure(shape.extra_bytes, "bytes", shape.weights_basis, shape.origin),
            "packages": _packages(shape),
        },
        "device": _device(device),
        "fits": fits(shape, device),
        "rungs": [_rung(shape, device, rung) for rung in shape.rungs],
        "speculation": _speculation(shape, device),
        "remarks": [*remarks(shape, device), *said],
    }


def verify_rows(shape: ModelShape) -> tuple[int, ...]:
    """Rows of the verify calls that are planned: 4 and 8, or what the bundle has functions for."""
    if shape.layout == "published":  # its packages take any number of rows
        return _VERIFY_ROWS
    offered = [rows for rows in shape.widths if 1 < rows <= _MOST_VERIFY_ROWS]
    return tuple(rows for rows in _VERIFY_ROWS if rows in offered) or tuple(offered[-2:])


def _packages(shape: ModelShape) -> dict[str, Any]:
    facts: dict[str, Any] = {"count": shape.packages, "widths": list(shape.widths), "any_width": shape.layout == "published"}
    if shape.states is not None:
        facts["states"] = shape.states
    if shape.largest_package is not None:
        facts["largest"] = _figure(shape.largest_package, "bytes", shape.weights_basis, shape.origin)
    return facts


def remarks(shape: ModelShape, device: Device) -> list[str]:
    """What the figures do not say: how prompts are read without a wide function, and what a phone's processors take."""
    said = []
    widest = shape.widths[-1]
    if widest <= _MOST_VERIFY_ROWS:
        seconds = -(-_PROMPT // widest) * step.call_milliseconds(shape, device, shape.rungs[0], widest) / 1000
        said.append(f"A prompt is read {widest} tokens a call: about {seconds:.0f} s for {_PROMPT:,} tokens (c).")
    if device.kind != "iphone" or shape.layout == "published":
        return said
    if (shape.states or 0) > MOST_STATES or (shape.largest_package or 0) > NEURAL_ENGINE_BYTES:
        remedy = "" if shape.palettised else ": see --target iphone"
        said.append(
            f"The Neural Engine is reported to take packages of at most {MOST_STATES} states and about "
            f"{NEURAL_ENGINE_BYTES / 1e9:g} GB (p); others run on the GPU{remedy}."
        )
    elif not shape.palettised:
        said.append(
            "Block weights are reported to run on the CPU of an iPhone, not on its Neural Engine (p): see --target iphone."
        )
    else:
        said.append(
            "Palettised weights are counted as they are stored. Reports differ on whether the Neural Engine holds them so (p)."
        )
    return said


def _figure(value: float, unit: str, basis: Basis = "computed", source: str = "") -> dict[str, Any]:
    return Figure(value, unit, basis, source).as_dict()


def _device(device: Device) -> dict[str, Any]:
    known = {
        "bandwidth": device.bandwidth,
        "efficiency": device.efficiency,
        "dispatch": device.dispatch,
        "four_rows": device.verify_ratio,
        "flash": device.flash,
    }
    figures = {name: figure.as_dict() for name, figure in known.items() if figure is not None}
    return {"name": device.name, "memory_gb": list(device.memory), **figures}


def fits(shape: ModelShape, device: Device) -> str:
    """Whether the model fits the device's memory at its smallest rung, in words."""
    needed = shape.memory_bytes(shape.rungs[0])
    share = device.usable_memory / max(device.memory) / 1e9
    enough = [size for size in device.memory if size * 1e9 * share >= needed]
    if enough:
        return f"yes, with {enough[0]} GB or more" if len(device.memory) > 1 else "yes"
    if device.flash is not None:
        return "no: weights would have to be read from flash again for each call, as some apps do"
    return f"no: it needs {needed / 1e9:.1f} GB, and {device.usable_memory / 1e9:.0f} GB can be used at most"


def _rung(shape: ModelShape, device: Device, rung: int) -> dict[str, Any]:
    once, moved = step.bytes_once(shape, rung), step.bytes_moved(shape, rung)
    plain = step.call_milliseconds(shape, device, rung)
    reads = {
        "body": _figure(once.body, "bytes", shape.weights_basis),
        "head": _figure(once.head, "bytes", shape.weights_basis),
        "ring": _figure(once.ring, "bytes"),
        "full": _figure(once.full, "bytes"),
        "total": _figure(once.total, "bytes"),
    }
    return {
        "rung": rung,
        "cache": _figure(shape.cache_bytes(rung), "bytes"),
        "memory": _figure(shape.memory_bytes(rung), "bytes"),
        "reads": reads,
        "moves": _figure(moved.total, "bytes"),
        "floor": _figure(step.floor_milliseconds(shape, device, rung), "ms/token"),
        "step": _figure(plain, "ms/token"),
        "rate": _figure(1000 / plain, "tokens/s"),
        "verify": {str(rows): _figure(step.call_milliseconds(shape, device, rung, rows), "ms") for rows in verify_rows(shape)},
        "draft": _figure(step.draft_milliseconds(shape, device, rung), "ms"),
        "load_bound": step.is_load_bound(shape, device, rung),
    }


def _speculation(shape: ModelShape, device: Device) -> list[dict[str, Any]]:
    """Speed against acceptance at the smallest and the largest rung, for each drafter and width."""
    drafters = [("prompt lookup", 0.0)]
    if shape.drafter_bytes is not None:
        drafters.append(("assistant", 1.0))
    found = []
    for rung in sorted({shape.rungs[0], shape.rungs[-1]}):
        plain = step.call_milliseconds(shape, device, rung)
        for name, share in drafters:
            for rows in verify_rows(shape):
                verify = step.call_milliseconds(shape, device, rung, rows)
                drafting = share * (rows - 1) * step.draft_milliseconds(shape, device, rung)
                found.append(
                    {
                        "drafter": name,
                        "rung": rung,
                        "rows": rows,
                        "break_even": break_even(rows - 1, plain, verify, drafting),
                        "speedups": {
                            str(chance): round(speedup(tokens_per_round(chance, rows - 1), plain, verify, drafting), 3)
                            for chance in ACCEPTANCES
                        },
                    }
                )
    return found


def time_by_part(shape: ModelShape, device: Device, rung: int) -> dict[str, Figure]:
    """Milliseconds of one call by what takes them."""
    moved = step.bytes_moved(shape, rung)
    reached = device.bandwidth.value * device.efficiency.value * 1e6
    parts = {"layers' weights": moved.body, "head's weights": moved.head, "ring K/V": moved.ring, "full K/V": moved.full}
    times = {name: computed(count / reached, "ms") for name, count in parts.items()}
    times["starting packages"] = computed(shape.packages * device.dispatch.value, "ms")
    if step.is_load_bound(shape, device, rung):
        times["loading weights"] = computed(step.load_milliseconds(shape, device), "ms")
    return times
