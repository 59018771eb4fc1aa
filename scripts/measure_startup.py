"""What the plugin adds to the start of `llm`: runs a command with and without its entry point, in turns.

    python scripts/measure_startup.py [--pairs 15] [--json] [COMMAND ...]

COMMAND defaults to `--version`; `models` includes the registration of models. Prints, in milliseconds of wall clock
and of processor time: the medians, the median of the differences within pairs ("added"), and the difference of the
fastest runs ("least"), which other work on the machine disturbs least. Exit code 1 if the plugin adds more than
--limit milliseconds of processor time by that last figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "llm-gemma-coreml"


def write_entry_point(folder: Path) -> None:
    """Make the distribution's entry point known in `folder`, so that the project need not be installed."""
    information = folder / "llm_gemma_coreml-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[llm]\ngemma_coreml = llm_gemma_coreml.plugin\n")


def run_once(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """(wall clock, processor) milliseconds of one run."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "llm", *command], env=environment, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return wall * 1000, processor * 1000


def measure(command: list[str], pairs: int) -> dict[str, dict[str, float]]:
    """Medians over `pairs` pairs, after one unmeasured run of each that fills caches."""
    with tempfile.TemporaryDirectory() as folder:
        write_entry_point(Path(folder))
        base = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(PROJECT)]), "LLM_USER_PATH": folder}
        environments = {
            "with": {**base, "LLM_LOAD_PLUGINS": DISTRIBUTION},
            "without": {**base, "LLM_LOAD_PLUGINS": ""},
        }
        for environment in environments.values():
            run_once(command, environment)
        times: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        for pair in range(pairs):
            for side in sorted(environments, reverse=bool(pair % 2)):
                times[side].append(run_once(command, environments[side]))
    report = {}
    for index, kind in enumerate(("wall", "processor")):
        ours, bare = ([run[index] for run in times[side]] for side in ("with", "without"))
        report[kind] = {
            "with": round(statistics.median(ours), 1),
            "without": round(statistics.median(bare), 1),
            "added": round(statistics.median(a - b for a, b in zip(ours, bare, strict=True)), 1),
            "least": round(min(ours) - min(bare), 1),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="*", default=["--version"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = measure(arguments.command, arguments.pairs)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        for kind, figures in report.items():
            text = ", ".join(f"{name} {value:.1f} ms" for name, value in figures.items())
            print(f"llm {' '.join(arguments.command)}, {kind}: {text}")
    sys.exit(report["processor"]["least"] > arguments.limit)


if __name__ == "__main__":
    main()
