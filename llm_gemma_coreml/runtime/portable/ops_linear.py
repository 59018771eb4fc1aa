"""Matrix products: linear, matmul, einsum, attention without a state."""

from __future__ import annotations

import math

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import MICROSOFT, GraphBuilder
from llm_gemma_coreml.runtime.portable.recipes import WeightRecipe
from llm_gemma_coreml.runtime.portable.values import OperationView, QuantisedWeight, Result, Value, translates

BLOCK = 32
"""Block of MatMulNBits.

At 32 each row's result is bitwise independent of the other rows; at 128 it is not. 64 is, for 8 bits, and a fifth
faster, but activations are rounded to 8 bits in the same blocks: half as accurate (KL 0.021 against 0.010 nats on prose).
"""


@translates("linear")
def linear(op: OperationView, graph: GraphBuilder) -> Result:
    """`x @ weight.T + bias`, weight [N, K]."""
    product = times_weight(op, graph, op.tensor("x"), op.value("weight"), transposed=True)
    bias = op.known("bias") if op.has("bias") else np.zeros(1)
    return product if bias is not None and not bias.any() else graph.emit("Add", [product, op.tensor("bias")])


@translates("matmul")
def matmul(op: OperationView, graph: GraphBuilder) -> Result:
    """Batched product of two matrices, each optionally transposed."""
    x, y = op.tensor("x"), op.value("y")
    transpose_x, transpose_y = op.flag("transpose_x"), op.flag("transpose_y")
    if op.rank("x") > 1 and transpose_x:
        x = swap_last(graph, x, op.rank("x"))
    if not op.is_float("x"):
        return graph.emit("MatMul", [x, _other(op, graph, transpose_y)])
    if y.stored and len(y.type.shape) == 2 and op.rank("x") > 1:
        return times_weight(op, graph, x, y, transposed=transpose_y)
    return graph.emit("MatMul", [x, _other(op, graph, transpose_y)])


def _other(op: OperationView, graph: GraphBuilder, transposed: bool) -> str:
    y = op.tensor("y")
    return swap_last(graph, y, op.rank("y")) if transposed and op.rank("y") > 1 else y


def swap_last(graph: GraphBuilder, value: str, rank: int) -> str:
    """`value` with its last two axes exchanged."""
    return graph.emit("Transpose", [value], perm=[*range(rank - 2), rank - 1, rank - 2])


def times_weight(op: OperationView, graph: GraphBuilder, x: str, weight: Value, *, transposed: bool) -> str:
    """`x @ weight` with a two-dimensional weight [K, N], or [N, K] if `transposed`: quantised if it is
    stored so."""
    if weight.quantised is not None and not op.context.exact and op.rank("x") > 1:
        product = _times_quantised(graph, x, weight.quantised, "nk" if transposed else "kn")
        if product is not None:
            return product
    if not transposed:
        return graph.emit("MatMul", [x, op.context.materialise(weight)])
    if not weight.stored:
        return graph.emit("MatMul", [x, swap_last(graph, op.context.materialise(weight), 2)])
    recipe = dense_recipe(weight)
    shape = tuple(reversed(recipe.shape))
    turned = WeightRecipe("transpose", (recipe,), "float32", shape, (("permutation", (1, 0)),))
    return graph.emit("MatMul", [x, op.context.initialiser(turned)])


def dense_recipe(weight: Value) -> WeightRecipe:
    """The recipe of a stored weight as fp32."""
    if weight.recipe is not None:
        return weight.recipe
    from llm_gemma_coreml.runtime.portable.context import constant_recipe

    assert weight.constant is not None
    return constant_recipe(weight.constant)


def _times_quantised(graph: GraphBuilder, x: str, weight: QuantisedWeight, order: str) -> str | None:
    """MatMulNBits for weights of 4 or 8 bits whose blocks are multiples of 32 along K, else None."""
    shape, counts = weight.data.shape, weight.block_counts()
    bits = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}.get(weight.data.dtype)
    if bits is None or len(shape) != 2:
        return None
    (rows, columns), blocks = (shape, counts[1]) if order == "nk" else (shape[::-1], counts[0])
    if blocks > 1 and (columns // blocks) % BLOCK:
        return None
    block_shape = (rows, -(-columns // BLOCK))
    sizes = (("rows", rows), ("columns", columns), ("block", BLOCK), ("order", order))
    data = WeightRecipe(
        "nbits_data",
        (weight.data,),
        "uint8",
        (*block_shape, BLOCK * bits // 8),
        (("bits", bits), ("block", BLOCK), ("order", order)),
    )
    inputs = [
        x,
        graph.weight(data),
        graph.weight(WeightRecipe("nbits_scales", (full_rank(weight, weight.scale),), "float32", block_shape, sizes)),
    ]
    signed = weight.data.dtype.startswith("int")
    if weight.offset is not None or not signed:
        offset = None if weight.offset is None else full_rank(weight, weight.offset)
        zero_shape = (rows, -(-block_shape[1] * bits // 8))
        parameters = (("bits", bits), ("signed", signed), *sizes)
        inputs.append(graph.weight(WeightRecipe("nbits_zero_points", (offset,), "uint8", zero_shape, parameters)))
    return graph.emit(
        "MatMulNBits",
        inputs,
        domain=MICROSOFT,
        K=columns,
        N=rows,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=4,
    )


def full_rank(weight: QuantisedWeight, source: object) -> WeightRecipe:
    """Scales or offsets of a weight with one entry per block of each axis."""
    from llm_gemma_coreml.bundle.weights import numpy_dtype
    from llm_gemma_coreml.runtime.portable.recipes import Source

    assert isinstance(source, Source)
    shape = weight.block_counts() if math.prod(source.shape) > 1 else (1,) * len(weight.data.shape)
    dtype = numpy_dtype(source.dtype).name
    return WeightRecipe("reshape", (source,), dtype, shape, (("shape", shape),))


@translates("einsum")
def einsum(op: OperationView, graph: GraphBuilder) -> Result:
    """Sums of products by an equation."""
    return graph.emit("Einsum", op.tensors("values"), equation=op.text("equation").replace(" ", ""))


@translates("scaled_dot_product_attention")
def attention(op: OperationView, graph: GraphBuilder) -> Result:
    """softmax(query @ key.T / sqrt(D) + mask) @ value; a boolean mask hides where it is False."""
    query, key, rank = op.tensor("query"), op.tensor("key"), op.rank("key")
    size = graph.dimension(query, op.rank("query") - 1)
    head = op.type("query").shape[-1]
    if head > 0:
        scale = graph.constant(np.float32(1 / math.sqrt(head)))
    else:
        scale = graph.emit("Reciprocal", [graph.emit("Sqrt", [graph.to_float(size)])])
    scaled = graph.emit("Mul", [query, scale])
    scores = graph.emit("MatMul", [scaled, swap_last(graph, key, rank)])
    if op.has("attn_mask"):
        mask = op.tensor("attn_mask")
        if op.type("attn_mask").dtype == "bool":
            lowest = graph.constant(np.float32(np.finfo(np.float32).min))
            scores = graph.emit("Where", [mask, scores, lowest])
        else:
            scores = graph.emit("Add", [scores, mask])
    return graph.emit("MatMul", [graph.emit("Softmax", [scores], axis=-1), op.tensor("value")])
