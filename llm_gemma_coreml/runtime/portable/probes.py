"""Finds out, with small models, what this ONNX Runtime does on this processor."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm_gemma_coreml.runtime.portable.recipes import WeightRecipe

_QUERY_ROWS = (2, 16, 48)
_PIECES = 31


def originals_are_packed() -> bool:
    """True if quantised weights are packed when a session is made, and the originals are not read again.

    Found out with a small model whose weights are overwritten after loading; if so, they need not be held twice.
    """
    return all(_packs(bits) for bits in (4, 8))


def sums_in_slot_order(head_dim: int, threads: int, piece: int) -> bool:
    """True if one product adds up its terms as products of `piece` terms each do whose results are added in order.

    It depends on how a matrix kernel shares the columns (`head_dim`) out to threads. A large product is tried: smaller ones
    take fewer threads, whose columns are more.
    """
    from llm_gemma_coreml.runtime.portable.graph import ELEMENT_TYPES, GraphBuilder

    random, kind, graph = np.random.default_rng(0), ELEMENT_TYPES["float32"], GraphBuilder()
    left, right = (graph.add_input(name, kind, [None] * 4) for name in ("left", "right"))
    graph.add_output("y", graph.emit("MatMul", [left, right]), kind)
    session = _session(graph, threads)
    values = random.standard_normal((1, 1, _PIECES * piece, head_dim), np.float32)
    for rows in _QUERY_ROWS:
        weights = random.standard_normal((1, 1, rows, _PIECES * piece), np.float32)
        total = np.zeros((1, 1, rows, head_dim), np.float32)
        for start in range(0, _PIECES * piece, piece):
            part = slice(start, start + piece)
            total += session.run(None, {"left": weights[..., part].copy(), "right": values[:, :, part].copy()})[0]
        if not np.array_equal(total, session.run(None, {"left": weights, "right": values})[0]):
            return False
    return True


def _packs(bits: int) -> bool:
    import onnxruntime

    from llm_gemma_coreml.runtime.portable.graph import ELEMENT_TYPES, MICROSOFT, GraphBuilder

    inner, outer, block = 64, 32, 32
    random = np.random.default_rng(0)
    arrays = (
        random.integers(0, 256, (outer, inner // block, block * bits // 8), dtype=np.uint8),
        random.random((outer, inner // block), dtype=np.float32),
    )
    graph, kind = GraphBuilder(), ELEMENT_TYPES["float32"]
    weights = [graph.weight(WeightRecipe("probe", (), str(array.dtype), array.shape)) for array in arrays]
    x = graph.add_input("x", kind, ["rows", inner])
    product = graph.emit(
        "MatMulNBits", [x, *weights], MICROSOFT, K=inner, N=outer, bits=bits, block_size=block, accuracy_level=4
    )
    graph.add_output("y", product, kind)
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in zip(weights, arrays, strict=True)}
    session = _session(graph, 1, held)
    feeds = [{"x": random.random((rows, inner), dtype=np.float32)} for rows in (1, 8)]
    before = [session.run(None, feed)[0] for feed in feeds]
    for array in arrays:
        array[:] = 0
    after = [session.run(None, feed)[0] for feed in feeds]
    return all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))


def _session(graph: Any, threads: int, initializers: dict[str, Any] | None = None) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = threads
    if initializers:
        settings.add_external_initializers(list(initializers), list(initializers.values()))
    return onnxruntime.InferenceSession(graph.model("probe").SerializeToString(), settings)
