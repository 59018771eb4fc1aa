"""Conditions and loops: ONNX If and Loop with the nested blocks as their graphs."""

from __future__ import annotations

import onnx

from llm_gemma_coreml.bundle.program import Block
from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates


def _results(op: OperationView, block: Block, arguments: list[str]) -> list[str]:
    """Emit a block's operations in the current graph, with its inputs bound to `arguments`; its outputs'
    names."""
    inner = op.context.nested(block)
    for name, argument in zip(block.inputs, arguments, strict=True):
        inner.define(name, argument)
    for operation in inner.live_operations():
        inner.translate(operation)
    return [inner.tensor(name) for name in block.outputs]


def _scalar(graph: GraphBuilder, condition: str) -> str:
    return graph.reshape(condition, [])


@translates("cond")
def condition(op: OperationView, graph: GraphBuilder) -> Result:
    """The first block's results if the predicate holds, else the second's."""
    if len(op.operation.blocks) != 2:
        raise op.unsupported("not two blocks")
    branches = []
    for name, block in zip(("then", "else"), op.operation.blocks, strict=True):
        op.context.prepare(block)
        with graph.nested(name) as branch:
            branch.outputs.extend(_results(op, block, []))
        branches.append(branch.proto())
    predicate = _scalar(graph, op.tensor("pred"))
    count = len(op.operation.outputs)
    return graph.emit_many("If", [predicate], count, then_branch=branches[0], else_branch=branches[1])


@translates("while_loop")
def while_loop(op: OperationView, graph: GraphBuilder) -> Result:
    """The second block applied to the loop's values again and again while the first block says so."""
    if len(op.operation.blocks) != 2:
        raise op.unsupported("not two blocks")
    test, body = op.operation.blocks
    op.context.prepare(test)
    op.context.prepare(body)
    values = op.tensors("loop_vars")
    first = _scalar(graph, _results(op, test, values)[0])
    with graph.nested("loop") as loop:
        loop.add_input(onnx.TensorProto.INT64, [])
        loop.add_input(onnx.TensorProto.BOOL, [])
        carried = [loop.add_input(op.context.element_type(kind, name)) for name, kind in body.inputs.items()]
        results = _results(op, body, carried)
        loop.outputs.append(_scalar(graph, _results(op, test, results)[0]))
        loop.outputs.extend(results)
    return graph.emit_many("Loop", ["", first, *values], len(values), body=loop.proto())
