"""Converts a model of random weights at full size, runs it on the portable runtime, and writes docs/full-size.md.

    python scripts/full_size_report.py --user-folder /some/disk        # 8 GB of disk, 20 GB of memory, ten minutes

Steps that were done before are not repeated: the bundle and the figures (JSON) stay in the user folder. `--measure-again`
repeats the measurement; `--before FILE` puts the figures of an older file beside the new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_gemma_coreml.benchmark.run import describe_machine
from llm_gemma_coreml.bundle.inspection import blob_sizes, cache_bytes
from llm_gemma_coreml.bundle.manifest import assistant_function_name, load_manifest
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.bundle.store import FOLDER

_PROJECT = Path(__file__).resolve().parent.parent
_MEASURE = Path(__file__).with_name("full_size_measure.py")
_PROFILE = Path(__file__).with_name("profile_step.py")
_PROFILED_DEPTHS = (1024, 100_000)
_CONTEXTS = (1024, 4096, 32768, 131072)


def run_measured(command: list[str], **environment: str) -> dict[str, float]:
    """Run a program; its wall and processor time (seconds) and peak memory (bytes). Raises CalledProcessError."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"wall": time.perf_counter() - start, "cpu": usage.ru_utime + usage.ru_stime, "peak": peak}


def convert(model: str, user_folder: Path) -> dict[str, float]:
    """Build the bundle as a user would, the assistant included."""
    command = [sys.executable, "-m", "llm", "gemma-coreml", "convert", "--random", model, "--drafter", "random"]
    return run_measured(command, LLM_USER_PATH=str(user_folder))


