"""Measures what speculation brings: against plain decoding in the same run, by kind of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml.benchmark.speculation_prompts import KINDS, Case, cases

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.engine import Engine
    from llm_gemma_coreml.engine.request import GenerationStatistics, Speculate

Progress = Callable[[str, int, int], None]
Figures = dict[str, Any]
_LONGEST_PERIOD = 24


def run(
    bundle: Path,
    texts: Path | None = None,
    repeats: int = 3,
    max_tokens: int = 96,
    progress: Progress | None = None,
) -> Figures:
    """Measure all prompts and return the figures, ready for JSON.

    Each prompt is continued plainly and with speculation in turns (`repeats` pairs, the first to warm up left out
    of the figures), so that what disturbs the machine disturbs both. Speeds are tokens per second after the first
    token; a speedup is the ratio within a pair. Raises RequestError if the texts are missing.
    """
    from llm_gemma_coreml.bundle.manifest import load_manifest
    from llm_gemma_coreml.chat.tokenizer import Tokenizer
    from llm_gemma_coreml.engine.engine import Engine

    manifest = load_manifest(bundle)
    tokenizer = Tokenizer(bundle / manifest.tokenizer)
    prompts = cases(texts)
    results: list[Figures] = []
    with Engine.open(bundle) as engine:
        for number, case in enumerate(prompts):
            if progress is not None:
                progress("Speculation", number, len(prompts))
            ids = (manifest.bos_id, *tokenizer.encode_text(case.text))
            results.append(_measure(engine, case, ids, repeats, max_tokens))
    if progress is not None:
        progress("Speculation", len(prompts), len(prompts))
    return {"bundle": manifest.name, "repeats": repeats, "kinds": _by_kind(results), "prompts": results}


def _measure(engine: Engine, case: Case, ids: tuple[int, ...], repeats: int, max_tokens: int) -> Figures:
    """Figures of one prompt."""
    pairs: list[tuple[float, float]] = []
    same = True
    for number in range(repeats + 1):
        order: list[Speculate] = ["off", "auto"] if number % 2 else ["auto", "off"]
        done = {mode: _generate(engine, ids, mode, max_tokens) for mode in order}
        (plain_tokens, plain), (drafted_tokens, statistics) = done["off"], done["auto"]
        same = same and plain_tokens == drafted_tokens
        if number:
            pairs.append((_speed(plain), _speed(statistics)))
    drafted = sum(counts.drafted for counts in statistics.drafters.values())
    accepted = sum(counts.accepted for counts in statistics.drafters.values())
    return {
        "kind": case.kind,
        "prompt_tokens": len(ids),
        "output_tokens": statistics.output_tokens,
        "same_text": same,
        "degenerate": is_loop(plain_tokens),
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_round": round(max(len(drafted_tokens) - 1, 0) / max(statistics.rounds, 1), 3),
        "plain_tokens_per_second": round(median(plain for plain, _ in pairs), 2),
        "tokens_per_second": round(median(drafting for _, drafting in pairs), 2),
        "speedups": [round(drafting / plain, 3) for plain, drafting in pairs if plain],
        "drafters": statistics.as_dict().get("drafters", {}),
    }


def _generate(
    engine: Engine, ids: tuple[int, ...], speculate: Speculate, max_tokens: int
) -> tuple[list[int], GenerationStatistics]:
    from llm_gemma_coreml.engine.request import GenerationRequest

    stop_ids = frozenset(engine.manifest.stop_ids)
    stream = engine.generate(GenerationRequest(ids, max_tokens, stop_ids, speculate=speculate))
    tokens = [token for part in stream for token in part]
    return tokens, stream.statistics


def _speed(statistics: GenerationStatistics) -> float:
    return (statistics.output_tokens - 1) / statistics.decode_seconds if statistics.decode_seconds else 0.0


def is_loop(tokens: Sequence[int]) -> bool:
    """True if the second half of the text mostly repeats what stood a fixed, short distance before."""
    half = len(tokens) // 2
    for period in range(1, min(_LONGEST_PERIOD, half) + 1):
        repeated = sum(tokens[i] == tokens[i - period] for i in range(half, len(tokens)))
        if repeated >= 0.9 * (len(tokens) - half):
            return True
    return False


def _by_kind(results: Sequence[Figures]) -> dict[str, Figures]:
    """For each kind the figures of its prompts taken together; degenerate ones (loops, too short) apart."""
    kinds: dict[str, Figures] = {}
    for kind in KINDS:
        for degenerate in (False, True):
            chosen = [r for r in results if r["kind"] == kind and degenerate == (r["degenerate"] or r["output_tokens"] < 16)]
            if chosen:
                name = f"{kind}, degenerate" if degenerate else kind
                kinds[name] = _together(chosen) | {"label": KINDS[kind] + (" (degenerate)" if degenerate else "")}
    return kinds


def _together(results: Sequence[Figures]) -> Figures:
    speedups = [speedup for result in results for speedup in result["speedups"]]
    drafted = sum(result["drafted"] for result in results)
    return {
        "prompts": len(results),
        "acceptance": round(sum(r["accepted"] for r in results) / drafted, 3) if drafted else None,
        "tokens_per_round": round(median(r["tokens_per_round"] for r in results), 2),
        "speedup": round(median(speedups), 3) if speedups else None,
        "speedup_lowest": min(speedups, default=None),
        "speedup_highest": max(speedups, default=None),
        "same_text": all(result["same_text"] for result in results),
    }


def render(figures: Figures) -> str:
    """The figures as a table."""
    heads = ("prompts", "acceptance", "tokens/round", "speedup", "lowest", "highest")
    lines = [f"{'kind of text':<36}" + "".join(f"{head:>14}" for head in heads)]
    for kind in figures["kinds"].values():
        acceptance = "-" if kind["acceptance"] is None else f"{kind['acceptance']:.0%}"
        cells = [str(kind["prompts"]), acceptance, f"{kind['tokens_per_round']:.2f}"]
        cells += ["-" if kind[key] is None else f"{kind[key]:.2f}x" for key in _SPEEDUPS]
        note = "" if kind["same_text"] else "  TEXT DIFFERS FROM PLAIN"
        lines.append(f"{kind['label']:<36}" + "".join(f"{cell:>14}" for cell in cells) + note)
    lines.append(f"Medians over {figures['repeats']} pairs of each prompt; speedup: over plain decoding in the same pair.")
    return "\n".join(lines)


_SPEEDUPS = ("speedup", "speedup_lowest", "speedup_highest")


def draw(figures: Figures, path: Path) -> None:
    """Draw the speedups by kind. Raises MissingDependencyError without matplotlib."""
    from llm_gemma_coreml.plotting import new_figure

    kinds = [kind for kind in figures["kinds"].values() if kind["speedup"] is not None]
    middle = [kind["speedup"] for kind in kinds]
    below = [kind["speedup"] - kind["speedup_lowest"] for kind in kinds]
    above = [kind["speedup_highest"] - kind["speedup"] for kind in kinds]
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    axes.barh([kind["label"] for kind in kinds], middle, xerr=[below, above], capsize=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(title=f"{figures['bundle']}: speculative against plain decoding", xlabel="times as fast")
    figure.savefig(path)
