"""Which position each slot of the K/V buffers holds: the ring of sliding layers and the full buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.manifest_checks import BLOCK

EMPTY = -1
"""Marks a slot that holds nothing."""


@dataclass(frozen=True)
class Geometry:
    """Sizes that decide where a token's K/V goes; counts of tokens.

    `capacity` (of the ring) is a multiple of `block` and at least window + widest call - 1, so that no row of a
    call, real or padding, lands on a position that the call or the tokens after it can see.
    """

    window: int
    capacity: int
    context: int
    """Slots of the full buffers without the spill rows: the largest rung."""
    block: int = BLOCK

    def check(self, widest: int) -> None:
        """Raise ValueError if calls of `widest` rows would overwrite visible tokens."""
        if self.capacity % self.block or self.context % self.block:
            raise ValueError(f"ring of {self.capacity} and context of {self.context} need blocks of {self.block}")
        if widest > self.block:
            raise ValueError(f"calls of {widest} rows are wider than a block of {self.block}")
        if self.capacity < self.window + widest - 1:
            raise ValueError(
                f"a ring of {self.capacity} is too small for a window of {self.window} and {widest} rows a call"
            )


class SlotTable:
    """The slots of one session. Only `write` and `truncate` change it, in time proportional to the rows."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.length = 0
        """Positions 0 .. length - 1 have been written (not all of them are still in the ring)."""
        self.sliding: NDArray[np.int32] = np.full(geometry.capacity, EMPTY, np.int32)
        """Position held by each slot of the ring, or EMPTY."""
        self.full: NDArray[np.int32] = np.full(geometry.context, EMPTY, np.int32)
        """Slot j holds position j, or EMPTY."""

    def rows_left_in_block(self, position: int) -> int:
        """How many real rows a call at `position` may have."""
        return self.geometry.block - position % self.geometry.block

    def rows_allowed(self, position: int) -> int:
        """The same for a call with drafts."""
        return self.rows_left_in_block(position)

    def write(self, rows: int, width: int) -> None:
        """A call writes `rows` real rows at `length` and pads them to `width` rows.

        Slots of padding rows hold nothing afterwards. Raises ValueError if the real rows straddle a block.
        """
        position, capacity = self.length, self.geometry.capacity
        if not 0 < rows <= min(width, self.rows_left_in_block(position)):
            raise ValueError(f"{rows} rows at position {position} do not fit one block and width {width}")
        if position + rows > self.geometry.context:
            raise ValueError(f"{rows} rows at position {position} leave the context of {self.geometry.context}")
        start = position % capacity
        self.sliding[start : start + rows] = np.arange(position, position + rows, dtype=np.int32)
        self.sliding[start + rows : start + width] = EMPTY
        self.full[position : position + rows] = np.arange(position, position + rows, dtype=np.int32)
        self.length = position + rows

    def truncate(self, position: int) -> None:
        """Forget positions from `position` on: their slots hold nothing any more."""
        if position >= self.length:
            return
        self.sliding[self.sliding >= position] = EMPTY
        self.full[position : self.length] = EMPTY
        self.length = position

    def window_before(self, position: int) -> NDArray[np.int64]:
        """The earlier positions that a query at `position` sees in a sliding layer, ascending."""
        return np.arange(max(0, position - self.geometry.window + 1), position)

    def holds_window(self, position: int) -> bool:
        """True if decoding can go on at `position` (<= length): its whole window is in the ring."""
        needed = self.window_before(position)
        return bool((self.sliding[needed % self.geometry.capacity] == needed).all())

    def last_overwritten(self, width: int) -> int:
        """The highest position that a call of `width` rows at `length` could overwrite; < 0: none."""
        return self.length + width - 1 - self.geometry.capacity

    def restore_window(self, position: int) -> None:
        """The window before `position` has been written back into the ring; forget all from there on."""
        self.truncate(position)
        needed = self.window_before(position)
        self.sliding[needed % self.geometry.capacity] = needed

    def prefix(self, position: int) -> Self:
        """An independent table that ends at `position`, with an empty ring."""
        other = type(self)(self.geometry)
        other.full[:position] = self.full[:position]
        other.length = position
        return other
