"""Measures what speculation brings: against plain decoding in the same run, by kind of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from llm_gemma_coreml.benchmark.run import alternated
from llm_gemma_coreml.benchmark.side import Continuation
from llm_gemma_coreml.benchmark.speculation_prompts import KINDS, Case, cases

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.engine import Engine
    from llm_gemma_coreml.engine.request import Speculate

Progress = Callable[[str, int, int], None]
Figures = dict[str, Any]
Continue = Callable[[Sequence[int], bool, int, Sequence[int]], Continuation]
"""Continues (these ids, with drafts or not, by at most so many tokens, up to one of these stop ids)."""
OpenRival = Callable[[int], AbstractContextManager[Continue]]
"""Another program, made ready for texts of at most so many tokens."""
OURS, RIVAL = "ours", "llama.cpp"
_LONGEST_PERIOD = 24


def run(
    bundle: Path,
    texts: Path | None = None,
    repeats: int = 3,
    max_tokens: int = 96,
    progress: Progress | None = None,
    threads: int | None = None,
    rival: OpenRival | None = None,
) -> Figures:
    """Measure all prompts and return the figures, ready for JSON.

    Each prompt is continued plainly and with speculation in turns (`repeats` pairs, the first to warm up left out
    of the figures), so that what disturbs the machine disturbs both. Speeds are tokens per second after the first
    token; a speedup is the ratio within a pair. With a `rival`, it continues the same ids in the same turns. Raises
    RequestError if the texts are missing, BenchmarkError if the rival fails.
    """
    from llm_gemma_coreml.bundle.manifest import load_manifest
    from llm_gemma_coreml.chat.tokenizer import Tokenizer
    from llm_gemma_coreml.engine.engine import Engine

    manifest = load_manifest(bundle)
    tokenizer = Tokenizer(bundle / manifest.tokenizer)
    prompts = [(case, (manifest.bos_id, *tokenizer.encode_text(case.text))) for case in cases(texts)]
    results: list[Figures] = []
    with ExitStack() as stack:
        sides = {OURS: _ours(stack.enter_context(Engine.open(bundle, threads=threads)))}
        if rival is not None:
            longest = max(len(ids) for _, ids in prompts)
            sides[RIVAL] = stack.enter_context(rival(longest + max_tokens))
        for number, (case, ids) in enumerate(prompts):
            if progress is not None:
                progress("Speculation", number, len(prompts))
            results.append(_measure(sides, case, ids, repeats, max_tokens, sorted(manifest.stop_ids)))
    if progress is not None:
        progress("Speculation", len(prompts), len(prompts))
    return {"bundle": manifest.name, "repeats": repeats, "kinds": _by_kind(results), "prompts": results}


def _measure(
    sides: dict[str, Continue], case: Case, ids: tuple[int, ...], repeats: int, max_tokens: int, stop_ids: Sequence[int]
) -> Figures:
    """Figures of one prompt: ours, and under its name those of the rival."""
    pairs: dict[str, list[tuple[Continuation, Continuation]]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        for name in alternated(list(sides), number):
            order = [False, True] if number % 2 else [True, False]
            done = {drafting: sides[name](ids, drafting, max_tokens, stop_ids) for drafting in order}
            pairs[name].append((done[False], done[True]))
    figures = {name: _figures(found) for name, found in pairs.items()}
    rival = {RIVAL: figures[RIVAL]} if RIVAL in figures else {}
    return {"kind": case.kind, "prompt_tokens": len(ids)} | figures[OURS] | rival


def _figures(pairs: Sequence[tuple[Continuation, Continuation]]) -> Figures:
    """Figures of (plain, speculative) runs of one prompt on one side; the first pair is not counted in the times."""
    plain, last = pairs[-1]
    counted = pairs[1:]
    return {
        "output_tokens": len(last.tokens),
        "same_text": all(one.tokens == other.tokens for one, other in pairs),
        "degenerate": is_loop(plain.tokens),
        "drafted": last.drafted,
        "accepted": last.accepted,
        "tokens_per_round": round(max(len(last.tokens) - 1, 0) / max(last.rounds, 1), 3),
        "plain_tokens_per_second": round(median(one.speed for one, _ in counted), 2),
        "tokens_per_second": round(median(other.speed for _, other in counted), 2),
        "speedups": [round(other.speed / one.speed, 3) for one, other in counted if one.speed],
        "drafters": last.drafters,
    }


def _ours(engine: Engine) -> Continue:
    from llm_gemma_coreml.engine.request import GenerationRequest

    def generate(ids: Sequence[int], drafting: bool, count: int, stop_ids: Sequence[int]) -> Continuation:
        speculate: Speculate = "auto" if drafting else "off"
        stream = engine.generate(GenerationRequest(tuple(ids), count, frozenset(stop_ids), speculate=speculate))
        tokens = [token for part in stream for token in part]
        statistics = stream.statistics
        counts, details = statistics.drafters.values(), cast(Figures, statistics.as_dict())
        return Continuation(
            tokens,
            statistics.decode_seconds,
            statistics.rounds,
            sum(count.drafted for count in counts),
            sum(count.accepted for count in counts),
            details.get("drafters", {}),
        )

    return generate


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
            chosen = [r for r in results if r["kind"] == kind and degenerate == _is_degenerate(r)]
            if chosen:
                name = f"{kind}, degenerate" if degenerate else kind
                kinds[name] = _together(chosen) | {"label": KINDS[kind] + (" (degenerate)" if degenerate else "")}
                if all(RIVAL in result for result in chosen):
                    kinds[name][RIVAL] = _together([result[RIVAL] for result in chosen])
    return kinds


def _is_degenerate(result: Figures) -> bool:
    """True if a side's text is a loop or too short."""
    sides = [result, result[RIVAL]] if RIVAL in result else [result]
    return any(side["degenerate"] or side["output_tokens"] < 16 for side in sides)


def _together(results: Sequence[Figures]) -> Figures:
    speedups = [speedup for result in results for speedup in result["speedups"]]
    drafted = sum(result["drafted"] for result in results)
    return {
        "prompts": len(results),
        "acceptance": round(sum(r["accepted"] for r in results) / drafted, 3) if drafted else None,
        "tokens_per_round": round(median(r["tokens_per_round"] for r in results), 2),
        "plain_tokens_per_second": round(median(r["plain_tokens_per_second"] for r in results), 2),
        "tokens_per_second": round(median(r["tokens_per_second"] for r in results), 2),
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
    if any(RIVAL in kind for kind in figures["kinds"].values()):
        lines += ["", *_side_by_side(figures["kinds"])]
    return "\n".join(lines)


def _side_by_side(kinds: dict[str, Figures]) -> list[str]:
    """Lines that compare both sides: one for each side of each kind."""
    heads = ("tokens/round", "speedup", "plain tok/s", "tok/s")
    lines = [f"{'kind of text':<36}{'side':<12}" + "".join(f"{head:>14}" for head in heads)]
    for kind in kinds.values():
        for name, side in ((OURS, kind), (RIVAL, kind[RIVAL])):
            speedup = "-" if side["speedup"] is None else f"{side['speedup']:.2f}x"
            cells = [f"{side['tokens_per_round']:.2f}", speedup]
            cells += [f"{side[key]:.1f}" for key in ("plain_tokens_per_second", "tokens_per_second")]
            note = "" if side["same_text"] else "  text differs from its plain text"
            lines.append(f"{kind['label']:<36}{name:<12}" + "".join(f"{cell:>14}" for cell in cells) + note)
    lines.append("Each side continues the same ids by its own greedy choice, so the texts may differ between the sides.")
    return lines


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
