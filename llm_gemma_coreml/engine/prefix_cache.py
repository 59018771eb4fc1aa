"""Sessions that are kept between requests: the one with the longest common prefix is continued."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llm_gemma_coreml.engine.session import Session
from llm_gemma_coreml.engine.speculation import Speculator
from llm_gemma_coreml.errors import RequestError

MAXIMUM_SLOTS = 8
_SNAPSHOT_SHARE = 0.25
"""Share of the budget that one session's snapshots may take."""
_MAXIMUM_SNAPSHOTS = 12
_WORTH_COPYING = 32
"""Fewer tokens than this are rather prefilled again than copied or kept."""


@dataclass(eq=False)
class SessionSlot:
    """A session with its drafters, and the lengths of the prefixes that are pinned."""

    session: Session
    speculator: Speculator
    pins: set[int] = field(default_factory=set)
    landmarks: list[int] = field(default_factory=list)
    """Positions to return to: ends of prompts (less one token, which must be run again), and where prompts
    began to differ from those of other sessions."""
    last_use: int = 0

    @property
    def pinned(self) -> int:
        """So many tokens at the session's start are never rewound or evicted."""
        return max(self.pins, default=0)


class PrefixCache:
    """Session slots under a memory budget, least recently used evicted first. Used on the engine's thread."""

    def __init__(
        self,
        make: Callable[[Session | None], SessionSlot],
        budget: int | None = None,
        slots: int = MAXIMUM_SLOTS,
    ) -> None:
        """make: builds a slot around a session (None: a new one). budget: bytes of K/V, default by memory."""
        self._make = make
        self.budget = default_budget() if budget is None else budget
        self._maximum = slots
        self._slots: list[SessionSlot] = []
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._slots)

    def acquire(self, ids: Sequence[int]) -> SessionSlot:
        """A slot whose session holds a proper prefix of `ids` (at least one id) and nothing else."""
        best, keep, common = self._best(ids)
        lost = 0 if best is None else len(best.session) - keep
        if best is None or (keep < _WORTH_COPYING and (keep < best.pinned or lost >= _WORTH_COPYING)):
            slot = self._fresh()
        elif keep < best.pinned or self._should_fork(best, keep):
            slot = self._make(best.session.fork(keep))
            slot.landmarks = best.landmarks.copy()
            self._add(slot)
        else:
            best.session.rewind(keep)
            slot = best
        slot.last_use = next(self._clock)
        self._mark(slot, len(ids), common)
        return slot

    def holding(self, ids: Sequence[int]) -> SessionSlot | None:
        """A slot whose session begins with all of `ids`."""
        return next((slot for slot in self._slots if slot.session.match(ids) == len(ids)), None)

    def _best(self, ids: Sequence[int]) -> tuple[SessionSlot | None, int, int]:
        """(slot of which the most tokens can be used, how many, the longest prefix that any session has)."""
        best, most, longest = None, 0, 0
        for slot in sorted(self._slots, key=lambda slot: -slot.last_use):
            common = min(slot.session.match(ids), len(ids) - 1)
            keep = slot.session.rewind_target(common)
            longest = max(longest, common)
            if keep > most:
                best, most = slot, keep
        return best, most, longest

    def _should_fork(self, slot: SessionSlot, keep: int) -> bool:
        """True if the session's own continuation is worth keeping beside the new one, and there is room.

        Copying K/V is far cheaper than computing it, but takes memory: a long prefix is not copied for the sake
        of a short continuation (question after question about one document).
        """
        lost = len(slot.session) - keep
        if lost < _WORTH_COPYING or lost < keep // 8:
            return False
        copied = slot.session.nbytes() * keep // len(slot.session)
        while self.nbytes() + copied > self.budget:
            if not self._evict(slot):
                return False
        return True

    def _fresh(self) -> SessionSlot:
        slot = self._make(None)
        self._add(slot)
        return slot

    def _add(self, slot: SessionSlot) -> None:
        self._slots.append(slot)
        slot.last_use = next(self._clock)
        while len(self._slots) > self._maximum and self._evict(slot):
            pass

    def release(self, slot: SessionSlot) -> None:
        """The request is over: make room for the next ones."""
        slot.last_use = next(self._clock)
        while self.nbytes() > self.budget and self._evict(slot):
            pass

    def drop(self, slot: SessionSlot) -> None:
        """Forget a slot, because its session may be damaged."""
        if slot in self._slots:
            self._slots.remove(slot)

    def _evict(self, keep: SessionSlot) -> bool:
        candidates = [slot for slot in self._slots if slot is not keep and not slot.pins]
        if not candidates:
            return False
        self._slots.remove(min(candidates, key=lambda slot: slot.last_use))
        return True

    def pin(self, slot: SessionSlot, length: int) -> None:
        """Keep the first `length` tokens of the slot's session until `unpin`. RequestError beyond the budget."""
        slot.pins.add(length)
        needed = sum(slot.session.nbytes() for slot in self._slots if slot.pins)
        if needed > self.budget:
            slot.pins.discard(length)
            raise RequestError(
                f"Pinned tokens would take {needed >> 20} MB, more than the {self.budget >> 20} MB for sessions. "
                "Unpin others, or open the engine with a larger budget."
            )
        self.release(slot)

    def unpin(self, ids: Sequence[int]) -> bool:
        """Undo `pin` for these tokens; False if they were not pinned."""
        found = [slot for slot in self._slots if len(ids) in slot.pins and slot.session.match(ids) == len(ids)]
        for slot in found:
            slot.pins.discard(len(ids))
        return bool(found)

    def clear(self) -> None:
        """Forget all sessions."""
        self._slots.clear()

    def nbytes(self) -> int:
        """Bytes of K/V and snapshots of all sessions."""
        return sum(slot.session.nbytes() for slot in self._slots)

    def _mark(self, slot: SessionSlot, prompt: int, common: int) -> None:
        """Choose where this session can be rewound to after its ring has wrapped.

        To the prompt's end (the next turn may render the answer differently), to pinned prefixes, to where it
        begins to differ from other sessions (the next prompt may differ there too), to points before the end at
        doubling distances (a prompt that differs in its last n tokens then costs about n tokens more), and to
        earlier landmarks.
        """
        session = slot.session
        slot.landmarks = [p for p in slot.landmarks if p <= len(session) and p not in (common, prompt - 1)]
        block = session.slots.geometry.block
        distances = (block << doubling for doubling in range(prompt.bit_length()))
        points = [(prompt - distance) // block * block for distance in distances if distance < prompt]
        wanted = [prompt - 1, *slot.pins, common, *points, *reversed(slot.landmarks)]
        slot.landmarks += [common, prompt - 1]
        size = max(1, session.snapshot_nbytes())
        allowed = int(min(_MAXIMUM_SNAPSHOTS, max(1, self.budget * _SNAPSHOT_SHARE // size)))
        session.keep_rewindable([p for p in dict.fromkeys(wanted) if p > 0][:allowed])


def default_budget() -> int:
    """A quarter of the machine's memory, at most 4 GB."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        memory = 8 << 30
    return min(memory // 4, 4 << 30)
