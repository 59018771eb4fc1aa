"""Runs a function of a package word by word with numpy: slow, simple, and nothing shared with the portable runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.program import Constant, Function, Operation

Array = np.ndarray
Arguments = dict[str, Any]


class Interpreter:
    """Executes `function`; `states` maps state names to arrays that are updated in place.

    exact: computes what is declared fp16 in fp32, so that only the meaning of the text counts, not its rounding.
    """

    def __init__(self, function: Function, exact: bool = True) -> None:
        self.function = function
        self._half = np.float32 if exact else np.float16
        self._constants: dict[int, Array] = {}

    def make_states(self) -> dict[str, Array]:
        return {name: np.zeros(kind.shape, self._half) for name, kind in self.function.states.items()}

    def run(self, inputs: Mapping[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        for name, kind in self.function.inputs.items():
            assert inputs[name].shape == kind.shape, f"{name}: {inputs[name].shape} given, {kind.shape} declared"
        values: dict[str, Any] = {**inputs}
        for operation in self.function.operations:
            arguments = {name: self._argument(parts, values, states) for name, parts in operation.inputs.items()}
            result = self._execute(operation, arguments, states)
            results = result if isinstance(result, list) else [result]
            for (name, kind), value in zip(operation.outputs, results, strict=False):
                assert value.shape == kind.shape, f"{name}: {value.shape} computed, {kind.shape} declared"
                values[name] = value
        return {name: values[name] for name in self.function.outputs}

    def _argument(self, parts: tuple[Any, ...], values: Mapping[str, Any], states: Mapping[str, Any]) -> Any:
        found = []
        for part in parts:
            constant = part if isinstance(part, Constant) else self.function.constants.get(part)
            if constant is not None:
                found.append(self._constant(constant))
            else:
                found.append(part if part in states else values[part])
        return found[0] if len(found) == 1 else found

    def _constant(self, constant: Constant) -> Any:
        if id(constant) not in self._constants:
            value = constant.value()
            self._constants[id(constant)] = value.astype(self._half) if value.dtype == np.float16 else value
        return self._constants[id(constant)]

    def _execute(self, operation: Operation, arguments: Arguments, states: dict[str, Array]) -> Any:
        kind = operation.type
        if kind == "read_state":
            return states[arguments["input"]].copy()
        if kind == "write_state":
            states[arguments["input"]][...] = arguments["data"]
            return []
        if kind == "cast":
            target = {"fp16": self._half, "fp32": np.float32, "int32": np.int32}[_text(arguments["dtype"])]
            return arguments["x"].astype(target)
        return _OPERATIONS[kind](arguments)


def _text(value: Any) -> str:
    return str(value.item() if isinstance(value, np.ndarray) else value)


def _integers(value: Any) -> list[int]:
    return [int(number) for number in np.asarray(value).reshape(-1)]


def _dequantise(a: Arguments) -> Array:
    data, scale = a["data"], a["scale"]
    blocks = data.shape[1] // scale.shape[1]
    return data.astype(scale.dtype) * np.repeat(scale, blocks, axis=1)


def _slice_update(a: Arguments) -> Array:
    result = a["x"].copy()
    begin, end = _integers(a["begin"]), _integers(a["end"])
    place = tuple(slice(first, last) for first, last in zip(begin, end, strict=True))
    assert result[place].shape == a["update"].shape, "slice_update: the slice is not as large as the update"
    result[place] = a["update"]
    return result


def _slice_by_size(a: Arguments) -> Array:
    begin, size = _integers(a["begin"]), _integers(a["size"])
    return a["x"][tuple(slice(first, first + count) for first, count in zip(begin, size, strict=True))]


def _split(a: Arguments) -> list[Array]:
    axis = int(a["axis"])
    if "split_sizes" in a:
        return np.split(a["x"], np.cumsum(_integers(a["split_sizes"]))[:-1], axis)
    return np.split(a["x"], int(a["num_splits"]), axis)


def _softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def _matmul(a: Arguments) -> Array:
    x = np.swapaxes(a["x"], -1, -2) if a.get("transpose_x") else a["x"]
    y = np.swapaxes(a["y"], -1, -2) if a.get("transpose_y") else a["y"]
    return x @ y


def _attention(a: Arguments) -> Array:
    scores = a["query"] @ np.swapaxes(a["key"], -1, -2) * a["query"].shape[-1] ** -0.5
    weights = _softmax(np.where(a["attn_mask"], scores, -np.inf), -1)
    return (weights @ a["value"]).astype(a["query"].dtype)


def _gelu(a: Arguments) -> Array:
    assert _text(a["mode"]) == "TANH_APPROXIMATION"
    x = a["x"]
    return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(x.dtype)


_OPERATIONS: dict[str, Callable[[Arguments], Any]] = {
    "add": lambda a: a["x"] + a["y"],
    "sub": lambda a: a["x"] - a["y"],
    "mul": lambda a: a["x"] * a["y"],
    "tanh": lambda a: np.tanh(a["x"]),
    "rsqrt": lambda a: 1 / np.sqrt(a["x"] + a["epsilon"]),
    "equal": lambda a: a["x"] == a["y"],
    "greater": lambda a: a["x"] > a["y"],
    "greater_equal": lambda a: a["x"] >= a["y"],
    "less": lambda a: a["x"] < a["y"],
    "less_equal": lambda a: a["x"] <= a["y"],
    "logical_and": lambda a: a["x"] & a["y"],
    "reduce_mean": lambda a: a["x"].mean(axis=tuple(_integers(a["axes"])), keepdims=bool(a["keep_dims"])),
    "reduce_sum": lambda a: a["x"].sum(axis=tuple(_integers(a["axes"])), keepdims=bool(a["keep_dims"])),
    "expand_dims": lambda a: np.expand_dims(a["x"], tuple(_integers(a["axes"]))),
    "reshape": lambda a: a["x"].reshape(_integers(a["shape"])),
    "transpose": lambda a: np.transpose(a["x"], _integers(a["perm"])),
    "tile": lambda a: np.tile(a["x"], _integers(a["reps"])),
    "concat": lambda a: np.concatenate(a["values"], axis=int(a["axis"])),
    "gather": lambda a: np.take(a["x"], a["indices"], axis=int(a["axis"])),
    "select": lambda a: np.where(a["cond"], a["a"], a["b"]),
    "softmax": lambda a: _softmax(a["x"], int(a["axis"])),
    "linear": lambda a: a["x"] @ a["weight"].T + a["bias"],
    "constexpr_blockwise_shift_scale": _dequantise,
    "slice_update": _slice_update,
    "slice_by_size": _slice_by_size,
    "split": _split,
    "matmul": _matmul,
    "gelu": _gelu,
    "scaled_dot_product_attention": _attention,
}
