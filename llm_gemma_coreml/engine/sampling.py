"""Draw a token from logits: greedy or sampled, with randomness keyed by (seed, position) and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.engine.request import SamplingParameters
from llm_gemma_coreml.engine.runner import HeadRows
from llm_gemma_coreml.errors import GemmaCoreMLError, RequestError

Logits = NDArray[np.float32]

_PHILOX_KEY_BITS = 128
_SUM_BLOCK = 512
_SORTED_AT_ONCE = 2048
_SCREEN_BLOCKS = 512
"""Blocks of the vocabulary whose maxima give a first bound on the k-th largest logit."""


class TokenHistory:
    """The distinct token ids of prompt and output so far, which the repetition penalty needs."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._seen: set[int] = set()
        self._ids = np.empty(256, dtype=np.int64)
        self._count = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Note that `token` was appended."""
        if token in self._seen:
            return
        self._seen.add(token)
        if self._count == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._count] = token
        self._count += 1

    def distinct(self) -> NDArray[np.int64]:
        """The distinct ids, in order of first appearance (a view)."""
        return self._ids[: self._count]


class Sampler:
    """Draws tokens by `parameters`.

    Order of processing, the same as in transformers: allowed mask, repetition penalty, suppressed ids,
    temperature, top_k, top_p, min_p, then a draw by the inverse of the cumulative distribution over ascending
    ids. The uniform number of a draw comes from a counter-based generator with key `seed` and counter
    `position`, so it does not depend on what was drawn before.

    `seed` is the seed in use: the given one, or one chosen at random when the parameters have none.
    Raises RequestError for parameters outside their ranges.
    """

    def __init__(self, parameters: SamplingParameters, suppressed_ids: Sequence[int] = ()) -> None:
        _check(parameters)
        self.parameters = parameters
        self.seed: int = secrets.randbits(63) if parameters.seed is None else parameters.seed
        self._suppressed = np.asarray(sorted(suppressed_ids), dtype=np.int64)

    @property
    def greedy(self) -> bool:
        """True if tokens are the argmax and need no randomness."""
        return self.parameters.temperature == 0 or self.parameters.top_k == 1

    @property
    def needs_history(self) -> bool:
        """True if `token` reads the history (a repetition penalty is set)."""
        return self.parameters.repetition_penalty not in (None, 1.0)

    def token(
        self,
        logits: HeadRows,
        position: int,
        history: TokenHistory | None = None,
        allowed: NDArray[np.bool_] | None = None,
    ) -> int:
        """The token for `position`, drawn from `logits` (float32 [vocabulary], not changed).

        `history` holds the tokens before `position`; `allowed` (bool [vocabulary]) marks the tokens that a
        grammar permits. Greedy ties go to the lowest id. From a head that gives no logits (HeadRows) the row is
        the token itself; token_head.py refuses the requests for which that is not enough. Raises GemmaCoreMLError
        for logits that are NaN or +infinity and when no token is left to choose from.
        """
        if logits.ndim == 0:
            return int(logits)
        scores = self._scores(cast(Logits, logits), history, allowed)
        if self.greedy:
            return _checked_argmax(scores)
        ids, weights = self._candidates(scores)
        index = _inverse_cumulative(weights, uniform(self.seed, position))
        return index if ids is None else int(ids[index])

    def distribution(
        self,
        logits: Logits,
        history: TokenHistory | None = None,
        allowed: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float64]:
        """The probabilities (float64 [vocabulary]) from which `token` draws."""
        scores = self._scores(logits, history, allowed)
        probabilities = np.zeros(len(scores), dtype=np.float64)
        if self.greedy:
            probabilities[_checked_argmax(scores)] = 1.0
            return probabilities
        ids, weights = self._candidates(scores)
        probabilities[slice(None) if ids is None else ids] = weights / weights.sum(dtype=np.float64)
        return probabilities

    def _scores(
        self, logits: Logits, history: TokenHistory | None, allowed: NDArray[np.bool_] | None
    ) -> Logits:
        """Logits after mask, penalty and suppression; the array given if nothing changes it."""
        scores = logits
        if allowed is not None:
            scores = np.where(allowed, logits, np.float32(-np.inf))
        penalty = self.parameters.repetition_penalty
        if penalty is not None and penalty != 1.0 and history is not None:
            scores = scores.copy() if scores is logits else scores
            ids = history.distinct()
            seen = scores[ids]
            scores[ids] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))
        if len(self._suppressed):
            scores = scores.copy() if scores is logits else scores
            scores[self._suppressed] = -np.inf
        return scores

    def _candidates(self, scores: Logits) -> tuple[NDArray[np.int64] | None, Logits]:
        """Ids that may be drawn, ascending (None: all), and their weights: the largest is 1."""
        highest = scores[_checked_argmax(scores)]
        ids: NDArray[np.int64] | None = None
        if self.parameters.top_k is not None and self.parameters.top_k < len(scores):
            ids = _largest(scores, self.parameters.top_k)
            scores = scores[ids]
        weights = scores - highest
        weights /= np.float32(self.parameters.temperature)
        np.exp(weights, out=weights)
        if self.parameters.top_p is not None and self.parameters.top_p < 1.0:
            kept = _nucleus(weights, self.parameters.top_p)
            ids, weights = (kept if ids is None else ids[kept]), weights[kept]
        if self.parameters.min_p is not None and self.parameters.min_p > 0.0:
            kept = np.flatnonzero(weights >= np.float32(self.parameters.min_p))
            ids, weights = (kept if ids is None else ids[kept]), weights[kept]
        return ids, weights


def uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1), a fixed function of (seed, position)."""
    key = seed % (1 << _PHILOX_KEY_BITS)
    raw = int(np.random.Philox(key=key, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def _inverse_cumulative(weights: Logits, share: float) -> int:
    """The first index at which the running sum of `weights` exceeds `share` (in [0, 1)) of the whole."""
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _SUM_BLOCK), dtype=np.float64)
    ends = np.cumsum(blocks)
    target = share * ends[-1]
    block = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    start = block * _SUM_BLOCK
    inside = np.cumsum(weights[start : start + _SUM_BLOCK], dtype=np.float64) + (ends[block] - blocks[block])
    index = min(start + int(np.searchsorted(inside, target, side="right")), len(weights) - 1)
    while weights[index] == 0:  # rounding at the upper end must not pick a token of probability zero
        index -= 1
    return index


