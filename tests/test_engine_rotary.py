"""Rotary angles and slot bookkeeping, each against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_gemma_coreml.bundle.manifest import RotaryEmbedding
from llm_gemma_coreml.engine.rotary import RotaryTable
from llm_gemma_coreml.engine.slots import EMPTY, Geometry, SlotTable

TABLES = [
    RotaryEmbedding(10_000.0, 256, 128),
    RotaryEmbedding(1_000_000.0, 256, 128, 8.0),
    RotaryEmbedding(1_000_000.0, 512, 64),
]


@pytest.mark.parametrize("rotary", TABLES, ids=str)
@pytest.mark.parametrize(("position", "count"), [(0, 1), (127, 2), (125, 128), (5000, 8), (131_071, 1), (3, 300)])
def test_angles_are_exact_at_any_position(rotary: RotaryEmbedding, position: int, count: int) -> None:
    cosines, sines = RotaryTable(rotary).rows(position, count)
    assert cosines.shape == sines.shape == (count, rotary.head_dim // 2)
    assert cosines.dtype == sines.dtype == np.float32
    for row in {0, count // 2, count - 1}:
        for index in (0, 1, rotary.live_frequencies - 1):
            angle = (position + row) / rotary.scaling * rotary.theta ** (-2 * index / rotary.head_dim)
            assert cosines[row, index] == pytest.approx(math.cos(angle), abs=1e-7)
            assert sines[row, index] == pytest.approx(math.sin(angle), abs=1e-7)
    assert (cosines[:, rotary.live_frequencies :] == 1).all()
    assert (sines[:, rotary.live_frequencies :] == 0).all()


def test_rows_do_not_depend_on_the_call() -> None:
    table = RotaryTable(TABLES[0])
    whole = table.rows(100, 200)
    for position in range(100, 290, 7):
        part = table.rows(position, 10)
        for found, expected in zip(part, whole, strict=True):
            assert np.array_equal(found, expected[position - 100 : position - 90])


def test_real_sizes_fit() -> None:
    Geometry(512, 640, 131_072).check(128)
    for wrong in (Geometry(512, 600, 4096), Geometry(512, 640, 4000), Geometry(512, 512, 4096)):
        with pytest.raises(ValueError, match=r"block|too small"):
            wrong.check(128)
    with pytest.raises(ValueError, match="wider than a block"):
        Geometry(512, 1024, 4096).check(129)


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, 2, 4, 8]), st.integers(0, 8)), max_size=30))
def test_slots_hold_what_was_written_last(calls: list[tuple[int, int, int]]) -> None:
    """Against a plain simulation: each slot's content is replaced by what is written to it."""
    geometry = Geometry(8, 16, 64, block=8)
    table = SlotTable(geometry)
    ring = [EMPTY] * geometry.capacity
    for rows, width, kept in calls:
        position = table.length
        rows = min(rows, width, table.rows_left_in_block(position), geometry.context - position)
        if rows == 0:
            break
        assert table.last_overwritten(width) == position + width - 1 - geometry.capacity
        table.write(rows, width)
        for row in range(width):
            slot = position % geometry.capacity + row
            if slot < geometry.capacity:  # what is beyond goes to the spill rows
                ring[slot] = position + row if row < rows else EMPTY
        table.truncate(position + min(kept, rows))
        ring = [held if held < table.length else EMPTY for held in ring]
        assert table.sliding.tolist() == ring
        assert table.full.tolist() == [j if j < table.length else EMPTY for j in range(geometry.context)]
        for query in range(table.length + 1):
            window = range(max(0, query - geometry.window + 1), query)
            assert table.holds_window(query) == all(held in ring for held in window)
        assert table.holds_window(table.length)
