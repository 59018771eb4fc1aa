"""Measures which weights matter, and what a quantisation costs, on short built-in texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.convert.compensate import ColumnUse
from llm_gemma_coreml.convert.quantise import quantise, quantised_tensor
from llm_gemma_coreml.convert.reference import embed, run_layer, run_layers, softcap
from llm_gemma_coreml.convert.source import PROJECTIONS, Float32, Source, expected_shapes, row_chunks

CALIBRATION_TOKENS = 1088
EVALUATION_TOKENS = 768
Use = Callable[[str], NDArray[np.float32] | ColumnUse | None]
"""What is known of a linear's input columns, by its name."""
Way = Callable[[str], Float32]
"""The fp32 weight of that name after quantisation and back."""


@dataclass(frozen=True)
class Comparison:
    """How close a quantised model comes to the unquantised one on the evaluation text."""

    label: str
    kl_divergence: float
    """Mean over tokens of KL(unquantised || quantised), nats."""
    argmax_agreement: float
    """Share of tokens whose most likely next token is the same."""
    tokens: int


class Importance(Mapping[str, ColumnUse]):
    """The use of every linear's input columns on the built-in calibration text, by canonical name.

    The model runs as far as the layer that is asked for, and only the last layer's inputs are kept: ask in the order
    of the layers. Asking for an earlier layer starts again.
    """

    def __init__(self, source: Source, tokens: int = CALIBRATION_TOKENS) -> None:
        self._source = source
        self._tokens = tokens
        self._names = [
            name for name in expected_shapes(source.config) if name.rpartition(".")[2] in PROJECTIONS
        ]
        self._next_layer = 0
        self._hidden: Float32 | None = None
        self._uses: dict[str, ColumnUse] = {}

    def __getitem__(self, name: str) -> ColumnUse:
        if name not in self._names:
            raise KeyError(name)
        layer = int(name.split(".")[1])
        if name not in self._uses and layer < self._next_layer:
            self._next_layer, self._hidden = 0, None
        while name not in self._uses:
            self._run_next_layer()
        return self._uses[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _run_next_layer(self) -> None:
        if self._hidden is None:
            self._hidden = _embedded(self._source, text_ids(self._source, "calibration.txt", self._tokens))
        self._uses = {}
        inputs: dict[int, ColumnUse] = {}

        def observe(name: str, values: Float32) -> None:
            # q, k and v (and gate and up) share one input, and so the costly part of its use. The first token is
            # left out: its activations are hundreds of times larger than all others'.
            self._uses[name] = inputs.setdefault(id(values), ColumnUse(values[1:]))
            alive.append(values)

        alive: list[Float32] = []
        self._hidden = run_layer(self._source, self._next_layer, self._hidden, observe)
        self._next_layer += 1


def compare_quantisations(source: Source, importance: Importance | None = None, palettes: bool = False) -> list[Comparison]:
    """int8, plain int4, searched int4 and compensated int4 (all with an int8 head) against the unquantised model.

    palettes: ways to 4-bit palettes instead of those to int4.
    """
    importance = Importance(source) if importance is None else importance
    ids = text_ids(source, "evaluation.txt", EVALUATION_TOKENS)
    ways = _ways(source, importance, palettes)
    hidden = _embedded(source, ids)
    exact = run_layers(source, hidden)
    others = [run_layers(_Requantised(source, way), hidden) for way in ways.values()]
    results = _compare_logits(source, exact, others)
    return [
        Comparison(label, divergence, agreement, len(ids))
        for label, (divergence, agreement) in zip(ways, results, strict=True)
    ]


def _ways(source: Source, importance: Importance, palettes: bool) -> dict[str, Way]:
    """What makes the linear weight of a name, by the label of the way; the last is what a conversion does."""
    from llm_gemma_coreml.convert.palettise import palettised_tensor

    def blocks(bits: int, use: Use) -> Way:
        return lambda name: quantised_tensor(source, name, bits, use(name)).dequantise()

    def tables(use: Use) -> Way:
        return lambda name: palettised_tensor(source, name, use(name)).dequantise()

    def unused(name: str) -> None:
        return None

    def columns(name: str) -> Float32:
        return importance[name].importance

    together = importance.__getitem__
    ways = {"int8": blocks(8, unused)}
    if palettes:
        return ways | {
            "4-bit palettes": tables(unused),
            "4-bit palettes, weighted": tables(columns),
            "4-bit palettes, weighted, with compensated rounding": tables(together),
        }
    return ways | {
        "int4, round to nearest": blocks(4, unused),
        "int4, searched scales": blocks(4, columns),
        "int4, searched scales and compensated rounding": blocks(4, together),
    }


def text_ids(source: Source, name: str, limit: int) -> list[int]:
    """`<bos>` and the first tokens of a built-in text, `limit` ids in all."""
    import sentencepiece

    text = resources.files("llm_gemma_coreml.convert").joinpath(name).read_text(encoding="utf-8")
    processor = sentencepiece.SentencePieceProcessor(model_proto=source.tokenizer_model())
    return [source.tokenizer_facts.bos_id, *processor.encode(text)][:limit]


class _Requantised:
    """The weights of a source after quantisation and back."""

    def __init__(self, source: Source, way: Way) -> None:
        self.config = source.config
        self._source, self._way = source, way

    def tensor(self, name: str) -> Float32:
        if name.rpartition(".")[2] not in PROJECTIONS:
            return self._source.tensor(name)
        return self._way(name)


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
