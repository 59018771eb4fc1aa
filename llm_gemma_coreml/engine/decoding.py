"""The decoding loop: prefill what is not cached, then rounds of drafts, one target call, acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.engine.request import FinishReason, GenerationRequest, GenerationStatistics
from llm_gemma_coreml.engine.runner import HeadRows
from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator, accept_drafts
from llm_gemma_coreml.errors import GemmaCoreMLError
from llm_gemma_coreml.runtime.notices import notify

Float32 = NDArray[np.float32]
Masks = list[NDArray[np.bool_] | None] | None


class Decoding:
    """One request over one session. Its tokens are those of plain decoding, whatever the drafts.

    `session` must hold a proper prefix of the prompt and nothing else.
    """

    def __init__(
        self,
        session: Session,
        request: GenerationRequest,
        speculator: Speculator,
        statistics: GenerationStatistics,
        cancelled: Callable[[], bool] = lambda: False,
        start_time: float | None = None,
    ) -> None:
        """`start_time` (time.perf_counter) is when the user asked, for the time to the first token."""
        self._session = session
        self._request = request
        self._speculator = speculator
        self._statistics = statistics
        self._cancelled = cancelled
        self._start_time = time.perf_counter() if start_time is None else start_time
        manifest = session.runner.manifest
        self._sampler = Sampler(request.sampling, manifest.suppressed_ids)
        self._history = TokenHistory(request.token_ids if self._sampler.needs_history else ())
        self._vocabulary_size = manifest.vocabulary_size
        room = session.runner.context - len(request.token_ids)
        self._limit = room if request.max_tokens is None else min(request.max_tokens, room)

    def run(self) -> Iterator[tuple[int, ...]]:
        """Yield the output's tokens as they are accepted; the statistics are final when it ends."""
        promotions = self._session.promotions
        try:
            last = self._prefill()
            if last is not None and self._limit <= 0:
                self._finish("length")
            elif last is not None:
                yield from self._decode(self._session.logits(last[None]))
        finally:
            statistics = self._statistics
            statistics.promotions = self._session.promotions - promotions
            statistics.warnings += self._speculator.take_warnings()
            if statistics.finish_reason is None:
                statistics.finish_reason = "cancelled"

    def _prefill(self) -> Float32 | None:
        """The prompt's last row after the final norm; None if the request was cancelled."""
        request, session = self._request, self._session
        self._statistics.prompt_tokens = len(request.token_ids)
        self._statistics.cached_tokens = len(session)
        if notice := session.runner.prefill_notice(len(session), len(request.token_ids)):
            notify(notice)
        start = time.perf_counter()
        last = session.extend(request.token_ids[len(session) :], self._cancelled)
        self._statistics.prefill_seconds = time.perf_counter() - start
        return last

    def _decode(self, logits: HeadRows) -> Iterator[tuple[int, ...]]:
        position = len(self._session)
        known, visible = self._accept(self._draw(logits, (), position, self._masks(())))
        first_time = time.perf_counter()
        self._statistics.time_to_first_token = first_time - self._start_time
        if visible:
            yield visible
        if self._statistics.finish_reason is not None:
            return
        # Drafters index the whole prompt: only now, so that the first token does not wait for it.
        request = self._request
        tokens = [*request.token_ids, *known]
        self._speculator.begin(tokens, request.pinned, request.speculate, request.constraint)
        self._statistics.drafters = self._speculator.statistics
        while self._statistics.finish_reason is None and not self._cancelled():
            known, visible = self._round(known[-1])
            self._statistics.decode_seconds = time.perf_counter() - first_time
            if visible:
                yield visible

    def _round(self, known: int) -> tuple[list[int], tuple[int, ...]]:
        """One target call with the known token and drafts: (new tokens, those of them that are output)."""
        session = self._session
        drafts = self._drafts()
        masks = self._masks(drafts)
        if masks is not None:
            drafts = _allowed_drafts(drafts, masks)
            self._speculator.cut(len(drafts))
            if _nothing_allowed(masks[0]):
                return self._accept([])
        start = time.perf_counter()
        logits = session.step([known, *drafts])
        seconds = time.perf_counter() - start
        self._statistics.rounds += 1
        tokens, visible = self._accept(self._draw(logits, drafts, len(session) + 1, masks))
        session.commit(1 + _agreement(tokens, drafts))
        self._speculator.observe(tokens, seconds, session.rung)
        return tokens, visible

    def _drafts(self) -> tuple[int, ...]:
        """Drafts for this round, as many as block, context and max_tokens leave room for."""
        left = self._limit - self._statistics.output_tokens
        limit = min(self._session.rows_allowed(), left) - 1
        # Asked even if there is no room: `observe` refers to the last proposal.
        drafts = self._speculator.propose(limit, self._session.rung).tokens[: max(limit, 0)]
        wrong = (i for i, token in enumerate(drafts) if not 0 <= token < self._vocabulary_size)
        return tuple(drafts[: next(wrong, len(drafts))])

    def _masks(self, drafts: Sequence[int]) -> Masks:
        constraint = self._request.constraint
        return None if constraint is None else constraint.masks(drafts)

    def _draw(self, logits: HeadRows, drafts: Sequence[int], position: int, masks: Masks) -> list[int]:
        """The tokens that plain decoding would draw; none if the constraint allows nothing."""
        if masks is not None and _nothing_allowed(masks[0]):
            return []
        return accept_drafts(self._sampler, logits, drafts, position, self._history, masks)

    def _accept(self, tokens: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        """Take up tokens in order until the output ends: (tokens taken, those that are output)."""
        request, statistics = self._request, self._statistics
        if not tokens:
            self._finish_by_constraint()
        visible: list[int] = []
        for count, token in enumerate(tokens, 1):
            if token in request.stop_ids:
                statistics.stop_id = token
                self._finish("stop")
                return list(tokens[:count]), tuple(visible)
            visible.append(token)
            statistics.output_tokens += 1
            if request.constraint is not None:
                request.constraint.advance(token)
            if request.stop_check is not None and request.stop_check(token):
                self._finish("stop_check")
            elif statistics.output_tokens >= self._limit:
                self._finish("length")
            if statistics.finish_reason is not None:
                return list(tokens[:count]), tuple(visible)
        return list(tokens), tuple(visible)

    def _finish_by_constraint(self) -> None:
        constraint = self._request.constraint
        if constraint is None or not constraint.complete():
            raise GemmaCoreMLError(
                "The grammar of the answer allows no token here and is not complete. Simplify the schema."
            )
        self._finish("constraint")

    def _finish(self, reason: FinishReason) -> None:
        self._statistics.finish_reason = reason


def _agreement(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many leading drafts were drawn: their K/V is that of the output."""
    count = 0
    while count < min(len(tokens), len(drafts)) and tokens[count] == drafts[count]:
        count += 1
    return count


def _nothing_allowed(mask: NDArray[np.bool_] | None) -> bool:
    return mask is not None and not mask.any()


def _allowed_drafts(
    drafts: Sequence[int], masks: Sequence[NDArray[np.bool_] | None]
) -> tuple[int, ...]:
    """The leading drafts that the grammar allows; no row of theirs is one where nothing may follow."""
    for index, draft in enumerate(drafts):
        mask = masks[index]
        if (mask is not None and not mask[draft]) or _nothing_allowed(masks[index + 1]):
            return tuple(drafts[:index])
    return tuple(drafts)
