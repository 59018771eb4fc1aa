"""Convolutions and pooling, one to three spatial dimensions."""

from __future__ import annotations

from typing import Any

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_AUTOMATIC = {"valid": "VALID", "same": "SAME_UPPER", "same_lower": "SAME_LOWER"}


def _padding(op: OperationView, kernel: list[int], strides: list[int], dilations: list[int]) -> dict[str, Any]:
    """The ONNX attributes for pad_type and pad. `kernel`, `strides`, `dilations` are by spatial dimension."""
    kind, count = op.text("pad_type", "valid"), len(kernel)
    if kind == "custom":
        pad = op.integers("pad", None) or [0] * (2 * count)
        return {"pads": pad[0::2] + pad[1::2]}
    if kind not in _AUTOMATIC:
        raise op.unsupported(f"pad_type {kind}")
    sizes = [op.size("x", 2 + axis) for axis in range(count)]
    if kind == "valid" or None in sizes:
        return {"auto_pad": _AUTOMATIC[kind]}
    begins, ends = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        assert size is not None
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        smaller, larger = total // 2, total - total // 2
        begins.append(smaller if kind == "same" else larger)
        ends.append(larger if kind == "same" else smaller)
    return {"pads": begins + ends}


@translates("conv")
def conv(op: OperationView, graph: GraphBuilder) -> Result:
    """Convolution, weight [out, in / groups, kernel...]."""
    kernel = list(op.type("weight").shape[2:])
    strides = op.integers("strides", None) or [1] * len(kernel)
    dilations = op.integers("dilations", None) or [1] * len(kernel)
    return graph.emit(
        "Conv",
        [op.tensor("x"), op.tensor("weight"), op.optional("bias") or ""],
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        group=op.integer("groups", 1),
        **_padding(op, kernel, strides, dilations),
    )


@translates("conv_transpose")
def conv_transpose(op: OperationView, graph: GraphBuilder) -> Result:
    """Transposed convolution, weight [in, out / groups, kernel...]."""
    kernel = list(op.type("weight").shape[2:])
    count = len(kernel)
    strides = op.integers("strides", None) or [1] * count
    dilations = op.integers("dilations", None) or [1] * count
    kind = op.text("pad_type", "valid")
    target = op.integers("output_shape", None)
    attributes: dict[str, Any] = {}
    if kind in ("same", "same_lower"):
        attributes["auto_pad"] = _AUTOMATIC[kind]
        if target is not None:
            attributes["output_shape"] = target[-count:]
    else:
        pad = (op.integers("pad", None) if kind == "custom" else None) or [0] * (2 * count)
        attributes["pads"] = pad[0::2] + pad[1::2]
        if target is not None:
            attributes["output_padding"] = _output_padding(op, target[-count:], kernel, strides, dilations, pad)
    return graph.emit(
        "ConvTranspose",
        [op.tensor("x"), op.tensor("weight"), op.optional("bias") or ""],
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        group=op.integer("groups", 1),
        **attributes,
    )


def _output_padding(
    op: OperationView,
    target: list[int],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    pad: list[int],
) -> list[int]:
    """How many more elements than usual the output has at the end of each spatial dimension."""
    extra = []
    for axis, wanted in enumerate(target):
        size = op.size("x", 2 + axis)
        if size is None:
            raise op.unsupported("output_shape with an input of unknown size")
        usual = (
            (size - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1 - pad[2 * axis] - pad[2 * axis + 1]
        )
        extra.append(wanted - usual)
    return extra


@translates("avg_pool", "max_pool", "l2_pool")
def pool(op: OperationView, graph: GraphBuilder) -> Result:
    """Mean, largest element or Euclidean length of windows."""
    name = {"avg_pool": "AveragePool", "max_pool": "MaxPool", "l2_pool": "LpPool"}[op.operation.type]
    kernel = op.integers("kernel_sizes") or []
    strides = op.integers("strides", None) or [1] * len(kernel)
    attributes = _padding(op, kernel, strides, [1] * len(kernel))
    if name == "AveragePool":
        attributes["count_include_pad"] = int(not op.flag("exclude_padding_from_average"))
    if name == "LpPool":
        attributes["p"] = 2
    if op.flag("ceil_mode"):
        attributes["ceil_mode"] = 1
    return graph.emit(name, [op.tensor("x")], kernel_shape=kernel, strides=strides, **attributes)