def _checked_argmax(scores: Logits) -> int:
    """Index of the first maximum. Raises for NaN (which argmax finds first), +infinity, all -infinity."""
    index = int(np.argmax(scores))
    highest = scores[index]
    if np.isfinite(highest):
        return index
    if highest == -np.inf:
        raise GemmaCoreMLError(
            "No token may follow: the grammar and the suppressed ids exclude the whole vocabulary. "
            "Loosen the schema or grammar."
        )
    raise GemmaCoreMLError(
        f"The model returned {highest} as the logit of token {index}. The bundle is damaged or the runtime "
        "computes wrongly: check the bundle with `llm gemma-coreml verify`."
    )


def _largest(scores: Logits, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest scores, ascending; equal scores at the edge are all kept."""
    usable = len(scores) - len(scores) % _SCREEN_BLOCKS
    if count <= _SCREEN_BLOCKS // 2 and usable >= 8 * _SCREEN_BLOCKS:
        # The k-th largest of the block maxima is no larger than the k-th largest score: a cheap first cut.
        maxima = scores[:usable].reshape(_SCREEN_BLOCKS, -1).max(axis=1)
        bound = np.partition(maxima, -count)[-count]
        ids = np.flatnonzero(scores >= bound)
    else:
        ids = np.arange(len(scores))
    chosen = scores[ids]
    threshold = np.partition(chosen, -count)[-count]
    kept: NDArray[np.int64] = ids[(chosen >= threshold) & (chosen > -np.inf)]
    return kept


def _nucleus(weights: Logits, top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the smallest set of largest weights whose share reaches top_p (at least one)."""
    needed = top_p * float(weights.sum(dtype=np.float64))
    undecided, values = np.arange(len(weights)), weights
    sure: list[NDArray[np.int64]] = []
    while len(values) > _SORTED_AT_ONCE:  # narrow down by halves, so that little is left to sort
        above = values > values.mean()
        upper = np.flatnonzero(above)
        mass = float(values[upper].sum(dtype=np.float64))
        if mass >= needed:
            undecided, values = undecided[upper], values[upper]
        elif mass > 0:
            needed -= mass
            sure.append(undecided[upper])
            undecided, values = undecided[~above], values[~above]
        else:  # all equal
            break
    order = np.argsort(-values, kind="stable")
    before = np.cumsum(values[order], dtype=np.float64) - values[order]
    count = max(0 if sure else 1, int(np.searchsorted(before, needed, side="left")))
    return np.sort(np.concatenate([*sure, undecided[order[:count]]]))


def _check(parameters: SamplingParameters) -> None:
    """Raise RequestError if a parameter is outside its range."""
    top_k, top_p, min_p = parameters.top_k, parameters.top_p, parameters.min_p
    penalty, seed = parameters.repetition_penalty, parameters.seed
    checks = [
        ("temperature", parameters.temperature, 0 <= parameters.temperature < np.inf, "0 or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "1 or more"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "between 0 and 1"),
        ("repetition_penalty", penalty, penalty is None or 0 < penalty < np.inf, "above 0"),
        ("seed", seed, seed is None or isinstance(seed, int), "an integer"),
    ]
    for name, value, fine, expected in checks:
        if not fine:
            raise RequestError(f"{name} is {value}, but must be {expected}.")
