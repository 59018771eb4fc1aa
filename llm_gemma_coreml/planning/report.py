"""A plan as text for a terminal: a table that marks where each figure comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llm_gemma_coreml.planning import step
from llm_gemma_coreml.planning.devices import Device
from llm_gemma_coreml.planning.facts import time_by_part
from llm_gemma_coreml.planning.figures import MARKS
from llm_gemma_coreml.planning.published_runs import Comparison
from llm_gemma_coreml.planning.shapes import ModelShape

_CHANCES = ("0.0", "0.4", "0.6", "0.8", "1.0")


def render(facts: dict[str, Any]) -> str:
    """The figures of `facts.plan` as a table."""
    return "\n".join([*_heading(facts), "", *_rungs(facts), "", *_speculation(facts), "", *_notes(facts)])


def _heading(facts: dict[str, Any]) -> Iterator[str]:
    model, device = facts["model"], facts["device"]
    sizes = " or ".join(str(size) for size in device["memory_gb"])
    yield f"{model['name']} on {device['name']}"
    yield f"  model     {_bytes(model['weights'])} of weights, from {model['origin']}"
    if model["other"]["value"]:
        yield f"            {_bytes(model['other'])} besides (embedding table, drafter)"
    yield f"  packages  {_packages(model['packages'])}"
    yield f"  device    {_of(device['bandwidth'])} of memory bandwidth, {sizes} GB of memory"
    yield f"  fits      {facts['fits']}"


def _packages(facts: dict[str, Any]) -> str:
    text = str(facts["count"])
    if "largest" in facts:
        text += f", the largest with {_bytes(facts['largest'])} of weights"
    if "states" in facts:
        text += f", up to {facts['states']} states in one"
    widths = f"1 to {facts['widths'][-1]}" if facts["any_width"] else ", ".join(map(str, facts["widths"]))
    return f"{text}; {widths} rows a call"


def _rungs(facts: dict[str, Any]) -> Iterator[str]:
    head = ["rung", "K/V", "memory", "layers", "head", "ring", "full", "floor", "about", "tokens/s"]
    calls = facts["rungs"][0]["verify"]
    rows = [[*head, *(f"{rows} rows" for rows in calls)]]
    rows.append(["", "", "", "read:", "", "", "", "ms", "ms", "", *("ms" for _ in calls)])
    for rung in facts["rungs"]:
        reads = (_bytes(rung["reads"][part]) for part in ("body", "head", "ring", "full"))
        times = (_of(rung[name], unit=False) for name in ("floor", "step", "rate"))
        verify = (_of(figure, unit=False) for figure in rung["verify"].values())
        rows.append([f"{rung['rung']:,}", _bytes(rung["cache"]), _bytes(rung["memory"]), *reads, *times, *verify])
    yield from _table(rows)


def _speculation(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["speculation"]:
        yield "Speculation: none, its packages have no function for a few rows"
        return
    yield "Speculation: times faster than plain decoding, by the chance that a draft is accepted (c)"
    rows = [["drafter", "rung", "rows", "pays from", *_CHANCES]]
    for case in facts["speculation"]:
        pays = "never" if case["break_even"] is None else f"{case['break_even']:.2f}"
        speedups = (f"{case['speedups'][chance]:.2f}x" for chance in _CHANCES)
        rows.append([case["drafter"], f"{case['rung']:,}", str(case["rows"]), pays, *speedups])
    yield from _table(rows)


def _notes(facts: dict[str, Any]) -> Iterator[str]:
    yield "c computed, m measured, p published. floor: everything read once at the full bandwidth. about: the bytes that the"
    yield "layout moves, at the share of the bandwidth that decoders reach, and the start of each package. Sources:"
    for name in ("bandwidth", "efficiency", "dispatch", "four_rows", "flash"):
        if (figure := facts["device"].get(name)) and figure.get("source"):
            yield f"  {name.replace('_', ' ')}: {figure['value']:g} {figure['unit']}, {figure['basis']}: {figure['source']}"
    yield from facts["remarks"]
    yield "No Apple device has run our packages yet. `llm gemma-coreml bench` measures instead of computing."


def why_far_from_the_floor(shape: ModelShape, device: Device, ours: ModelShape) -> str:
    """Where the time of the published layout goes, and what our ladder does instead."""
    rung = shape.rungs[0]
    floor, about = step.floor_milliseconds(shape, device, rung), step.call_milliseconds(shape, device, rung)
    parts = ", ".join(f"{name} {figure.value:.1f}" for name, figure in time_by_part(shape, device, rung).items())
    full, sliding = step.passes(shape, shape.full), step.passes(shape, shape.sliding)
    better = ", ".join(
        f"{rung:,}: {step.call_milliseconds(ours, device, rung):.0f} ms (floor {step.floor_milliseconds(ours, device, rung):.0f})"
        for rung in ours.rungs
    )
    group = shape.full.group
    return "\n".join(
        [
            f"Why {about:.0f} ms and not {floor:.0f} at {rung:,} tokens (c), in ms: {parts}.",
            f"  The published graph goes over all slots of the full layers about {full:g} times a call, over the ring",
            f"  {sliding:g} times: rows are written by one-hot products over the whole buffer ({step.ONE_HOT_PASSES} passes),",
            f"  and K/V is repeated for each of the {group} query heads that share it (1 + 2 x {group} passes).",
            "  That follows from its inputs; its graph was not seen.",
            "  The time grows with the rung, not with the conversation.",
            "  What our ladder does instead: rows are written where they belong (slice update), the query heads of a group share",
            f"  one product, rungs begin at {ours.rungs[0]:,}. The same model in our layout, by rung (c):",
            f"  {better}.",
        ]
    )


def render_comparisons(pairs: Sequence[Comparison]) -> str:
    """The published figures beside ours."""
    rows = [["measured by others", "theirs (p)", "ours (c)", "off by", ""]]
    for pair in pairs:
        said = "" if pair.reproduced else "not reproduced"
        rows.append([pair.what, f"{pair.theirs:.4g} {pair.unit}", f"{pair.ours:.3g} {pair.unit}", f"{pair.error:+.0%}", said])
    remarks = [f"  {pair.what}: {pair.remark}" for pair in pairs if pair.remark]
    sources = dict.fromkeys(f"  {pair.source}" for pair in pairs)
    return "\n".join([*_table(rows), "Remarks:", *remarks, "Sources:", *sources])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        is_number = row[0].replace(",", "").isdigit()
        yield "  ".join([first if is_number else row[0].ljust(widths[0]), *rest]).rstrip()


def _bytes(figure: dict[str, Any]) -> str:
    value = figure["value"]
    text = f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
    return f"{text} {MARKS[figure['basis']]}"


def _of(figure: dict[str, Any], unit: bool = True) -> str:
    value = figure["value"]
    text = f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    return f"{text}{' ' + figure['unit'] if unit else ''} {MARKS[figure['basis']]}"
