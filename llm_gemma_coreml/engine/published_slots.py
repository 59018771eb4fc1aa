"""Slots of the published layout, whose ring is no longer than the window: what a call may write and what its rows see.

A block of rows that overwrites slots takes positions away which its earlier rows still ought to see. So blocks are exact
only until the ring is full; from then on, one row at a time is. Padding rows are written nowhere in this layout.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.engine.slots import SlotTable

Positions = NDArray[np.int64]
Visible = NDArray[np.bool_]


class PublishedSlots(SlotTable):
    """The slots of one session."""

    def write(self, rows: int, width: int) -> None:
        """A call writes `rows` real rows at `length`. Raises ValueError if they leave the context or the ring."""
        position = self.length
        if not 0 < rows <= min(width, self.geometry.capacity):
            raise ValueError(f"{rows} rows at position {position} do not fit width {width} and the ring")
        if position + rows > self.geometry.context:
            raise ValueError(f"{rows} rows at position {position} leave the context of {self.geometry.context}")
        written = np.arange(position, position + rows, dtype=np.int32)
        self.sliding[written % self.geometry.capacity] = written
        self.full[written] = written
        self.length = position + rows

    @abstractmethod
    def visible(self, queries: Positions, first: int, rows: int) -> Visible:
        """Which slots of the ring each query sees, bool [len(queries), capacity].

        queries: positions of the rows. The call has just written `rows` real rows, the first at position `first`.
        """


class ExactSlots(PublishedSlots):
    """Every row sees its whole window and nothing else: blocks while the ring fills, then single rows."""

    def rows_left_in_block(self, position: int) -> int:
        geometry = self.geometry
        return max(geometry.capacity - position, geometry.capacity - geometry.window + 1)

    def write(self, rows: int, width: int) -> None:
        if rows > self.rows_left_in_block(self.length):
            raise ValueError(f"{rows} rows at position {self.length} would overwrite positions that they see")
        super().write(rows, width)

    def visible(self, queries: Positions, first: int, rows: int) -> Visible:
        """By the position that each slot holds, so that what rejected drafts left behind is never seen."""
        held, query = self.sliding[None].astype(np.int64), queries[:, None]
        near: Visible = (held >= 0) & (held <= query) & (held > query - self.geometry.window)
        return near


class AsPublishedSlots(PublishedSlots):
    """As the bundle's author runs it: blocks past the ring's end too, and everything in a full ring is visible."""

    def rows_left_in_block(self, position: int) -> int:
        """Prefill is cut where the ring starts again."""
        return self.geometry.capacity - position % self.geometry.capacity

    def rows_allowed(self, position: int) -> int:
        """Drafts are not."""
        return self.geometry.capacity

    def visible(self, queries: Positions, first: int, rows: int) -> Visible:
        slots = np.arange(self.geometry.capacity)[None]
        query = queries[:, None]
        if first + rows - 1 < self.geometry.capacity:
            early: Visible = slots <= query
            return early
        offset = (slots - first) % self.geometry.capacity
        later: Visible = (offset < rows) & (offset > query - first)
        return ~later

    def holds_window(self, position: int) -> bool:
        """Decoding goes on at the end whatever rejected drafts have overwritten; a rewind wants the true window."""
        return position == self.length or super().holds_window(position)
