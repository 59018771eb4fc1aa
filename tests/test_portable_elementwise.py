"""Element-by-element operations, activations and reductions of MIL programs against numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from portable_programs import mb, run_package, save_program

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4)).astype(np.float32)
Y = RNG.standard_normal((3, 1)).astype(np.float32)
I = RNG.integers(-9, 10, (2, 3, 4)).astype(np.int32)  # noqa: E741
J = np.array([[3], [-2], [5]], np.int32)
U = RNG.uniform(-0.9, 0.9, (2, 3, 4)).astype(np.float32)
P = RNG.uniform(0.1, 3, (2, 3, 4)).astype(np.float32)
IMAGE = RNG.standard_normal((2, 3, 4, 2)).astype(np.float32)
ALPHA = RNG.uniform(0.1, 1, 3).astype(np.float32)


def _torch(function: Callable[..., torch.Tensor], *values: np.ndarray, **options: Any) -> np.ndarray:
    return np.asarray(function(*map(torch.from_numpy, values), **options))


def _expit(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


UNARY: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray], dict[str, Any]]] = {
    "abs": (X, np.abs, {}),
    "acos": (U, np.arccos, {}),
    "asin": (U, np.arcsin, {}),
    "atan": (X, np.arctan, {}),
    "atanh": (U, np.arctanh, {}),
    "ceil": (X, np.ceil, {}),
    "cos": (X, np.cos, {}),
    "cosh": (X, np.cosh, {}),
    "erf": (X, lambda x: _torch(torch.erf, x), {}),
    "exp": (X, np.exp, {}),
    "exp2": (X, np.exp2, {}),
    "floor": (X, np.floor, {}),
    "inverse": (P, lambda x: 1 / (x + 0.5), {"epsilon": 0.5}),
    "log": (P, lambda x: np.log(x + 0.25), {"epsilon": 0.25}),
    "round": (X * 3, np.round, {}),
    "rsqrt": (P, lambda x: 1 / np.sqrt(x + 0.1), {"epsilon": 0.1}),
    "sign": (X, np.sign, {}),
    "sin": (X, np.sin, {}),
    "sinh": (X, np.sinh, {}),
    "sqrt": (P, np.sqrt, {}),
    "square": (X, np.square, {}),
    "tan": (U, np.tan, {}),
    "tanh": (X, np.tanh, {}),
    "threshold": (X, lambda x: np.maximum(x, 0.3), {"alpha": 0.3}),
    "clip": (X, lambda x: np.clip(x, -0.5, 0.7), {"alpha": -0.5, "beta": 0.7}),
    "relu": (X, lambda x: np.maximum(x, 0), {}),
    "relu6": (X * 9, lambda x: np.clip(x, 0, 6), {}),
    "leaky_relu": (X, lambda x: np.where(x > 0, x, 0.2 * x), {"alpha": 0.2}),
    "elu": (X, lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)), {"alpha": 0.7}),
    "clamped_relu": (X, lambda x: np.minimum(np.where(x > 0, x, 0.1 * x), 0.8), {"alpha": 0.1, "beta": 0.8}),
    "prelu": (IMAGE, lambda x: np.where(x > 0, x, ALPHA[:, None, None] * x), {"alpha": ALPHA}),
    "silu": (X, lambda x: x * _expit(x), {}),
    "sigmoid": (X, _expit, {}),
    "sigmoid_hard": (X * 3, lambda x: np.clip(0.3 * x + 0.4, 0, 1), {"alpha": 0.3, "beta": 0.4}),
    "softplus": (X, lambda x: np.log1p(np.exp(x)), {}),
    "softplus_parametric": (
        IMAGE,
        lambda x: ALPHA[:, None, None] * np.log1p(np.exp(2 * ALPHA[:, None, None] * x)),
        {"alpha": ALPHA, "beta": 2 * ALPHA},
    ),
    "softsign": (X, lambda x: x / (1 + np.abs(x)), {}),
    "linear_activation": (X, lambda x: 2 * x + 3, {"alpha": 2.0, "beta": 3.0}),
    "scaled_tanh": (X, lambda x: 2 * np.tanh(0.5 * x), {"alpha": 2.0, "beta": 0.5}),
    "thresholded_relu": (X, lambda x: np.where(x >= 0.4, x, 0), {"alpha": 0.4}),
    "softmax": (X, lambda x: _torch(torch.softmax, x, dim=1), {"axis": 1}),
    "cumsum": (X, lambda x: np.flip(np.cumsum(np.flip(x, 2), 2), 2), {"axis": 2, "reverse": True}),
    "reduce_l1_norm": (X, lambda x: np.abs(x).sum((0, 2)), {"axes": [0, -1], "keep_dims": False}),
    "reduce_l2_norm": (X, lambda x: np.sqrt((x * x).sum(1, keepdims=True)), {"axes": [1], "keep_dims": True}),
    "reduce_log_sum": (P, lambda x: np.log(x.sum(-1)), {"axes": [-1], "keep_dims": False}),
    "reduce_log_sum_exp": (X, lambda x: np.log(np.exp(x).sum(-1)), {"axes": [-1], "keep_dims": False}),
    "reduce_max": (X, lambda x: x.max((0, 1)), {"axes": [0, 1], "keep_dims": False}),
    "reduce_mean": (X, lambda x: x.mean(1, keepdims=True), {"axes": [1], "keep_dims": True}),
    "reduce_min": (X, lambda x: x.min(-1), {"axes": [-1], "keep_dims": False}),
    "reduce_prod": (X, lambda x: x.prod(0), {"axes": [0], "keep_dims": False}),
    "reduce_sum": (X, lambda x: x.sum(keepdims=True), {"keep_dims": True}),
    "reduce_sum_square": (X, lambda x: (x * x).sum(2), {"axes": [2], "keep_dims": False}),
    "reduce_argmax": (X, lambda x: x.argmax(1), {"axis": 1, "keep_dims": False}),
    "reduce_argmin": (X, lambda x: x.argmin(2)[..., None], {"axis": -1, "keep_dims": True}),
    "argsort": (X, lambda x: np.argsort(-x, 1), {"axis": 1}),
}


@pytest.mark.parametrize("name", UNARY)
def test_function_of_one_value(name: str, tmp_path: Path) -> None:
    """Each operation of one tensor equals its definition."""
    x, expected, options = UNARY[name]
    path = save_program(lambda x: getattr(mb, name)(x=x, **options), {"x": x}, tmp_path / "p.mlpackage")
    (result,) = run_package(path, {"x": x})
    np.testing.assert_allclose(result, expected(x.astype(np.float64)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("EXACT", lambda x: _torch(F.gelu, x)),
        ("TANH_APPROXIMATION", lambda x: _torch(F.gelu, x, approximate="tanh")),
        ("SIGMOID_APPROXIMATION", lambda x: x * _expit(1.702 * x)),
    ],
)
def test_gelu(mode: str, expected: Callable[[np.ndarray], np.ndarray], tmp_path: Path) -> None:
    """All three forms of GELU."""
    path = save_program(lambda x: mb.gelu(x=x, mode=mode), {"x": X}, tmp_path / "p.mlpackage")
    np.testing.assert_allclose(run_package(path, {"x": X})[0], expected(X), rtol=1e-5, atol=1e-6)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "real_div": np.divide,
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in BINARY for kind in ("float", "int") if (name, kind) != ("real_div", "int")],
)
def test_function_of_two_values(name: str, kind: str, tmp_path: Path) -> None:
    """Arithmetic and comparisons broadcast like numpy, for numbers of both kinds."""
    x, y = (X, Y) if kind == "float" else (I, J)

    def build(x: Any, y: Any) -> Any:
        result = getattr(mb, name)(x=x, y=y)
        return mb.cast(x=result, dtype="int32") if "equal" in name or name in ("greater", "less") else result

    path = save_program(build, {"x": x, "y": y}, tmp_path / "p.mlpackage")
    (result,) = run_package(path, {"x": x, "y": y})
    np.testing.assert_allclose(result, BINARY[name](x, y).astype(result.dtype), rtol=1e-5, atol=1e-6)


def test_power(tmp_path: Path) -> None:
    """Powers of positive numbers."""
    path = save_program(lambda x, y: mb.pow(x=x, y=y), {"x": P, "y": Y}, tmp_path / "p.mlpackage")
    np.testing.assert_allclose(run_package(path, {"x": P, "y": Y})[0], P**Y, rtol=1e-5)


def test_logic_casts_and_select(tmp_path: Path) -> None:
    """Masks made by logic choose between two values, booleans too."""

    def build(x: Any, i: Any) -> Any:
        positive, odd = mb.greater(x=x, y=0.0), mb.cast(x=mb.mod(x=i, y=2), dtype="bool")
        both, either = mb.logical_and(x=positive, y=odd), mb.logical_or(x=positive, y=odd)
        differ = mb.logical_xor(x=positive, y=mb.logical_not(x=odd))
        chosen = mb.select(cond=either, a=x, b=mb.cast(x=i, dtype="fp32"))
        nested = mb.cast(x=mb.select(cond=differ, a=both, b=odd), dtype="int32")
        return mb.cast(x=x, dtype="int32"), chosen, nested

    path = save_program(build, {"x": X * 5, "i": I}, tmp_path / "p.mlpackage")
    whole, chosen, nested = run_package(path, {"x": X * 5, "i": I})
    positive, odd = X > 0, I % 2 == 1
    np.testing.assert_array_equal(whole, np.trunc(X * 5))
    np.testing.assert_allclose(chosen, np.where(positive | odd, X * 5, I), rtol=1e-6)
    np.testing.assert_array_equal(nested, np.where(positive ^ ~odd, positive & odd, odd))


@pytest.mark.parametrize("ascending", [False, True])
def test_topk(ascending: bool, tmp_path: Path) -> None:
    """The k extreme elements and where they were."""
    path = save_program(lambda x: mb.topk(x=x, k=2, axis=-1, ascending=ascending), {"x": X}, tmp_path / "p.mlpackage")
    values, positions = run_package(path, {"x": X})
    order = np.argsort(X if ascending else -X, -1)[..., :2]
    np.testing.assert_array_equal(positions, order)
    np.testing.assert_array_equal(values, np.take_along_axis(X, order, -1))


def test_band_part_and_non_zero(tmp_path: Path) -> None:
    """A band around the diagonal, and the positions of what is left."""

    def build(x: Any, i: Any) -> Any:
        return mb.band_part(x=x, lower=1, upper=0), mb.band_part(x=i, lower=-1, upper=1), mb.non_zero(x=i)

    path = save_program(build, {"x": X, "i": I}, tmp_path / "p.mlpackage")
    lower, upper, places = run_package(path, {"x": X, "i": I})
    np.testing.assert_array_equal(lower, np.triu(np.tril(X), -1))
    np.testing.assert_array_equal(upper, np.tril(I, 1))
    np.testing.assert_array_equal(places, np.argwhere(I))


def test_half_precision_borders(tmp_path: Path) -> None:
    """fp16 inputs and outputs are rounded to fp16, values between them are not."""

    def build(x: Any) -> Any:
        return mb.sub(x=mb.add(x=x, y=np.float16(1000)), y=np.float16(1000))

    x = np.full((4,), 0.1, np.float16)
    path = save_program(build, {"x": x}, tmp_path / "p.mlpackage")
    (result,) = run_package(path, {"x": np.full((4,), 0.1, np.float32)})
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, result.astype(np.float16))
    np.testing.assert_allclose(result, np.float32(np.float16(0.1)), atol=1e-4)
