"""Products, convolutions and compressed weights against numpy, torch and coremltools' own decompression."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from portable_programs import ct, mb, quiet, run_package, save_program, translate_package, types

from llm_gemma_coreml.runtime.portable.recipes import WeightReader, evaluate, from_json, to_json

RNG = np.random.default_rng(2)
ROWS = RNG.standard_normal((5, 64)).astype(np.float32)
WEIGHT = RNG.standard_normal((24, 64)).astype(np.float32)
BATCH = RNG.standard_normal((2, 3, 6, 8)).astype(np.float32)
CODES4 = RNG.integers(-8, 8, (24, 64)).astype(np.int8)
CODES8 = RNG.integers(-128, 128, (24, 64)).astype(np.int8)


def _run(build: Any, inputs: dict[str, np.ndarray], tmp_path: Path, **options: Any) -> list[np.ndarray]:
    return run_package(save_program(build, inputs, tmp_path / "p.mlpackage"), inputs, **options)


def _operators(path: Path, **options: Any) -> list[str]:
    return [node.op_type for node in translate_package(path, **options).model.graph.node]


def test_linear(tmp_path: Path) -> None:
    """Linear with and without a bias; a bias of zeros leaves no node."""
    bias = RNG.standard_normal(24).astype(np.float32)
    results = _run(
        lambda x: (mb.linear(x=x, weight=WEIGHT, bias=bias), mb.linear(x=x, weight=WEIGHT)),
        {"x": ROWS},
        tmp_path,
    )
    np.testing.assert_allclose(results[0], ROWS @ WEIGHT.T + bias, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(results[1], ROWS @ WEIGHT.T, rtol=1e-4, atol=1e-4)
    assert _operators(tmp_path / "p.mlpackage").count("Add") == 1


@pytest.mark.parametrize("transpose_x", [False, True])
@pytest.mark.parametrize("transpose_y", [False, True])
def test_matmul(transpose_x: bool, transpose_y: bool, tmp_path: Path) -> None:
    """Batched products of run-time values and with a stored matrix."""
    y = BATCH[:, :1] * 2

    def build(x: Any, y: Any) -> Any:
        left = mb.transpose(x=x, perm=[0, 1, 3, 2]) if transpose_x else x
        right = y if transpose_y else mb.transpose(x=y, perm=[0, 1, 3, 2])
        stored = WEIGHT[:, :8] if transpose_y else WEIGHT[:, :8].T.copy()
        flags = {"transpose_x": transpose_x, "transpose_y": transpose_y}
        return mb.matmul(x=left, y=right, **flags), mb.matmul(x=left, y=stored, **flags)

    batched, stored = _run(build, {"x": BATCH, "y": y}, tmp_path)
    np.testing.assert_allclose(batched, BATCH @ y.transpose(0, 1, 3, 2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stored, BATCH @ WEIGHT[:, :8].T, rtol=1e-4, atol=1e-5)


def test_einsum_and_attention(tmp_path: Path) -> None:
    """Einsum, and attention with no mask, a boolean mask and a mask of numbers."""
    mask = np.tril(np.ones((6, 6), bool))
    bias = RNG.standard_normal((6, 6)).astype(np.float32)

    def build(x: Any) -> Any:
        attention = mb.scaled_dot_product_attention
        return (
            mb.einsum(values=(x, mb.transpose(x=x, perm=[0, 3, 2, 1])), equation="nchw,nwhu->nchu"),
            attention(query=x, key=x, value=x),
            attention(query=x, key=x, value=x, attn_mask=mask),
            attention(query=x, key=x, value=x, attn_mask=bias),
        )

    results = _run(build, {"x": BATCH}, tmp_path)
    x = torch.from_numpy(BATCH)
    attention = F.scaled_dot_product_attention
    wanted = [
        torch.einsum("nchw,nwhu->nchu", x, x.permute(0, 3, 2, 1)),
        attention(x, x, x),
        attention(x, x, x, torch.from_numpy(mask)),
    ]
    wanted.append(attention(x, x, x, torch.from_numpy(bias)))
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "1d": ((2, 4, 9), (6, 4, 3), {"pad_type": "custom", "pad": [1, 1]}, {"padding": 1}),
    "2d_groups": (
        (2, 4, 9, 8),
        (6, 2, 3, 3),
        {"groups": 2, "strides": [2, 1]},
        {"groups": 2, "stride": (2, 1)},
    ),
    "2d_dilated": ((1, 4, 9, 9), (6, 4, 3, 2), {"dilations": [2, 3]}, {"dilation": (2, 3)}),
    "2d_same": ((1, 4, 9, 9), (6, 4, 3, 3), {"pad_type": "same"}, {"padding": 1}),
    "3d": ((1, 4, 5, 6, 7), (3, 4, 2, 2, 2), {}, {}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, tmp_path: Path) -> None:
    """Convolutions of one to three dimensions."""
    shape, kernel, options, torch_options = CONVOLUTIONS[name]
    x = RNG.standard_normal(shape).astype(np.float32)
    weight, bias = (
        RNG.standard_normal(kernel).astype(np.float32),
        RNG.standard_normal(kernel[0]).astype(np.float32),
    )
    (result,) = _run(lambda x: mb.conv(x=x, weight=weight, bias=bias, **options), {"x": x}, tmp_path)
    convolution = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
    wanted = convolution(*map(torch.from_numpy, (x, weight, bias)), **torch_options)
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_same_padding_of_even_kernels(tmp_path: Path) -> None:
    """The odd element of padding goes to the end for "same", to the start for "same_lower"."""
    x = RNG.standard_normal((1, 1, 6)).astype(np.float32)
    weight = np.ones((1, 1, 2), np.float32)
    upper, lower = _run(
        lambda x: tuple(mb.conv(x=x, weight=weight, pad_type=kind) for kind in ("same", "same_lower")),
        {"x": x},
        tmp_path,
    )
    padded = np.pad(x[0, 0], 1)
    np.testing.assert_allclose(upper[0, 0], (padded[:-1] + padded[1:])[1:], rtol=1e-5)
    np.testing.assert_allclose(lower[0, 0], (padded[:-1] + padded[1:])[:-1], rtol=1e-5)


def test_transposed_convolution(tmp_path: Path) -> None:
    """Transposed convolution, with padding, groups and a given output size."""
    x = RNG.standard_normal((1, 4, 5, 5)).astype(np.float32)
    weight = RNG.standard_normal((4, 3, 3, 3)).astype(np.float32)

    def build(x: Any) -> Any:
        options = {
            "weight": weight,
            "groups": 2,
            "strides": [2, 2],
            "pad_type": "custom",
            "pad": [1, 1, 1, 1],
        }
        return mb.conv_transpose(x=x, **options), mb.conv_transpose(x=x, output_shape=[1, 6, 10, 10], **options)

    plain, larger = _run(build, {"x": x}, tmp_path)
    for result, extra in ((plain, 0), (larger, 1)):
        options = {"stride": 2, "padding": 1, "groups": 2, "output_padding": extra}
        wanted = F.conv_transpose2d(torch.from_numpy(x), torch.from_numpy(weight), **options)
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_pooling(tmp_path: Path) -> None:
    """Mean, largest and Euclidean pooling."""
    x = RNG.standard_normal((1, 3, 7, 8)).astype(np.float32)

    def build(x: Any) -> Any:
        custom = {"kernel_sizes": [3, 2], "strides": [2, 2], "pad_type": "custom", "pad": [1, 1, 0, 0]}
        return (
            mb.avg_pool(x=x, exclude_padding_from_average=True, **custom),
            mb.avg_pool(x=x, exclude_padding_from_average=False, **custom),
            mb.max_pool(x=x, **custom),
            mb.l2_pool(x=x, kernel_sizes=[2, 2], strides=[1, 1], pad_type="valid"),
            mb.max_pool(x=x, kernel_sizes=[2, 2], strides=[2, 2], pad_type="custom", pad=[0] * 4, ceil_mode=True),
        )

    results = _run(build, {"x": x}, tmp_path)
    image, options = torch.from_numpy(x), {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0)}
    wanted = [
        F.avg_pool2d(image, count_include_pad=False, **options),
        F.avg_pool2d(image, count_include_pad=True, **options),
        F.max_pool2d(image, **options),
        F.lp_pool2d(image, 2, 2, 1),
        F.max_pool2d(image, 2, 2, ceil_mode=True),
    ]
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_normalisations(tmp_path: Path) -> None:
    """Layer, instance, batch, response and length normalisation."""
    gamma, beta = (RNG.standard_normal(8).astype(np.float32) for _ in range(2))
    channel = np.abs(RNG.standard_normal((4, 3))).astype(np.float32)

    def build(x: Any) -> Any:
        return (
            mb.layer_norm(x=x, axes=[-1], gamma=gamma, beta=beta, epsilon=1e-3),
            mb.layer_norm(x=x, axes=[2, 3]),
            mb.layer_norm(x=x, axes=[1], gamma=channel[0], beta=channel[1]),
            mb.instance_norm(x=x, gamma=channel[0], beta=channel[1], epsilon=1e-3),
            mb.batch_norm(x=x, mean=channel[0], variance=channel[1], gamma=channel[2], beta=channel[3]),
            mb.batch_norm(x=x, mean=channel[0], variance=channel[1]),
            mb.local_response_norm(x=x, size=3, alpha=0.1, beta=0.6, k=2.0),
            mb.l2_norm(x=x, epsilon=1e-4),
        )

    results = _run(build, {"x": BATCH}, tmp_path)
    x, c = torch.from_numpy(BATCH), [torch.from_numpy(row) for row in channel]
    by_channel = F.layer_norm(x.movedim(1, -1), (3,), c[0], c[1]).movedim(-1, 1)
    wanted = [
        F.layer_norm(x, (8,), torch.from_numpy(gamma), torch.from_numpy(beta), 1e-3),
        F.layer_norm(x, (6, 8)),
        by_channel,
        F.instance_norm(x, weight=c[0], bias=c[1], eps=1e-3),
        F.batch_norm(x, c[0], c[1], c[2], c[3]),
        F.batch_norm(x, c[0], c[1]),
        F.local_response_norm(x, 3, 0.1, 0.6, 2.0),
        x / (x.square().sum((1, 2, 3), keepdim=True) + 1e-4).sqrt(),
    ]
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_one_operator(weighted: bool, tmp_path: Path) -> None:
    """The usual spelling of an RMS norm becomes one operator with the same result."""
    gain = RNG.standard_normal(64).astype(np.float32)

    def build(x: Any) -> Any:
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        normal = mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=np.float32(1e-6))))
        return mb.mul(x=normal, y=gain) if weighted else mb.add(x=normal, y=x)

    (result,) = _run(build, {"x": ROWS}, tmp_path)
    normal = ROWS / np.sqrt((ROWS.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(result, normal * gain if weighted else normal + ROWS, rtol=1e-5, atol=1e-6)
    operators = _operators(tmp_path / "p.mlpackage")
    assert operators.count("SimplifiedLayerNormalization") == 1
    assert "ReduceMean" not in operators


def _four_bit(values: np.ndarray) -> Any:
    return values.view(types.np_uint4_dtype if values.dtype == np.uint8 else types.np_int4_dtype)


QUANTISED: dict[str, tuple[Any, np.ndarray, tuple[int, int]]] = {
    "int4_blocks_of_32": (_four_bit, CODES4, (24, 2)),
    "int4_by_row": (_four_bit, CODES4, (24, 1)),
    "int4_by_tensor": (_four_bit, CODES4, (1, 1)),
    "int4_blocks_of_16": (_four_bit, CODES4, (24, 4)),
    "int4_blocks_of_both_axes": (_four_bit, CODES4, (3, 2)),
    "uint4": (_four_bit, (CODES4 + 8).astype(np.uint8), (24, 2)),
    "int8_blocks_of_32": (np.asarray, CODES8, (24, 2)),
    "int8_by_row": (np.asarray, CODES8, (24, 1)),
    "uint8": (np.asarray, CODES8.view(np.uint8), (24, 1)),
}


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_blockwise_weights(name: str, offset: bool, tmp_path: Path) -> None:
    """Linear and matmul with quantised weights: exactly in fp32, closely with quantised products."""
    encode, codes, blocks = QUANTISED[name]
    scale = RNG.uniform(0.01, 0.02, blocks).astype(np.float32)
    low = 0 if codes.dtype == np.uint8 else -3
    zero = RNG.integers(low, 4, blocks).astype(codes.dtype)
    expand = tuple(size // count for size, count in zip(codes.shape, blocks, strict=True))
    weight = (codes.astype(np.float32) - (np.kron(zero, np.ones(expand)) if offset else 0)) * np.kron(
        scale, np.ones(expand, np.float32)
    )

    def build(x: Any) -> Any:
        options = {"offset": encode(zero)} if offset else {}
        stored = mb.constexpr_blockwise_shift_scale(data=encode(codes), scale=scale, **options)
        turned = mb.constexpr_blockwise_shift_scale(
            data=encode(np.ascontiguousarray(codes.T)),
            scale=np.ascontiguousarray(scale.T),
            **({"offset": encode(np.ascontiguousarray(zero.T))} if offset else {}),
        )
        return mb.linear(x=x, weight=stored), mb.matmul(x=x, y=turned)

    exact = _run(build, {"x": ROWS}, tmp_path, exact=True)
    wanted = ROWS @ weight.T
    for result in exact:
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)
    fast = run_package(tmp_path / "p.mlpackage", {"x": ROWS})
    for result in fast:
        assert np.abs(result - wanted).max() < 0.02 * np.abs(wanted).max()
    np.testing.assert_array_equal(*fast)
    if "16" not in name:
        assert _operators(tmp_path / "p.mlpackage").count("MatMulNBits") == 2
    assert "MatMulNBits" not in _operators(tmp_path / "p.mlpackage", exact=True)


def test_rows_of_a_fast_product_do_not_depend_on_each_other(tmp_path: Path) -> None:
    """Row by row or all at once gives the same bits, whatever the blocks in the package."""
    x = RNG.standard_normal((37, 256)).astype(np.float32)
    codes = RNG.integers(-8, 8, (48, 256)).astype(np.int8)
    scale = RNG.uniform(0.01, 0.02, (48, 2)).astype(np.float32)

    def build(x: Any) -> Any:
        return mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=_four_bit(codes), scale=scale))

    path = save_program(build, {"x": x}, tmp_path / "p.mlpackage")
    symbolic = {"x": ("S", 256)}
    (whole,) = run_package(path, {"x": x}, symbolic=symbolic)
    for start, stop in ((0, 1), (3, 5), (8, 24), (36, 37)):
        (part,) = run_package(path, {"x": x[start:stop]}, symbolic=symbolic)
        np.testing.assert_array_equal(part, whole[start:stop])


def test_quantised_table_lookup(tmp_path: Path) -> None:
    """Rows of an int8 table, dequantised after they are picked."""
    scale = RNG.uniform(0.01, 0.02, (24, 1)).astype(np.float32)
    ids = np.array([[3, 0], [23, 3]], np.int32)
    (result,) = _run(
        lambda ids: mb.gather(x=mb.constexpr_blockwise_shift_scale(data=CODES8, scale=scale), indices=ids, axis=0),
        {"ids": ids},
        tmp_path,
    )
    np.testing.assert_allclose(result, (CODES8 * scale)[ids], rtol=1e-6)


def test_palettised_and_sparse_weights(tmp_path: Path) -> None:
    """Tables by group, vectors, sparse tables and sparse quantised weights, as coremltools decodes them."""
    indices = RNG.integers(0, 4, (24, 64)).astype(np.uint8)
    tables = RNG.standard_normal((2, 1, 4, 1)).astype(np.float16)
    vectors = RNG.standard_normal((1, 1, 4, 2)).astype(np.float16)
    mask = RNG.integers(0, 2, (24, 64)).astype(np.uint8)
    bits = mask.view(types.np_uint1_dtype)
    values = CODES8[mask != 0]
    scale = RNG.uniform(0.01, 0.02, (24, 2)).astype(np.float16)
    two_bits = indices.view(types.np_uint2_dtype)
    wanted: list[np.ndarray] = []

    def build(x: Any) -> Any:
        sparse = mb.constexpr_lut_to_sparse(
            indices_mask=bits, indices_nonzero_data=indices[mask != 0].view(types.np_uint2_dtype), lut=tables
        )
        scaled = mb.constexpr_sparse_blockwise_shift_scale(data_mask=bits, nonzero_data=values, scale=scale)
        weights = [
            mb.constexpr_lut_to_dense(indices=two_bits, lut=tables),
            mb.constexpr_lut_to_dense(indices=two_bits[:12], lut=vectors, vector_axis=0),
            mb.constexpr_sparse_to_dense(nonzero_data=sparse[1], mask=sparse[0]),
            mb.constexpr_sparse_to_dense(nonzero_data=scaled[1], mask=scaled[0]),
            mb.constexpr_sparse_to_dense(nonzero_data=values.astype(np.float16), mask=bits),
            mb.constexpr_blockwise_shift_scale(
                data=mb.constexpr_lut_to_dense(
                    indices=two_bits, lut=np.array([-9, 1, 5, 100], np.int8).reshape(1, 1, 4, 1)
                ),
                scale=scale,
            ),
        ]
        wanted.extend(np.asarray(weight.op.materialized_val_inference(), np.float32) for weight in weights)
        return tuple(mb.add(x=x, y=mb.cast(x=weight, dtype="fp32")) for weight in weights)

    x = np.zeros((24, 64), np.float32)
    results = _run(build, {"x": x}, tmp_path)
    assert len(wanted) == len(results) == 6
    for result, expected in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=1e-6)


def test_older_compressed_weights(tmp_path: Path) -> None:
    """The compressed forms of the opset before: affine, packed tables, packed masks."""
    scale = RNG.uniform(0.01, 0.02, 24).astype(np.float32)
    zero = RNG.integers(-5, 5, 24).astype(np.int8)
    indices = RNG.integers(0, 16, (24, 64)).astype(np.uint8)
    table = RNG.standard_normal(16).astype(np.float32)
    packed = (indices.reshape(-1)[0::2] | (indices.reshape(-1)[1::2] << 4)).astype(np.uint8)
    mask = RNG.integers(0, 2, 24 * 64).astype(np.uint8)
    values = RNG.standard_normal(int(mask.sum())).astype(np.float32)
    dense = np.zeros(24 * 64, np.float32)
    dense[mask != 0] = values
    shape = np.array([24, 64], np.uint32)

    def build(x: Any) -> Any:
        weights = (
            mb.constexpr_affine_dequantize(quantized_data=CODES8, zero_point=zero, scale=scale, axis=0),
            mb.constexpr_lut_to_dense(indices=packed, lut=table, shape=shape),
            mb.constexpr_sparse_to_dense(nonzero_data=values, mask=np.packbits(mask, bitorder="little"), shape=shape),
            mb.constexpr_cast(source_val=WEIGHT.astype(np.float16), output_dtype="fp32"),
        )
        return tuple(mb.linear(x=x, weight=weight) for weight in weights)

    path = save_program(build, {"x": ROWS}, tmp_path / "p.mlpackage", ct.target.iOS16)
    wanted = [
        (CODES8.astype(np.float32) - zero[:, None]) * scale[:, None],
        table.astype(np.float32)[indices],
        dense.reshape(24, 64),
        WEIGHT.astype(np.float16).astype(np.float32),
    ]
    for result, weight in zip(run_package(path, {"x": ROWS}, exact=True), wanted, strict=True):
        np.testing.assert_allclose(result, ROWS @ weight.T, rtol=1e-4, atol=1e-4)
    fast = run_package(path, {"x": ROWS})[0]
    assert np.abs(fast - ROWS @ wanted[0].T).max() < 0.02 * np.abs(ROWS @ wanted[0].T).max()


def test_quantize_and_dequantize_at_run_time(tmp_path: Path) -> None:
    """Values quantised along an axis and back."""
    scale = np.array([0.1, 0.2, 0.3], np.float32)
    zero = np.array([1, -2, 3], np.int8)

    def build(x: Any) -> Any:
        codes = mb.quantize(input=x, scale=scale, zero_point=zero, axis=1, output_dtype="int8")
        return mb.dequantize(input=codes, scale=scale, zero_point=zero, axis=1)

    (result,) = _run(build, {"x": BATCH * 9}, tmp_path)
    by_axis = scale[:, None, None]
    codes = np.clip(np.round(BATCH * 9 / by_axis) + zero[:, None, None], -128, 127)
    np.testing.assert_allclose(result, (codes - zero[:, None, None]) * by_axis, rtol=1e-5, atol=1e-5)


def test_recipes_survive_a_cache(tmp_path: Path) -> None:
    """Recipes written as JSON and read back give the same initialisers."""
    scale = RNG.uniform(0.01, 0.02, (24, 2)).astype(np.float32)

    def build(x: Any) -> Any:
        stored = mb.constexpr_blockwise_shift_scale(data=_four_bit(CODES4), scale=scale)
        return mb.linear(x=x, weight=stored), mb.linear(x=x, weight=WEIGHT)

    with quiet():
        path = save_program(build, {"x": ROWS}, tmp_path / "p.mlpackage")
    weights = translate_package(path).weights
    reader = WeightReader(path)
    assert len(weights) >= 3
    for recipe in weights.values():
        again = from_json(json.loads(json.dumps(to_json(recipe))))
        assert again == recipe
        np.testing.assert_array_equal(evaluate(again, reader), evaluate(recipe, WeightReader(path)))


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 3, 5, 16)])
@pytest.mark.parametrize("swapped", [False, True])
def test_rotary_embedding_is_one_operator_and_nothing_like_it_is(tmp_path: Path, shape: tuple[int, ...], swapped: bool) -> None:
    """Against numpy; with the terms of the second half exchanged it is another function, and left as it is."""
    rng = np.random.default_rng(0)
    x, cos, sin = (rng.normal(0, 1, size).astype(np.float32) for size in (shape, (5, 8), (5, 8)))

    def build(x: Any, cos: Any, sin: Any) -> Any:
        a, b = mb.split(x=x, num_splits=2, axis=-1)
        other = (cos, sin) if swapped else (sin, cos)
        first = mb.sub(x=mb.mul(x=a, y=cos), y=mb.mul(x=b, y=sin))
        second = mb.add(x=mb.mul(x=b, y=other[1]), y=mb.mul(x=a, y=other[0]))
        return mb.concat(values=[first, second], axis=-1)

    feeds = {"x": x, "cos": cos, "sin": sin}
    path = save_program(build, feeds, tmp_path / "rotary.mlpackage")
    (result,) = run_package(path, feeds)
    a, b = x[..., :8], x[..., 8:]
    other = (cos, sin) if swapped else (sin, cos)
    expected = np.concatenate([a * cos - b * sin, b * other[1] + a * other[0]], axis=-1)
    np.testing.assert_allclose(result, expected, atol=1e-6)
    operators = [node.op_type for node in translate_package(path).model.graph.node]
    assert operators.count("RotaryEmbedding") == (0 if swapped else 1)
