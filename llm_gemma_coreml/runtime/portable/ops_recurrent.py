"""Recurrent layers over a sequence [time, batch, features]."""

from __future__ import annotations

from typing import Any

import numpy as np

from llm_gemma_coreml.runtime.portable.graph import GraphBuilder
from llm_gemma_coreml.runtime.portable.values import OperationView, Result, translates

_ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu", "hard_sigmoid": "HardSigmoid"}
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


class _Layer:
    """What the recurrent layers have in common: directions, gates in ONNX order, states with directions
    apart."""

    def __init__(self, op: OperationView, graph: GraphBuilder, order: list[int]) -> None:
        self.op = op
        self.graph = graph
        self.order = order
        self.direction = op.text("direction", "forward")
        if self.direction not in _DIRECTIONS:
            raise op.unsupported(f"direction {self.direction}")
        self.directions = _DIRECTIONS[self.direction]
        self.size = op.type("weight_hh").shape[1]

    def activations(self, *defaults: tuple[str, str]) -> list[str]:
        """ONNX names of activation arguments (name, default), once per direction."""
        names = [self.op.text(key, default) for key, default in defaults]
        unknown = [name for name in names if name not in _ACTIVATIONS]
        if unknown:
            raise self.op.unsupported(f"activation {unknown[0]}")
        return [_ACTIVATIONS[name] for name in names] * self.directions

    def weights(self, key: str, order: list[int] | None = None) -> str:
        """A weight (or bias) of all directions, its gates in ONNX order: [directions, ...]."""
        keys = [key, f"{key}_back"][: self.directions]
        return self.graph.emit("Concat", [self._ordered(name, order or self.order) for name in keys], axis=0)

    def _ordered(self, key: str, order: list[int]) -> str:
        value = self.op.tensor(key)
        if len(order) > 1:
            gates = self.graph.emit_many("Split", [value], len(order), axis=0, num_outputs=len(order))
            value = self.graph.emit("Concat", [gates[number] for number in order], axis=0)
        return self.graph.unsqueeze(value, [0])

    def bias(self) -> str:
        """Input and recurrent biases; MIL has only their sum, given as the input's."""
        if not self.op.has("bias"):
            return ""
        both = self.weights("bias")
        zeros = self.graph.constant(np.zeros((self.directions, len(self.order) * self.size), np.float32))
        return self.graph.emit("Concat", [both, zeros], axis=1)

    def initial(self, key: str) -> str:
        """A state [batch, directions * H] as [directions, batch, H]."""
        apart = self.graph.reshape(self.op.tensor(key), [0, self.directions, self.size])
        return self.graph.emit("Transpose", [apart], perm=[1, 0, 2])

    def final(self, value: str) -> str:
        """A state [directions, batch, H] as [batch, directions * H]."""
        turned = self.graph.emit("Transpose", [value], perm=[1, 0, 2])
        return self.graph.reshape(turned, [0, self.directions * self.size])

    def run(self, name: str, inputs: list[str], outputs: int, **attributes: Any) -> Result:
        """Emit the layer and give MIL's results: the sequence (or its last step) and the final states."""
        graph = self.graph
        sequence, *states = graph.emit_many(
            name, inputs, outputs, hidden_size=self.size, direction=self.direction, **attributes
        )
        finals = [self.final(state) for state in states]
        if not self.op.flag("output_sequence"):
            return [graph.unsqueeze(finals[0], [0]), *finals]
        turned = graph.emit("Transpose", [sequence], perm=[0, 2, 1, 3])
        return [graph.reshape(turned, [0, 0, self.directions * self.size]), *finals]


@translates("lstm")
def lstm(op: OperationView, graph: GraphBuilder) -> Result:
    """LSTM; MIL orders gates input, forget, output, cell, ONNX input, output, forget, cell."""
    if op.has("clip"):
        raise op.unsupported("argument 'clip'")
    layer = _Layer(op, graph, [0, 2, 1, 3])
    peephole = layer.weights("peephole", [0, 2, 1]) if op.has("peephole") else ""
    activations = layer.activations(
        ("recurrent_activation", "sigmoid"), ("cell_activation", "tanh"), ("activation", "tanh")
    )
    inputs = [op.tensor("x"), layer.weights("weight_ih"), layer.weights("weight_hh"), layer.bias(), ""]
    inputs += [layer.initial("initial_h"), layer.initial("initial_c"), peephole]
    return layer.run("LSTM", inputs, 3, activations=activations)


@translates("gru")
def gru(op: OperationView, graph: GraphBuilder) -> Result:
    """GRU; MIL orders gates reset, new, update, ONNX update, reset, new."""
    layer = _Layer(op, graph, [2, 0, 1])
    activations = layer.activations(("recurrent_activation", "sigmoid"), ("activation", "tanh"))
    inputs = [op.tensor("x"), layer.weights("weight_ih"), layer.weights("weight_hh"), layer.bias(), ""]
    inputs.append(layer.initial("initial_h"))
    return layer.run("GRU", inputs, 2, activations=activations, linear_before_reset=1)


@translates("rnn")
def rnn(op: OperationView, graph: GraphBuilder) -> Result:
    """A plain recurrent layer."""
    layer = _Layer(op, graph, [0])
    inputs = [op.tensor("x"), layer.weights("weight_ih"), layer.weights("weight_hh"), layer.bias(), ""]
    inputs.append(layer.initial("initial_h"))
    return layer.run("RNN", inputs, 2, activations=layer.activations(("activation", "tanh")))
