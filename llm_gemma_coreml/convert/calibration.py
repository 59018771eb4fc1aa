"""Measures which weights matter, and what a quantisation costs, on short built-in texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.quantise import quantise, quantised_tensor
from llm_gemma_coreml.convert.reference import embed, run_layers, softcap
from llm_gemma_coreml.convert.source import PROJECTIONS, Float32, Source, row_chunks

CALIBRATION_TOKENS = 1024
EVALUATION_TOKENS = 768
Importance = Mapping[str, Float32]
"""Mean squared activation of each input column [K], by the canonical name of the linear."""


@dataclass(frozen=True)
class Comparison:
    """How close a quantised model comes to the unquantised one on the evaluation text."""

    label: str
    kl_divergence: float
    """Mean over tokens of KL(unquantised || quantised), nats."""
    argmax_agreement: float
    """Share of tokens whose most likely next token is the same."""
    tokens: int


def measure_importance(
    source: Source, tokens: int = CALIBRATION_TOKENS, progress: Callable[[str], None] | None = None
) -> dict[str, Float32]:
    """Importance of every linear's input columns, measured on the built-in calibration text.

    progress: called with the name of each linear as it is reached (7 per layer).
    """
    found: dict[str, Float32] = {}

    def observe(name: str, values: Float32) -> None:
        # The first token's activations are hundreds of times larger than all others'.
        found[name] = np.mean(np.square(values[1:]), axis=0)
        if progress is not None:
            progress(name)

    run_layers(source, _embedded(source, text_ids(source, "calibration.txt", tokens)), observe)
    return found


def compare_quantisations(source: Source, importance: Importance | None = None) -> list[Comparison]:
    """int8, plain int4 and searched int4 (each with an int8 head) against the unquantised model."""
    if importance is None:
        importance = measure_importance(source)
    ids = text_ids(source, "evaluation.txt", EVALUATION_TOKENS)
    plans: dict[str, tuple[int, Importance]] = {
        "int8": (8, {}),
        "int4, round to nearest": (4, {}),
        "int4, searched scales": (4, importance),
    }
    hidden = _embedded(source, ids)
    exact = run_layers(source, hidden)
    others = [run_layers(_Requantised(source, bits, weights), hidden) for bits, weights in plans.values()]
    results = _compare_logits(source, exact, others)
    return [
        Comparison(label, divergence, agreement, len(ids))
        for label, (divergence, agreement) in zip(plans, results, strict=True)
    ]


def text_ids(source: Source, name: str, limit: int) -> list[int]:
    """`<bos>` and the first tokens of a built-in text, `limit` ids in all."""
    import sentencepiece

    text = resources.files("llm_gemma_coreml.convert").joinpath(name).read_text(encoding="utf-8")
    processor = sentencepiece.SentencePieceProcessor(model_proto=source.tokenizer_model())
    return [source.tokenizer_facts.bos_id, *processor.encode(text)][:limit]


class _Requantised:
    """The weights of a source after quantisation and back."""

    def __init__(self, source: Source, bits: int, importance: Importance) -> None:
        self.config = source.config
        self._source, self._bits, self._importance = source, bits, importance

    def tensor(self, name: str) -> Float32:
        if name.rpartition(".")[2] not in PROJECTIONS:
            return self._source.tensor(name)
        return quantised_tensor(self._source, name, self._bits, self._importance.get(name)).dequantise()


def _embedded(source: Source, ids: Sequence[int]) -> Float32:
    rows = np.concatenate([source.rows("embedding", number, number + 1) for number in ids])
    return embed(rows, source.config)


def _compare_logits(source: Source, exact: Float32, others: Sequence[Float32]) -> list[tuple[float, float]]:
    """(mean KL, argmax agreement) of each of `others` against `exact`, all [tokens, hidden]; int8 head."""
    reference = _Running(len(exact))
    running = [_Running(len(exact)) for _ in others]
    gaps = [np.zeros(len(exact)) for _ in others]
    for start, stop in row_chunks(source.config.vocabulary_size, source.config.hidden_size):
        rows = source.rows("embedding", start, stop)
        head = quantise(rows, 8).dequantise()
        logits = softcap(exact @ rows.T, source.config)
        shrink, weights = reference.add(logits, start)
        for index, hidden in enumerate(others):
            theirs = softcap(hidden @ head.T, source.config)
            running[index].add(theirs, start)
            gaps[index] = gaps[index] * shrink + np.sum(weights * (logits - theirs), axis=1, dtype=np.float64)
    results = []
    for other, gap in zip(running, gaps, strict=True):
        divergence = gap / reference.total - reference.log_sum() + other.log_sum()
        results.append((float(divergence.mean()), float(np.mean(other.best == reference.best))))
    return results


class _Running:
    """Log-sum-exp and argmax of rows of logits that arrive a piece of the vocabulary at a time."""

    def __init__(self, rows: int) -> None:
        self.peak = np.full(rows, -np.inf)
        self.total = np.zeros(rows)
        self.best = np.zeros(rows, np.int64)

    def add(self, logits: Float32, offset: int) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Take in logits [rows, n] of ids from `offset`: how much older sums shrink, the new exponentials."""
        at = logits.argmax(axis=1)
        top = logits[np.arange(len(logits)), at].astype(np.float64)
        self.best = np.where(top > self.peak, at + offset, self.best)
        peak = np.maximum(self.peak, top)
        shrink = np.exp(self.peak - peak)
        weights = np.exp(logits - peak[:, None].astype(np.float32))
        self.total = self.total * shrink + weights.sum(axis=1, dtype=np.float64)
        self.peak = peak
        return shrink, weights

    def log_sum(self) -> NDArray[np.float64]:
        """log(sum(exp(logits))) of each row."""
        result: NDArray[np.float64] = self.peak + np.log(self.total)
        return result
