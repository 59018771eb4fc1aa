"""A plan as a picture: milliseconds by rung, and speed against acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_gemma_coreml.plotting import new_figure


def draw(facts: dict[str, Any], path: Path) -> None:
    """Write the picture of the figures of `facts.plan`; the form follows the ending of `path` (png, svg, pdf).

    Raises MissingDependencyError without matplotlib, OSError if it cannot be written.
    """
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    rungs = [f"{rung['rung']:,}" for rung in facts["rungs"]]
    for name, label in (("step", "about"), ("floor", "floor")):
        left.plot(rungs, [rung[name]["value"] for rung in facts["rungs"]], marker="o", label=label)
    for rows in facts["rungs"][0]["verify"]:
        left.plot(rungs, [rung["verify"][rows]["value"] for rung in facts["rungs"]], marker="o", label=f"{rows} rows")
    title = f"{facts['model']['name']}, {facts['device']['name']}"
    left.set(xlabel="rung (tokens)", ylabel="ms a call", ylim=(0, None), title=title)
    for case in facts["speculation"]:
        chances = [float(chance) for chance in case["speedups"]]
        label = f"{case['drafter']}, {case['rows']} rows, {case['rung']:,}"
        right.plot(chances, list(case["speedups"].values()), label=label)
    right.axhline(1, color="black", linewidth=0.5)
    right.set(xlabel="chance that a draft is accepted", ylabel="times as fast as plain decoding", title="Speculation")
    for axes in (left, right):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.supxlabel("computed; never measured on this device", fontsize="small")
    figure.savefig(path)
