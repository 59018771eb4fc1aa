"""The gates that run the model: each compares two ways to the same answer that must not differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llm_gemma_coreml.drafting.assistant import AssistantFactory
from llm_gemma_coreml.drafting.base import DrafterFactory
from llm_gemma_coreml.drafting.prompt_lookup import PromptLookupFactory
from llm_gemma_coreml.engine import gate_prompts
from llm_gemma_coreml.engine.gate_drafters import adversaries
from llm_gemma_coreml.engine.gate_results import GateResult, Tally, row_of
from llm_gemma_coreml.engine.gate_runs import (
    Output,
    buffer_addresses,
    decoded,
    filled,
    plain,
    same_cache,
    sliding_states,
    with_context,
    with_rungs,
)
from llm_gemma_coreml.engine.request import SamplingParameters
from llm_gemma_coreml.engine.runner import Runner
from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.slots import EMPTY
from llm_gemma_coreml.runtime.base import Array

SHORT_RUN, LONG_RUN = 24, 160
"""Tokens of a run over an edge, in the short and in the full set."""
_DRAFTS = 7
_SHORT_DEPTH = 8192
"""The short set does not go deeper than this many tokens."""


@dataclass(frozen=True)
class Subject:
    """What is checked, and how: `margin_bound` as in Tally; `full`: longer texts, every promotion."""

    runner: Runner
    margin_bound: float
    full: bool
    _bases: dict[int, Session] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        return self.runner.manifest.vocabulary_size

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """A prompt of `length` tokens."""
        return gate_prompts.long_prompt(length, self.vocabulary_size, self.runner.manifest.bos_id, seed)

    def base(self, length: int) -> Session:
        """A session of its own that holds all of `prompt(length)` but the last token; prefilled once."""
        if length not in self._bases:
            self._bases[length] = filled(self.runner, self.prompt(length)[:-1])
        return self._bases[length].fork()

    def tokens(self, short: int, full: int) -> int:
        """How many tokens a run has in the short and in the full set."""
        return full if self.full else short

    def run_over(self, edge: int) -> tuple[int, int]:
        """A run over the position `edge`: (tokens of its prompt, tokens to decode); (edge, 0) if none fits."""
        count = min(self.tokens(SHORT_RUN, LONG_RUN), 2 * min(edge - 2, self.runner.context - edge))
        return (edge - count // 2, count) if count > 0 else (edge, 0)

    def short_prompts(self, count: int) -> dict[str, tuple[int, ...]]:
        """Short prompts by name, cut so that `count` tokens can follow them."""
        texts = gate_prompts.prompts(self.vocabulary_size, self.runner.manifest.bos_id)
        return {name: text[: self.runner.context - count] for name, text in texts.items()}

    def wrap(self) -> int:
        """The position at which the ring is used again from its start."""
        return min(self.runner.geometry.capacity, self.runner.context)

    def own_drafters(self) -> list[DrafterFactory]:
        """Drafters of ours that the bundle offers something to."""
        return [PromptLookupFactory(), *([AssistantFactory()] if self.runner.has_assistant else [])]

    def edges(self) -> tuple[int, ...]:
        """Rungs that can be left for a larger one, as far as this set goes."""
        return tuple(rung for rung in self.runner.rungs[:-1] if self.full or rung <= _SHORT_DEPTH)


def speculative_equals_plain(subject: Subject) -> GateResult:
    """Greedy, with drafters that know the answer and abuse it, over the ring's wrap and each promotion."""
    tally, runner = Tally(subject.margin_bound), subject.runner
    for edge in (subject.wrap(), *subject.edges()):
        length, count = subject.run_over(edge)
        if not count:
            continue
        last = subject.prompt(length)[-1]
        base = subject.base(length)
        expected = plain(base.fork(), last, count)
        drafters = adversaries(len(base) + 1, expected.tokens, subject.vocabulary_size)
        telling = drafters if subject.full or edge == subject.wrap() else drafters[1:3]
        for factory in telling:
            found = decoded(base.fork(), last, count, [factory], speculate=_DRAFTS)
            _compare(tally, expected, found, f"at {edge}, drafter {factory.name}")
        for own in subject.own_drafters():
            _compare(tally, expected, decoded(base.fork(), last, count, [own]), f"at {edge}, {own.name}")
    count = min(subject.tokens(SHORT_RUN, LONG_RUN), runner.context // 2)
    for name, prompt in subject.short_prompts(count).items():
        base = filled(runner, prompt[:-1])
        expected = plain(base.fork(), prompt[-1], count)
        _compare(tally, expected, decoded(base, prompt[-1], count, subject.own_drafters()), name)
    _at_the_end_of_the_context(subject, tally)
    return tally.result("speculative = plain, greedy")


def _compare(tally: Tally, expected: Output, found: Output, where: str) -> None:
    tally.tokens(expected.tokens, found.tokens, where)
    tally.rows(expected.rows, found.rows, where)


def _at_the_end_of_the_context(subject: Subject, tally: Tally) -> None:
    """Drafts beyond the last position: the output ends where plain decoding ends."""
    left = 21
    prompt = subject.prompt(min(90, subject.runner.context - left))
    base = filled(subject.runner, prompt[:-1])
    expected = plain(base.fork(), prompt[-1], left)
    narrow = with_context(subject.runner, len(prompt) + left)
    for factory in adversaries(len(prompt), [*expected.tokens, *range(20)], subject.vocabulary_size):
        session = base.fork()
        session.runner = narrow
        found = decoded(session, prompt[-1], None, [factory], speculate=_DRAFTS)
        tally.tokens(expected.tokens, found.tokens, f"end of the context, drafter {factory.name}")


def ring_equals_full_cache(subject: Subject) -> GateResult:
    """Calls on a ring in use, against single rows on a ring that holds just the row's window, from a full log."""
    tally, runner = Tally(subject.margin_bound), subject.runner
    capacity = runner.geometry.capacity
    length = min(capacity + capacity // 3, runner.context // 2)
    session, log = Session(runner), _FullLog(runner)
    for start in range(0, length, 40):  # pieces that do not fit the blocks: the ring sees all kinds of calls
        session.prefill(subject.prompt(length)[start : start + 40])
        log.extend(session)
    reference = session.fork()
    for rows in [1, 2, 4, runner.widths[-1], 3, 1] * subject.tokens(1, 6):
        rows = min(rows, session.rows_allowed())
        if rows <= 0:
            break
        tokens = subject.prompt(len(session) + rows, seed=1)[-rows:]
        found = session.step(tokens)
        session.commit(rows)
        for token, logits in zip(tokens, found, strict=True):
            log.rebuild(reference)
            tally.row(row_of(reference.step([token])[0]), row_of(logits), f"position {len(reference)}")
            reference.commit(1)
            log.extend(reference)
        if tally.bitwise:
            tally.require(same_cache(session, reference), f"K/V differ before position {len(session)}")
    return tally.result("ring = full cache")


class _FullLog:
    """A full cache: the sliding layers' K/V rows of every position, copied when they are written."""

    def __init__(self, runner: Runner) -> None:
        self._geometry = runner.geometry
        self._noise = np.random.default_rng(0)
        self._length = 0
        self._rows: list[Array] = []

    def extend(self, session: Session) -> None:
        """Copy the rows of the positions that are new; no more than a block at a time."""
        new = np.arange(self._length, len(session))
        for index, (state, name) in enumerate(sliding_states(session)):
            if index == len(self._rows):
                heads, _, dim = state.shapes()[name]
                self._rows.append(np.zeros((heads, self._geometry.context, dim), np.float16))
            self._rows[index][:, new] = state.take_rows(name, new % self._geometry.capacity)
        self._length = len(session)

    def rebuild(self, session: Session) -> None:
        """Fill the rings with noise, marked as empty, and put the window's rows into their places."""
        slots = session.slots
        seen = slots.window_before(len(session))
        places = seen % self._geometry.capacity
        slots.sliding[:] = EMPTY
        slots.sliding[places] = seen
        for (state, name), rows in zip(sliding_states(session), self._rows, strict=True):
            heads, count, dim = state.shapes()[name]
            values = np.empty((heads, count, dim), np.float16)
            values[...] = self._noise.standard_normal((count, 1), dtype=np.float32)
            values[:, places] = rows[:, seen]
            state.put_rows(name, slice(None), values)


def block_prefill_equals_single_tokens(subject: Subject) -> GateResult:
    """Prefill in pieces of all sizes against one token per call, over the ring's wrap."""
    tally, runner = Tally(subject.margin_bound), subject.runner
    count = min(subject.tokens(150, 600), runner.context - 1)
    start = max(0, min(subject.wrap() - 30, runner.context - count))
    prompt = subject.prompt(start + count)
    base = filled(runner, prompt[:start])
    single, blocks = (base.fork(), base) if start else (Session(runner), Session(runner))
    expected = []
    for token in prompt[start:]:
        expected.append(row_of(single.step([token])[0]))
        single.commit(1)
    pieces = [runner.widths[-1], 1, 7, 33, 2, 64, 5]
    while len(blocks) < len(prompt):
        piece = pieces.pop(0)
        pieces.append(piece)
        blocks.prefill(prompt[len(blocks) : len(blocks) + piece])
        assert blocks.hidden is not None
        first = len(blocks) - len(blocks.hidden)
        for position, logits in enumerate(runner.logits(blocks.hidden), first):
            tally.row(expected[position - start], row_of(logits), f"position {position}, pieces of {piece}")
    if tally.bitwise:
        tally.require(same_cache(single, blocks), "K/V differ at the end")
    return tally.result("block prefill = token by token")


def promoted_equals_wide(subject: Subject) -> GateResult:
    """Decoding over the edge of a rung, against a session that ran in the wider functions from the start."""
    tally, runner = Tally(subject.margin_bound), subject.runner
    for edge in subject.edges():
        length, count = subject.run_over(edge)
        prompt = subject.prompt(length)
        narrow = subject.base(length)
        addresses = buffer_addresses(narrow)
        wide = filled(with_rungs(runner, [r for r in runner.rungs if r > edge]), prompt[:-1])
        if tally.bitwise:
            tally.require(same_cache(narrow, wide), f"K/V differ before {edge}")
        expected = plain(wide, prompt[-1], count)
        found = plain(narrow, prompt[-1], count)
        tally.rows(expected.rows, found.rows, f"promotion at {edge}")
        tally.require(narrow.promotions > 0, f"no promotion at {edge}")
        tally.require(addresses == buffer_addresses(narrow), f"K/V buffers moved at {edge}")
        if tally.bitwise:
            tally.require(same_cache(narrow, wide), f"K/V differ after {edge}")
    left_out = [rung for rung in runner.rungs[:-1] if rung not in subject.edges()]
    detail = f"promotions at {left_out} are checked with --full" if left_out else ""
    if len(runner.rungs) == 1:
        detail = f"one rung of {runner.context} tokens: nothing to be promoted to"
    return tally.result("promoted = wide from the start", detail)


def revisited_equals_fresh(subject: Subject) -> GateResult:
    """Forks, rewinds (near, and far by snapshot) and runs repeated, against a fresh session."""
    tally, runner = Tally(subject.margin_bound), subject.runner
    count = min(subject.tokens(16, 80), runner.context // 2)
    length = min(subject.wrap() + 50, runner.context // 2)
    prompt = subject.prompt(length)
    expected = plain(filled(runner, prompt[:-1]), prompt[-1], count)
    session = filled(runner, prompt[:-1])
    here = len(session)
    session.keep_rewindable([here])
    fork = session.fork()
    further = min(runner.geometry.capacity + 20, runner.context - here)
    detours = {"near": subject.prompt(min(40, further), seed=2), "far": subject.prompt(further, seed=3)}
    for name, detour in detours.items():
        session.prefill(detour)
        session.rewind(here)
        tally.rows(expected.rows, plain(session.fork(), prompt[-1], count).rows, f"fork after a {name} rewind")
        tally.rows(expected.rows, plain(session, prompt[-1], count).rows, f"after a {name} rewind")
        session.rewind(here)
    tally.rows(expected.rows, plain(fork.fork(), prompt[-1], count).rows, "fork of a fork")
    tally.rows(expected.rows, plain(fork, prompt[-1], count).rows, "fork")
    fresh = filled(runner, prompt[:-1])
    if tally.bitwise:
        tally.require(same_cache(session, fresh), "K/V differ after a rewind")
    return tally.result("forked, rewound, run again = fresh")


def sampled_equals_plain(subject: Subject) -> GateResult:
    """Sampled text with drafts against sampled text without, over seeds and temperatures."""
    tally, runner = Tally(subject.margin_bound), subject.runner
    count = min(subject.tokens(24, 100), runner.context // 2)
    prompt = subject.short_prompts(count)["records"]
    base = filled(runner, prompt[:-1])
    for number, temperature in enumerate(subject.tokens(1, 3) * [0.3, 1.0, 2.0]):
        top_k, top_p, penalty = (64, 0.95, 1.1) if number % 2 else (None, None, None)
        sampling = SamplingParameters(temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty, seed=1000 + number)
        expected = plain(base.fork(), prompt[-1], count, sampling)
        drafters = adversaries(len(prompt), expected.tokens, subject.vocabulary_size)
        for factory in [drafters[2], *subject.own_drafters()]:
            found = decoded(base.fork(), prompt[-1], count, [factory], sampling, _DRAFTS)
            where = f"temperature {temperature}, seed {sampling.seed}, drafter {factory.name}"
            if tally.bitwise:
                tally.tokens(expected.tokens, found.tokens, where)
            else:  # a draw may fall on the edge between two tokens
                agreeing = _common(expected.tokens, found.tokens)
                tally.compared += agreeing
                tally.notes += [f"{where}: parts at token {agreeing}"] if agreeing < count else []
    return tally.result("sampled: speculative = plain")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
