"""Resizing of images (the last two axes)."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_SAMPLING = {
    "DEFAULT": "asymmetric",
    "STRICT_ALIGN_CORNERS": "align_corners",
    "ALIGN_CORNERS": "align_corners",
    "UNALIGN_CORNERS": "half_pixel",
}


def _resize(
    op: OperationView,
    graph: GraphBuilder,
    *,
    mode: str,
    coordinates: str,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
) -> str:
    rank = op.rank("x")
    attributes: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": coordinates,
        "axes": [rank - 2, rank - 1],
    }
    if mode == "nearest":
        attributes["nearest_mode"] = "floor"
    inputs = [op.tensor("x"), ""]
    if scales is not None:
        inputs.append(graph.constant(np.asarray(scales, np.float32)))
    else:
        inputs += ["", graph.constant(np.asarray(sizes, np.int64))]
    return graph.emit("Resize", inputs, **attributes)


def _scales(op: OperationView) -> list[float]:
    return [op.floating(f"scale_factor_{side}", 1.0) for side in ("height", "width")]


def _targets(op: OperationView) -> list[int]:
    return [op.integer(f"target_size_{side}", 1) for side in ("height", "width")]


@translates("upsample_nearest_neighbor")
def upsample_nearest(op: OperationView, graph: GraphBuilder) -> Result:
    """Each element repeated."""
    return _resize(op, graph, mode="nearest", coordinates="asymmetric", scales=_scales(op))


@translates("upsample_bilinear")
def upsample_bilinear(op: OperationView, graph: GraphBuilder) -> Result:
    """Linear interpolation by scale."""
    if op.flag("align_corners", True):
        coordinates = "align_corners"
    else:
        coordinates = "half_pixel" if op.flag("half_pixel_centers", True) else "asymmetric"
    return _resize(op, graph, mode="linear", coordinates=coordinates, scales=_scales(op))


def _coordinates(op: OperationView) -> str:
    mode = op.text("sampling_mode", "DEFAULT")
    if mode not in _SAMPLING:
        raise op.unsupported(f"sampling_mode {mode}")
    return _SAMPLING[mode]


@translates("resize_nearest_neighbor")
def resize_nearest(op: OperationView, graph: GraphBuilder) -> Result:
    """The nearest element, to a target size."""
    if _coordinates(op) != "asymmetric":
        raise op.unsupported("its sampling_mode")
    return _resize(op, graph, mode="nearest", coordinates="asymmetric", sizes=_targets(op))


@translates("resize_bilinear")
def resize_bilinear(op: OperationView, graph: GraphBuilder) -> Result:
    """Linear interpolation to a target size."""
    return _resize(op, graph, mode="linear", coordinates=_coordinates(op), sizes=_targets(op))
