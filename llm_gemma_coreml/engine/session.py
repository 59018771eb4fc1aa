"""A session: one conversation's tokens and K/V, extended in blocks, rewound, forked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.engine.runner import HeadRows, Runner, States
from llm_gemma_coreml.engine.snapshots import KeyValueRows, Snapshot

Float32 = NDArray[np.float32]


class Session:
    """Committed tokens with their K/V. All methods run on the engine's thread.

    Results do not depend on how tokens were cut into calls; so real rows never straddle a block.
    """

    def __init__(self, runner: Runner) -> None:
        """An empty session over the runner's model."""
        self.runner = runner
        self.tokens: list[int] = []
        """Committed token ids; token i has its K/V at position i."""
        self.promotions = 0
        """How often a call needed a larger rung than the call before it."""
        self.rung = runner.rungs[0]
        """Rung of the last call."""
        self.hidden: Float32 | None = None
        """Rows after the final norm of the last call, fp32 [n, hidden size]."""
        self.last_hidden: Float32 | None = None
        """Of them the row of the last committed token, fp32 [hidden size], for drafters; None after a rewind."""
        self.states: States = runner.make_states()
        self.slots = runner.make_slots()
        self._pending: tuple[int, ...] = ()
        self._marks: set[int] = set()
        self._snapshots: dict[int, Snapshot] = {}
        self._rows = KeyValueRows(runner.manifest)
        self._highest = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def match(self, ids: Sequence[int]) -> int:
        """Length of the longest common prefix of the committed tokens and `ids`."""
        limit = min(len(self.tokens), len(ids))
        ours, others = self.tokens[:limit], list(ids[:limit])
        if ours == others:
            return limit
        return next(index for index in range(limit) if ours[index] != others[index])

    # Extending

    def extend(self, ids: Sequence[int], stop: Callable[[], bool] = lambda: False) -> Float32 | None:
        """Append `ids` (at least one) and return the last one's row after the final norm, fp32 [hidden size].

        `stop` is asked before each call; if it says True, what was run so far stays committed and None is
        returned. Raises RequestError if the ids do not fit the context.
        """
        self.runner.rung_for(len(self.tokens) + len(ids))
        hidden: Float32 | None = None
        for part in self._parts(ids):
            if stop():
                return None
            hidden = self.run(part)
            self.commit(len(part))
        if hidden is None:
            raise ValueError("there is nothing to append")
        last: Float32 = hidden[-1]
        return last

    def prefill(self, ids: Sequence[int], stop: Callable[[], bool] = lambda: False) -> HeadRows | None:
        """`extend`, but return the head's row for the last token; None if it was stopped."""
        last = self.extend(ids, stop)
        return None if last is None else self.logits(last[None])[0]

    def logits(self, hidden: Float32) -> HeadRows:
        """What the head gives (logits or ids: see HeadRows) for rows after the final norm, fp32 [n, hidden size]."""
        return self.runner.logits(hidden)

    def _parts(self, ids: Sequence[int]) -> Iterable[Sequence[int]]:
        """`ids` cut at block borders, and within a block into calls that cost least."""
        start = 0
        while start < len(ids):
            in_block = min(self.slots.rows_left_in_block(len(self.tokens)), len(ids) - start)
            for rows in self.runner.cuts(in_block):
                yield ids[start : start + rows]
                start += rows

    def step(self, tokens: Sequence[int]) -> HeadRows:
        """Run `tokens` (the known one, then drafts) in one call: the head's row after each.

        They must fit one block and the widest call; `commit` decides how many stay.
        """
        return self.logits(self.run(tokens))

    def run(self, tokens: Sequence[int]) -> Float32:
        """`step` without the head: the rows after the final norm, fp32 [n, hidden size]."""
        self.commit(0)
        width = self.runner.width_for(len(tokens))
        self._take_snapshots(width)
        rung = self.runner.rung_for(len(self.tokens) + len(tokens))
        self.promotions += rung > self.rung
        self.rung = rung
        self.hidden = self.runner.run(self.states, self.slots, tokens)
        self._pending = tuple(tokens)
        self._highest = max(self._highest, self.slots.length)
        return self.hidden

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens of the last `step`; the others are forgotten."""
        if count and self._pending and self.hidden is not None:
            self.last_hidden = self.hidden[min(count, len(self._pending)) - 1]
        self.tokens.extend(self._pending[:count])
        self._pending = ()
        self.slots.truncate(len(self.tokens))

    def rows_allowed(self) -> int:
        """How many rows the next call with drafts may have: to the block's end, the widest verify call, the context's end."""
        position = len(self.tokens)
        widest = self.runner.verify_widths[-1]
        return min(self.slots.rows_allowed(position), widest, self.runner.context - position)

    # Going back

    def keep_rewindable(self, positions: Iterable[int]) -> None:
        """From now on make sure that `rewind` can return to these positions; other snapshots are dropped.

        Positions that lie ahead count too; those that can no longer be reached are ignored.
        """
        self._marks = {p for p in positions if p > len(self.tokens) or self._reachable(p)}
        self._snapshots = {p: s for p, s in self._snapshots.items() if p in self._marks}

    def _reachable(self, position: int) -> bool:
        return position in self._snapshots or self.slots.holds_window(position)

    def _take_snapshots(self, width: int) -> None:
        """Save the windows of marked positions that the next call would damage."""
        overwritten = self.slots.last_overwritten(width)
        if overwritten < 0:
            return
        first_seen = self.slots.geometry.window - 1
        for mark in self._marks:
            if mark > len(self.tokens) or mark in self._snapshots or overwritten < mark - first_seen:
                continue
            if self.slots.holds_window(mark):
                self._snapshots[mark] = self._rows.take(self.states, self.slots, mark)

    def rewind_target(self, position: int) -> int:
        """The highest position <= `position` to which `rewind` can go (0 at worst)."""
        position = min(position, len(self.tokens))
        if self.slots.holds_window(position):
            return position
        return max((p for p in self._snapshots if p <= position), default=0)

    def rewind(self, position: int) -> None:
        """Forget all tokens from `position` on. Raises ValueError if that position cannot be reached."""
        self.commit(0)
        if position != self.rewind_target(position):
            raise ValueError(f"the session cannot go back to position {position}: its window is gone")
        if self.slots.holds_window(position):
            self.slots.truncate(position)
        else:
            self._rows.restore(self.states, self.slots, self._snapshots[position])
        del self.tokens[position:]
        self.rung = self.runner.rung_for(max(position, 1))
        self.hidden = self.last_hidden = None
        self._snapshots = {p: s for p, s in self._snapshots.items() if p <= position}

    def fork(self, position: int | None = None) -> Session:
        """A new session with the tokens below `position` (default: all). Raises ValueError as `rewind`."""
        self.commit(0)
        position = len(self.tokens) if position is None else position
        if position != self.rewind_target(position):
            raise ValueError(f"the session cannot be forked at position {position}: its window is gone")
        other = Session(self.runner)
        if position:
            snapshot = self._snapshots.get(position) or self._rows.take(self.states, self.slots, position)
            self._rows.copy_full(self.states, other.states, position)
            other.slots = self.slots.prefix(position)
            self._rows.restore(other.states, other.slots, snapshot)
        other.tokens = self.tokens[:position]
        other.rung = self.runner.rung_for(max(position, 1))
        other.last_hidden = self.last_hidden if position == len(self.tokens) else None
        other._highest = position
        other._snapshots = {p: s for p, s in self._snapshots.items() if p <= position}
        other._marks = set(other._snapshots)
        return other

    def nbytes(self) -> int:
        """Bytes of memory in use: rows ever written (all rows where the runtime reserves them), and snapshots."""
        snapshots = sum(snapshot.nbytes() for snapshot in self._snapshots.values())
        reserved = [state for state in self.states if state is not None]
        if self._highest and not all(state.in_host_memory for state in reserved):
            return snapshots + sum(state.nbytes() for state in reserved)
        ring = min(self._highest, self.slots.geometry.capacity)
        written = self._rows.bytes_per_row(self.states, "sliding") * ring
        written += self._rows.bytes_per_row(self.states, "full") * self._highest
        return written + snapshots

    def snapshot_nbytes(self) -> int:
        """Bytes that one snapshot takes once the window is full."""
        return self._rows.bytes_per_row(self.states, "sliding") * self.slots.geometry.window