def measure(program: Path, *arguments: object) -> dict[str, Any]:
    """The figures of one of the scripts that measure, from a process of its own."""
    done = subprocess.run([sys.executable, str(program), *map(str, arguments)], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sizes(bundle: Path) -> dict[str, int]:
    """Bytes: weights of layers, of the drafter, of the head (the embedding table too), of all files."""
    manifest = load_manifest(bundle)
    weights = {entry.path.split("/")[0]: entry.size for entry in manifest.files if entry.path.endswith("weight.bin")}
    assert manifest.drafter is not None
    package = open_package(bundle / manifest.drafter.path)
    drafter = sum(blob_sizes(package, assistant_function_name(manifest.rungs[0])).values())
    return {
        "drafter": drafter,
        "layers": sum(weights[package.path] for package in manifest.layer_packages) - drafter,
        "head": weights[manifest.head_package],
        "all": sum(entry.size for entry in manifest.files),
    }


def render(model: str, results: dict[str, Any], before: dict[str, Any] | None) -> str:
    """The report as Markdown."""
    parts = [_introduction(model, results), _conversion(results), _speed(results), _profiles(results)]
    parts += [_memory(results), _promotions(results)]
    if before is not None:
        parts.append(_comparison(before, results))
    return "\n\n".join(parts) + "\n"


def _introduction(model: str, results: dict[str, Any]) -> str:
    where, threads = results["machine"], results["measured"]["threads"]
    return (
        f"# {model} at full size\n\n"
        "Made by `scripts/full_size_report.py`. **The weights are random** (`llm gemma-coreml convert --random "
        f"{model} --drafter random`): what is measured here is scale, not quality. Nothing of this was run on a Mac.\n\n"
        f"Machine: {where['processor']}, {where['cores']} cores; "
        f"{threads} compute threads; nothing else of ours was running. GB are 10^9 bytes, GiB 2^30.\n\n"
        "Depths of more than 512 tokens were reached by filling the session's K/V directly with random numbers (a real "
        "prefill would have taken hours); all calls measured there are real calls."
    )


def _conversion(results: dict[str, Any]) -> str:
    done, size = results["conversion"], results["sizes"]
    return "## Conversion\n\n" + _table(
        ("", ""),
        [
            ("wall clock, processor time", f"{done['wall']:.0f} s, {done['cpu']:.0f} s"),
            ("peak memory", _gigabytes(done["peak"])),
            ("layers (int4, blocks of 32)", _gigabytes(size["layers"])),
            ("head, which is the embedding table too (int8)", _gigabytes(size["head"])),
            ("layers and head", _gigabytes(size["layers"] + size["head"])),
            ("drafter (int4, head int8)", _gigabytes(size["drafter"])),
            ("whole bundle", _gigabytes(size["all"])),
        ],
    )


def _speed(results: dict[str, Any]) -> str:
    found = results["measured"]
    rows = []
    for place in found["depths"]:
        calls = {int(rows): seconds for rows, seconds in place["calls"].items()}
        drafter = place["drafter"]
        rows.append(
            (
                f"{place['depth']:,}",
                f"{1 / calls[1]:.2f}",
                *(f"{calls[k] * 1e3:,.0f} ms ({calls[k] / calls[1]:.2f}x)" for k in sorted(calls)),
                "-" if drafter is None else f"{drafter * 1e3:,.0f} ms",
            )
        )
    widths = sorted(int(rows) for rows in found["depths"][0]["calls"])
    header = ("tokens held", "decoding, tok/s", *(f"{k} row{'s' if k > 1 else ''}" for k in widths), "drafter step")
    prefill = found["prefill"]
    return (
        f"## Speed\n\nLoading, with one token to touch the weights: {found['load_seconds']:.0f} s at the first start, which "
        f"translates the packages, {min(place['load_seconds'] for place in results['profiles']):.0f} s at later ones. "
        f"Prefill of {prefill['tokens']} tokens: {prefill['tokens_per_second']:.1f} tok/s. Calls with logits for each row, "
        "medians of three; in brackets the cost against one row:\n\n" + _table(header, rows) + "\n\n![Cost of a call by depth]"
        "(full-size-calls.svg)"
    )


def _profiles(results: dict[str, Any]) -> str:
    places = results["profiles"]
    kinds = list(dict.fromkeys(kind for place in places for kind in place["kinds"]))
    rows = [(kind, *(f"{place['kinds'].get(kind, 0):,.0f} ms" for place in places)) for kind in kinds]
    rows += [
        ("outside of the graphs", *(f"{place['outside']:,.0f} ms" for place in places)),
        ("step, while profiled", *(f"{place['step']:,.0f} ms" for place in places)),
    ]
    header = ("one row", *(f"{place['depth']:,} tokens held" for place in places))
    title = "## Where the time of a step goes\n\nBy ONNX Runtime's profiler (`scripts/profile_step.py`):\n\n"
    return title + _table(header, rows)


def _memory(results: dict[str, Any]) -> str:
    found, manifest = results["measured"], results["cache"]
    rows = [
        (f"{place['depth']:,}", _megabytes(place["cache"]["sliding"]), _megabytes(place["cache"]["full"]))
        for place in found["depths"]
    ]
    declared = [
        (f"{context:,}", _megabytes(manifest["ring"]), _megabytes(manifest["per_token"] * context)) for context in _CONTEXTS
    ]
    return (
        f"## Memory\n\nThe process after loading: {_gigabytes(found['after_load']['rss'])} "
        f"(peak while loading: {_gigabytes(found['after_load']['peak'])}); at the end, with the K/V of "
        f"{found['depths'][-1]['depth']:,} tokens: {_gigabytes(found['at_the_end']['rss'])}.\n\n"
        "K/V of the ring (sliding layers) and of the full layers: pages in memory, counted with mincore. The portable "
        "runtime holds fp32 (values rounded to fp16), Core ML's states are fp16 and half as large:\n\n"
        + _table(("tokens held", "ring", "full layers"), rows)
        + "\n\nAs the packages declare them (fp16):\n\n"
        + _table(("context", "ring", "full layers"), declared)
    )


def _promotions(results: dict[str, Any]) -> str:
    found = results["measured"]
    rows = [
        (
            f"{each['edge']:,}",
            str(each["promotions"]),
            str(each["moved_buffers"]),
            "yes" if each["same_logits_in_both_rungs"] else "NO",
        )
        for each in found["promotions"]
    ]
    text = "## Promotions and depth\n\n" + _table(
        ("end of rung", "promotions", "buffers that moved", "same logits, bit for bit, in both rungs"), rows
    )
    for place in found["depths"]:
        if "decoding" in place:
            deep = place["decoding"]
            text += (
                f"\n\nDecoding to position {deep['to_position']:,}: {deep['tokens_per_second']:.2f} tok/s over {deep['tokens']} "
                f"tokens; {deep['moved_buffers']} buffers moved."
            )
    return text


def _comparison(before: dict[str, Any], results: dict[str, Any]) -> str:
    old, new = before["measured"], results["measured"]
    rows = [
        ("loading, first start", f"{old['load_seconds']:.0f} s", f"{new['load_seconds']:.0f} s"),
        ("memory after loading", _gigabytes(old["after_load"]["rss"]), _gigabytes(new["after_load"]["rss"])),
        ("prefill", *(f"{each['prefill']['tokens_per_second']:.1f} tok/s" for each in (old, new))),
    ]
    measured = {place["depth"]: place for place in new["depths"]}
    for one in old["depths"]:
        other = measured.get(one["depth"])
        if other is None:
            continue
        for width in one["calls"]:
            cells = (f"{place['calls'][width] * 1e3:,.0f} ms" for place in (one, other))
            rows.append((f"{width} row{'s' if int(width) > 1 else ''} at {one['depth']:,}", *cells))
    return f"## Before and after\n\n{results['changes']}\n\n" + _table(("", "before", "after"), rows)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB ({count / 2**30:.2f} GiB)"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


def draw(results: dict[str, Any], path: Path) -> None:
    """The cost of a call by depth, a line for each number of rows."""
    from llm_gemma_coreml.plotting import new_figure

    figure = new_figure(7, 4)
    axes = figure.subplots()
    places = results["measured"]["depths"]
    for rows in places[0]["calls"]:
        label = f"{rows} row{'s' if int(rows) > 1 else ''}"
        axes.plot([p["depth"] for p in places], [p["calls"][rows] * 1e3 for p in places], marker="o", label=label)
    axes.set(title="One call", xlabel="tokens held", ylabel="milliseconds", xscale="log")
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gemma-4-12b")
    parser.add_argument("--user-folder", type=Path, required=True, help="where the bundle and the figures go")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--measure-again", action="store_true")
    parser.add_argument("--before", type=Path, help="figures (JSON) of an older run, to compare with")
    parser.add_argument("--changes", default="", help="what was changed since, for the report")
    parser.add_argument("--docs", type=Path, default=_PROJECT / "docs")
    arguments = parser.parse_args()
    bundle = arguments.user_folder / FOLDER / f"{arguments.model}-random"
    figures = arguments.user_folder / f"{arguments.model}.json"
    results = json.loads(figures.read_text()) if figures.exists() else {}
    if not bundle.exists():
        results = {"conversion": convert(arguments.model, arguments.user_folder)}
        figures.write_text(json.dumps(results))
    if "measured" not in results or arguments.measure_again:
        manifest = load_manifest(bundle)
        ring, per_token = cache_bytes(manifest)
        results |= {"sizes": sizes(bundle), "cache": {"ring": ring, "per_token": per_token}, "machine": describe_machine()}
        results["measured"] = measure(_MEASURE, bundle, arguments.threads)
    if "profiles" not in results or arguments.measure_again:
        results["profiles"] = [measure(_PROFILE, bundle, arguments.threads, depth) for depth in _PROFILED_DEPTHS]
    results["changes"] = arguments.changes or results.get("changes", "")
    figures.write_text(json.dumps(results, indent=1))
    before = json.loads(arguments.before.read_text()) if arguments.before else None
    draw(results, arguments.docs / "full-size-calls.svg")
    (arguments.docs / "full-size.md").write_text(render(arguments.model, results, before), encoding="utf-8")


if __name__ == "__main__":
    main()
