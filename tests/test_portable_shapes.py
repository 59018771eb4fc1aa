"""Operations that move, pick and place elements, against numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from portable_programs import mb, run_package, save_program, translate_package

RNG = np.random.default_rng(1)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
IMAGE = RNG.standard_normal((2, 4, 4, 6)).astype(np.float32)
PICK = np.array([2, 0, -1], np.int32)
TABLE = np.array([[1, 0], [0, 2]], np.int32)
ROWS = RNG.standard_normal((2, 2, 4)).astype(np.float32)


def _image(function: Callable[..., torch.Tensor], **options: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.asarray(function(torch.from_numpy(x), **options))


def _scattered(operation: Any, x: np.ndarray, places: tuple[Any, ...], updates: np.ndarray) -> np.ndarray:
    result = x.copy()
    if operation is None:
        result[places] = updates
    else:
        operation.at(result, places, updates)
    return result


CASES: dict[str, tuple[Callable[..., Any], np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "reshape": (lambda x: mb.reshape(x=x, shape=[4, -1]), X, lambda x: x.reshape(4, -1)),
    "reshape_keeps_sizes_at_zero": (lambda x: mb.reshape(x=x, shape=[0, -1]), X, lambda x: x.reshape(2, 12)),
    "reshape_like": (
        lambda x: mb.reshape_like(
            x=x, ref_tensors=(np.zeros((6, 5)), x), begins=[0, 2], ends=[1, 3], end_masks=[False, False]
        ),
        X,
        lambda x: x.reshape(6, 4),
    ),
    "transpose": (lambda x: mb.transpose(x=x, perm=[1, -1, 0]), X, lambda x: x.transpose(1, 2, 0)),
    "expand_and_squeeze": (
        lambda x: mb.squeeze(x=mb.expand_dims(x=x, axes=[0, 2]), axes=[0]),
        X,
        lambda x: x[:, None],
    ),
    "squeeze_all": (lambda x: mb.squeeze(x=mb.expand_dims(x=x, axes=[0, 3])), X, lambda x: x),
    "flatten2d": (lambda x: mb.flatten2d(x=x, axis=2), X, lambda x: x.reshape(6, 4)),
    "concat": (
        lambda x: mb.concat(values=(x, ROWS), axis=-2),
        X,
        lambda x: np.concatenate([x, ROWS], 1),
    ),
    "concat_interleaved": (
        lambda x: mb.concat(values=(x, mb.add(x=x, y=1.0)), axis=1, interleave=True),
        X,
        lambda x: np.stack([x, x + 1], 2).reshape(2, 6, 4),
    ),
    "stack": (lambda x: mb.stack(values=(x, x), axis=1), X, lambda x: np.stack([x, x], 1)),
    "split": (lambda x: mb.split(x=x, num_splits=2, axis=-1)[1], X, lambda x: x[..., 2:]),
    "split_sizes": (lambda x: mb.split(x=x, split_sizes=[1, 2], axis=1)[1], X, lambda x: x[:, 1:]),
    "tile": (lambda x: mb.tile(x=x, reps=[2, 1, 3]), X, lambda x: np.tile(x, (2, 1, 3))),
    "pad": (
        lambda x: mb.pad(x=x, pad=[1, 2, 0, 3], mode="constant", constant_val=7.0),
        X,
        lambda x: np.pad(x, ((0, 0), (1, 2), (0, 3)), constant_values=7),
    ),
    "pad_reflect": (
        lambda x: mb.pad(x=x, pad=[1, 2], mode="reflect"),
        X,
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 2)), mode="reflect"),
    ),
    "pad_replicate": (
        lambda x: mb.pad(x=x, pad=[2, 1], mode="replicate"),
        X,
        lambda x: np.pad(x, ((0, 0), (0, 0), (2, 1)), mode="edge"),
    ),
    "reverse": (lambda x: mb.reverse(x=x, axes=[0, -1]), X, lambda x: x[::-1, :, ::-1]),
    "reverse_sequence": (
        lambda x: mb.reverse_sequence(x=x, lengths=[2, 3], seq_axis=1, batch_axis=0),
        X,
        lambda x: np.stack([x[0][[1, 0, 2]], x[1][[2, 1, 0]]]),
    ),
    "fill": (lambda x: mb.add(x=x, y=mb.fill(shape=[3, 4], value=2.0)), X, lambda x: x + 2),
    "fill_like": (lambda x: mb.fill_like(ref_tensor=x, value=4.0), X, lambda x: np.full_like(x, 4)),
    "range_1d": (
        lambda x: mb.add(x=x, y=mb.range_1d(start=1.0, end=9.0, step=2.0)),
        X,
        lambda x: x + np.arange(1, 9, 2),
    ),
    "shape": (lambda x: mb.mul(x=mb.shape(x=x), y=2), X, lambda x: np.multiply(x.shape, 2)),
    "one_hot": (
        lambda x: mb.one_hot(indices=mb.cast(x=x, dtype="int32"), one_hot_vector_size=3, axis=1, on_value=5),
        np.abs(X),
        lambda x: 5 * np.moveaxis(np.eye(9)[x.astype(int)][..., :3], -1, 1),
    ),
    "sliding_windows": (
        lambda x: mb.sliding_windows(x=x, axis=2, size=3, stride=1),
        X,
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 3, 2),
    ),
    "sliding_windows_with_stride": (
        lambda x: mb.sliding_windows(x=x, axis=-1, size=2, stride=2),
        X,
        lambda x: x.reshape(2, 3, 2, 2),
    ),
    "depth_to_space": (
        lambda x: mb.depth_to_space(x=x, block_size=2),
        IMAGE,
        lambda x: x.reshape(2, 2, 2, 1, 4, 6).transpose(0, 3, 4, 1, 5, 2).reshape(2, 1, 8, 12),
    ),
    "space_to_depth": (
        lambda x: mb.space_to_depth(x=x, block_size=2),
        IMAGE,
        lambda x: x.reshape(2, 4, 2, 2, 3, 2).transpose(0, 3, 5, 1, 2, 4).reshape(2, 16, 2, 3),
    ),
    "pixel_shuffle": (
        lambda x: mb.pixel_shuffle(x=x, upscale_factor=2),
        IMAGE,
        _image(torch.nn.functional.pixel_shuffle, upscale_factor=2),
    ),
    "pixel_unshuffle": (
        lambda x: mb.pixel_unshuffle(x=x, downscale_factor=np.uint32(2)),
        IMAGE,
        _image(torch.nn.functional.pixel_unshuffle, downscale_factor=2),
    ),
    "slice_by_index": (
        lambda x: mb.slice_by_index(x=x, begin=[0, 1, -3], end=[1, 3, -1], stride=[1, 1, 1]),
        X,
        lambda x: x[0:1, 1:3, -3:-1],
    ),
    "slice_by_index_masks": (
        lambda x: mb.slice_by_index(
            x=x,
            begin=[1, 9, 3],
            end=[0, 9, 0],
            stride=[1, 2, -1],
            begin_mask=[False, True, False],
            end_mask=[False, True, True],
            squeeze_mask=[True, False, False],
        ),
        X,
        lambda x: x[1, ::2, 3::-1],
    ),
    "slice_by_index_last": (
        lambda x: mb.slice_by_index(
            x=x,
            begin=[0, 0, -1],
            end=[2, 3, 0],
            squeeze_mask=[False, False, True],
            end_mask=[True, True, False],
        ),
        X,
        lambda x: x[..., -1],
    ),
    "slice_by_size": (
        lambda x: mb.slice_by_size(x=x, begin=[0, 1, 1], size=[-1, 2, 2]),
        X,
        lambda x: x[:, 1:, 1:3],
    ),
    "slice_update_along_one_axis": (
        lambda x: mb.slice_update(x=x, update=ROWS, begin=[0, 1, 0], end=[2, 3, 4]),
        X,
        lambda x: np.concatenate([x[:, :1], ROWS], 1),
    ),
    "gather": (lambda x: mb.gather(x=x, indices=PICK, axis=1), X, lambda x: x[:, PICK]),
    "gather_table": (lambda x: mb.gather(x=x, indices=TABLE, axis=-1), X, lambda x: x[..., TABLE]),
    "gather_by_batch": (
        lambda x: mb.gather(x=x, indices=TABLE, axis=2, batch_dims=1),
        X,
        lambda x: np.stack([x[0][:, [1, 0]], x[1][:, [0, 2]]]),
    ),
    "gather_by_batch_first_axis": (
        lambda x: mb.gather(x=x, indices=TABLE, axis=1, batch_dims=1),
        X,
        lambda x: np.stack([x[0][[1, 0]], x[1][[0, 2]]]),
    ),
    "gather_along_axis": (
        lambda x: mb.gather_along_axis(
            x=x, indices=np.broadcast_to(PICK % 3, (2, 4, 3)).transpose(0, 2, 1).copy(), axis=1
        ),
        X,
        lambda x: x[:, PICK],
    ),
    "gather_nd": (lambda x: mb.gather_nd(x=x, indices=TABLE), X, lambda x: x[[1, 0], [0, 2]]),
    "gather_nd_by_batch": (
        lambda x: mb.gather_nd(x=x, indices=TABLE, batch_dims=1),
        X,
        lambda x: np.stack([x[0, 1, 0], x[1, 0, 2]]),
    ),
    "scatter": (
        lambda x: mb.scatter(data=x, indices=[2, 0], updates=ROWS, axis=1, mode="update"),
        X,
        lambda x: _scattered(None, x, (slice(None), [2, 0]), ROWS),
    ),
    "scatter_add_twice": (
        lambda x: mb.scatter(data=x, indices=[1, 1], updates=ROWS, axis=1, mode="add"),
        X,
        lambda x: _scattered(np.add, x, (slice(None), [1, 1]), ROWS),
    ),
    "scatter_along_axis": (
        lambda x: mb.scatter_along_axis(
            data=x, indices=np.zeros((2, 1, 4), np.int32) + 2, updates=ROWS[:, :1], axis=1, mode="mul"
        ),
        X,
        lambda x: _scattered(np.multiply, x, (slice(None), [2]), ROWS[:, :1]),
    ),
    "scatter_nd": (
        lambda x: mb.scatter_nd(data=x, indices=TABLE, updates=ROWS[0], mode="sub"),
        X,
        lambda x: _scattered(np.subtract, x, ([1, 0], [0, 2]), ROWS[0]),
    ),
    "scatter_nd_div": (
        lambda x: mb.scatter_nd(data=x, indices=TABLE, updates=ROWS[0], mode="div"),
        X,
        lambda x: _scattered(np.divide, x, ([1, 0], [0, 2]), ROWS[0]),
    ),
    "cumsum_exclusive": (
        lambda x: mb.cumsum(x=x, axis=1, exclusive=True),
        X,
        lambda x: np.cumsum(x, 1) - x,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operation(name: str, tmp_path: Path) -> None:
    """Each operation equals its numpy or torch counterpart."""
    build, x, expected = CASES[name]
    path = save_program(lambda x: build(x), {"x": x}, tmp_path / "p.mlpackage")
    (result,) = run_package(path, {"x": x})
    wanted = expected(x)
    assert result.shape == wanted.shape
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


def _at(begin: Any, rows: int) -> tuple[Any, Any]:
    zero = np.array([0], np.int32)
    start = mb.concat(values=(zero, begin, zero), axis=0)
    return start, mb.add(x=start, y=np.array([2, rows, 4], np.int32))


def test_slices_at_run_time(tmp_path: Path) -> None:
    """Slices and updates whose place is an input."""

    def build(x: Any, at: Any) -> Any:
        begin, end = _at(at, 2)
        size = [2, 2, 4]
        return (
            mb.slice_by_index(x=x, begin=begin, end=end),
            mb.slice_by_size(x=x, begin=begin, size=size),
            mb.slice_update(x=x, update=ROWS, begin=begin, end=end),
            mb.slice_update(
                x=x,
                update=ROWS,
                begin=begin,
                end=end,
                begin_mask=[True, False, True],
                end_mask=[True, False, True],
            ),
            mb.slice_by_index(
                x=x, begin=begin, end=end, squeeze_mask=[False, True, False], begin_mask=[True, False, True]
            ),
        )

    x = RNG.standard_normal((2, 6, 4)).astype(np.float32)
    path = save_program(build, {"x": x, "at": np.zeros(1, np.int32)}, tmp_path / "p.mlpackage")
    for at in (0, 2, 4):
        results = run_package(path, {"x": x, "at": np.array([at], np.int32)})
        updated = x.copy()
        updated[:, at : at + 2] = ROWS
        wanted = [x[:, at : at + 2], x[:, at : at + 2], updated, updated, x[:, at]]
        for result, expected in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_update_at_run_time_is_a_join(tmp_path: Path) -> None:
    """Bounds put together from constants and one input are understood: only the axis that is cut is touched."""

    def build(x: Any, at: Any) -> Any:
        begin, end = _at(at, 2)
        return mb.slice_update(x=x, update=ROWS, begin=begin, end=end)

    x = RNG.standard_normal((2, 6, 4)).astype(np.float32)
    path = save_program(build, {"x": x, "at": np.zeros(1, np.int32)}, tmp_path / "p.mlpackage")
    operators = [node.op_type for node in translate_package(path).model.graph.node]
    assert "ScatterElements" not in operators
    assert operators.count("Slice") <= 4  # two bounds, the rows before, the rows after


def test_slice_of_a_size_chosen_at_run_time(tmp_path: Path) -> None:
    """slice_by_size with one size as an input, -1 for all that follow."""

    def build(x: Any, rows: Any) -> Any:
        size = mb.concat(values=(np.array([2], np.int32), rows, np.array([-1], np.int32)), axis=0)
        return mb.slice_by_size(x=x, begin=[0, 1, 2], size=size)

    path = save_program(build, {"x": X, "rows": np.ones(1, np.int32)}, tmp_path / "p.mlpackage")
    for rows in (1, 2, -1):
        (result,) = run_package(path, {"x": X, "rows": np.array([rows], np.int32)})
        np.testing.assert_array_equal(result, X[:, 1 : None if rows < 0 else 1 + rows, 2:])


def test_slice_update_by_stride_and_squeeze(tmp_path: Path) -> None:
    """Updates of elements that do not lie side by side."""

    def build(x: Any) -> Any:
        return (
            mb.slice_update(x=x, update=ROWS[:, :, ::2], begin=[0, 0, 1], end=[2, 3, 4], stride=[1, 2, 2]),
            mb.slice_update(x=x, update=ROWS[:, 0], begin=[0, 1, 0], end=[2, 2, 4], squeeze_mask=[False, True, False]),
        )

    path = save_program(build, {"x": X}, tmp_path / "p.mlpackage")
    strided, squeezed = run_package(path, {"x": X})
    wanted = X.copy()
    wanted[:, ::2, 1::2] = ROWS[:, :, ::2]
    np.testing.assert_array_equal(strided, wanted)
    wanted = X.copy()
    wanted[:, 1] = ROWS[:, 0]
    np.testing.assert_array_equal(squeezed, wanted)


@pytest.mark.parametrize("align", [True, False])
def test_upsample(align: bool, tmp_path: Path) -> None:
    """Images resized by scale and to a size."""

    def build(x: Any) -> Any:
        return (
            mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, scale_factor_width=3),
            mb.upsample_bilinear(x=x, scale_factor_height=2, scale_factor_width=2, align_corners=align),
            mb.resize_bilinear(
                x=x,
                target_size_height=7,
                target_size_width=9,
                sampling_mode="ALIGN_CORNERS" if align else "UNALIGN_CORNERS",
            ),
        )

    path = save_program(build, {"x": IMAGE}, tmp_path / "p.mlpackage")
    nearest, doubled, sized = run_package(path, {"x": IMAGE})
    image = torch.from_numpy(IMAGE)
    resize = torch.nn.functional.interpolate
    np.testing.assert_array_equal(nearest, resize(image, scale_factor=(2, 3)))
    wanted = resize(image, scale_factor=2, mode="bilinear", align_corners=align)
    np.testing.assert_allclose(doubled, wanted, rtol=1e-5, atol=1e-6)
    wanted = resize(image, size=(7, 9), mode="bilinear", align_corners=align)
    np.testing.assert_allclose(sized, wanted, rtol=1e-5, atol=1e-5)
