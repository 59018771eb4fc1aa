"""A benchmark's figures as ratios, as text and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_gemma_coreml.plotting import new_figure

BUSY = 0.5
"""Load average before the measurement above which its times are not those of an idle machine."""


def ratios(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How many times faster `ours` is (above 1: faster), and how many times its memory (below 1: less)."""
    return {
        "prefill": {n: round(speed / other["prefill"][n], 2) for n, speed in ours["prefill"].items()},
        "calls": {
            depth: {k: round(other["calls"][depth][k] / ms, 2) for k, ms in by_rows.items()}
            for depth, by_rows in ours["calls"].items()
        },
        "load": round(other["load_seconds"] / ours["load_seconds"], 2),
        "memory": {
            kind: round(size / other["memory"][kind], 2) for kind, size in ours["memory"].items() if kind in other["memory"]
        },
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table: one column per side, and the ratio if there are two."""
    machine = report["machine"]
    lines = [f"{machine['processor']}, {machine['cores']} cores, {report['threads']} threads; medians"]
    if machine["load_average"] > BUSY:
        lines.append(f"The machine was busy (load average {machine['load_average']}): trust the ratios at most.")
    names = list(report["sides"])
    width = max(14, *map(len, names)) + 2
    heads = [*names, "ratio"] if len(names) == 2 else names
    lines.append(" " * 26 + "".join(f"{name:>{width}}" for name in heads))
    for label, cells in _rows(report):
        lines.append(f"{label:<26}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    sides = list(report["sides"].values())
    first, compared = sides[0], report.get("ratios")

    def row(label: str, values: list[str], ratio: float | None) -> tuple[str, list[str]]:
        return label, values if ratio is None else [*values, f"{ratio:.2f}x"]

    for n in first["prefill"]:
        cells = [f"{side['prefill'][n]:,.0f} tok/s" for side in sides]
        yield row(f"prefill {n}", cells, compared and compared["prefill"][n])
    for depth, by_rows in first["calls"].items():
        for k in by_rows:
            cells = [f"{side['calls'][depth][k]:,.2f} ms" for side in sides]
            label = f"{k} row{'s' if k > 1 else ''} at {depth}"
            yield row(label, cells, compared and compared["calls"][depth][k])
    yield row("load", [f"{side['load_seconds']:.2f} s" for side in sides], compared and compared["load"])
    for kind in first["memory"]:
        cells = [f"{side['memory'].get(kind, 0) / 1e6:,.0f} MB" for side in sides]
        yield row(f"memory ({kind})", cells, compared and compared["memory"].get(kind))


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw prefill speed and the cost of calls by depth. Raises MissingDependencyError without matplotlib."""
    figure = new_figure(11, 4.5)
    prefill, calls = figure.subplots(1, 2, width_ratios=[1, 2])
    sides = report["sides"]
    for index, (name, side) in enumerate(sides.items()):
        places = [place + index / (len(sides) + 1) for place in range(len(side["prefill"]))]
        prefill.bar(places, list(side["prefill"].values()), 1 / (len(sides) + 1), label=name)
        depths = list(side["calls"])
        for k in side["calls"][depths[0]]:
            calls.plot(
                [int(depth) for depth in depths],
                [side["calls"][depth][k] for depth in depths],
                marker="o",
                color=f"C{index}",
                alpha=1 / (1 + 0.25 * list(side["calls"][depths[0]]).index(k)),
                label=f"{name}, {k} row{'s' if k > 1 else ''}",
            )
    lengths = list(next(iter(sides.values()))["prefill"])
    prefill.set(title="Prefill", xlabel="prompt tokens", ylabel="tokens per second")
    prefill.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    calls.set(title="One call", xlabel="depth (tokens held)", ylabel="milliseconds", xscale="log")
    calls.set_ylim(0)
    for axes in (prefill, calls):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['machine']['processor']}, {report['threads']} threads", fontsize="medium")
    figure.savefig(path)
