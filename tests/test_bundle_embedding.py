"""Embedding rows from a mapped file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from bundle_samples import BLOCK_SIZE, TABLE, TABLE_SCALES, manifest, write_small_files

from llm_gemma_coreml.bundle.embedding import EmbeddingRows
from llm_gemma_coreml.bundle.manifest import EmbeddingTable
from llm_gemma_coreml.errors import BundleError, RequestError


@pytest.fixture
def rows(tmp_path: Path) -> EmbeddingRows:
    write_small_files(tmp_path)
    return EmbeddingRows(tmp_path, manifest().embedding)


def test_rows_are_the_scaled_values(rows: EmbeddingRows) -> None:
    ids = [0, 95, 7, 7]
    found = rows.rows(ids)
    # In float64 the product of an int8, an fp16 and 8 is exact, and it fits fp32's 24 bits.
    exact = TABLE.astype(np.float64) * np.repeat(TABLE_SCALES.astype(np.float64), BLOCK_SIZE, axis=1) * 8.0
    assert found.dtype == np.float32
    assert np.array_equal(found, exact[ids])


def test_no_rows(rows: EmbeddingRows) -> None:
    assert rows.rows([]).shape == (0, 64)


@pytest.mark.parametrize("token", [-1, 96, 2**40])
def test_ids_out_of_the_table_are_refused(rows: EmbeddingRows, token: int) -> None:
    with pytest.raises(RequestError, match=f"Token id {token} "):
        rows.rows([0, token])


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    write_small_files(tmp_path)
    data = bytearray((tmp_path / "table.bin").read_bytes())
    data[64 + TABLE.nbytes : 64 + TABLE.nbytes + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "table.bin").write_bytes(data)
    rows = EmbeddingRows(tmp_path, manifest().embedding)
    rows.rows([1])
    with pytest.raises(BundleError, match="NaN"):
        rows.rows([1, 0])


def test_fp16_rows_are_the_values(tmp_path: Path) -> None:
    write_small_files(tmp_path)
    values = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float16)
    values[3, 5] = np.inf
    (tmp_path / "table.bin").write_bytes(bytes(8) + values.astype("<f2").tobytes())
    table = dataclasses.replace(manifest().embedding, dtype="float16", values_offset=8, multiplier=1.0)
    rows = EmbeddingRows(tmp_path, table)
    found = rows.rows([95, 0, 0])
    assert found.dtype == np.float32
    assert np.array_equal(found, values[[95, 0, 0]].astype(np.float32))
    with pytest.raises(BundleError, match="NaN or infinite"):
        rows.rows([3])
    with pytest.raises(BundleError, match="the embedding table ends at"):
        EmbeddingRows(tmp_path, dataclasses.replace(table, values_offset=10))


def test_a_table_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    write_small_files(tmp_path)
    for change in ({"scales_offset": 1 << 50}, {"rows": 1 << 40}):
        with pytest.raises(BundleError, match="the embedding table ends at"):
            EmbeddingRows(tmp_path, dataclasses.replace(manifest().embedding, **change))


def test_a_table_outside_of_the_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write_small_files(tmp_path)
    table = dataclasses.replace(manifest().embedding, path="../table.bin")
    with pytest.raises(BundleError, match="leaves the bundle"):
        EmbeddingRows(tmp_path / "bundle", table)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_a_long_prompt_does_not_make_the_table_part_of_this_process(tmp_path: Path) -> None:
    columns, count = 1024, 4096
    (tmp_path / "table.bin").write_bytes(np.ones((count, columns), np.float16).tobytes())
    table = EmbeddingTable("table.bin", count, columns, columns, 0, 0, 1.0, dtype="float16")
    rows = EmbeddingRows(tmp_path, table)
    assert rows.rows(range(count)).sum() == count * columns
    held = 0
    mapping = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            mapping = rest[-1]  # a path, or for memory without a file its inode, 0
        held += int(rest[0]) if key == "Rss:" and mapping == str(tmp_path / "table.bin") else 0
    assert held * 1024 < count * columns  # of twice as many bytes
