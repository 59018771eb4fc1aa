"""Which functions the packages of a bundle have, and their writing: layer packages, then the head package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llm_gemma_coreml.bundle.manifest import head_function_name, layers_function_name
from llm_gemma_coreml.convert.architectures import layer_emitter
from llm_gemma_coreml.convert.assistant import Assistant
from llm_gemma_coreml.convert.emit import FunctionEmitter, LayerFunction
from llm_gemma_coreml.convert.exporter import PackageWriter, state_input, tensor_input
from llm_gemma_coreml.convert.source import FULL, SLIDING, ModelConfig
from llm_gemma_coreml.convert.weight_table import WeightTable

HEAD_PACKAGE = "head.mlpackage"
EMBEDDING_VALUES, EMBEDDING_SCALES = "embedding.values", "embedding.scales"


@dataclass(frozen=True)
class Layout:
    """Which functions a bundle has. Sizes are counts of tokens, rows, slots and layers."""

    rungs: tuple[int, ...]
    widths: tuple[int, ...]
    head_widths: tuple[int, ...]
    ring_capacity: int
    layers_per_package: int
    write_form: str = "slice_update"
    attention_form: str = "explicit"

    def layer_functions(self) -> Iterator[LayerFunction]:
        """The functions of each layer package."""
        for rung in self.rungs:
            for width in self.widths:
                yield LayerFunction(rung, width, self.rungs[-1], self.ring_capacity, self.write_form, self.attention_form)

    def layer_ranges(self, layers: int) -> list[range]:
        """The layers of each layer package, in order."""
        step = self.layers_per_package
        return [range(first, min(first + step, layers)) for first in range(0, layers, step)]

    def function_count(self, layers: int) -> int:
        """Functions of all packages together."""
        return len(self.layer_ranges(layers)) * len(self.rungs) * len(self.widths) + len(self.head_widths)


def package_name(layers: range) -> str:
    """File name of the package with those layers."""
    return f"layers_{layers.start:02d}_{layers.stop:02d}.mlpackage"


def state_shape(config: ModelConfig, layout: Layout, layer: int) -> tuple[int, int, int]:
    """Shape of the two states of a layer: [kv heads, rows, head dim]."""
    rows = next(layout.layer_functions()).state_rows(config.layer_types[layer])
    return (config.kv_heads(layer), rows, config.head_dim(layer))


class PackageSet:
    """Writes the packages of a bundle, each where it is told to.

    wrote: called with the number of elements of each tensor that was written; emitted: after each function.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        weights: WeightTable,
        wrote: Callable[[int], None] = lambda elements: None,
        emitted: Callable[[], None] = lambda: None,
        assistant: Assistant | None = None,
    ) -> None:
        """assistant: its functions go into the package with the last layers."""
        self._assistant = assistant
        self._config = config
        self._layout = layout
        self._weights = weights
        self._wrote = wrote
        self._emitted = emitted

    def write_layers(self, path: Path, layers: range) -> None:
        """Write the package with those layers as the folder `path`."""
        writer = PackageWriter(path, self._weights, self._wrote)
        for function in self._layout.layer_functions():
            inputs = layer_inputs(self._config, self._layout, function, layers)
            function_name = layers_function_name(function.rung, function.width)
            writer.add_function(function_name, inputs, partial(self._emit_layers, layers, function))
            self._emitted()
        if self._assistant is not None and layers.stop == self._config.layers:
            states = state_inputs(self._config, self._layout, layers)
            for _ in self._assistant.add_functions(writer, self._layout, states):
                self._emitted()
        writer.finish(layers_function_name(self._layout.rungs[0], self._layout.widths[0]))

    def write_head(self, path: Path) -> dict[str, int]:
        """Write the head package as the folder `path`; offsets of the embedding's data in its weight file by weight id."""
        writer = PackageWriter(path, self._weights, self._wrote)
        for width in self._layout.head_widths:
            inputs = {"hidden": tensor_input((width, self._config.hidden_size), "fp32")}
            writer.add_function(head_function_name(width), inputs, self._emit_head)
            self._emitted()
        writer.finish(head_function_name(self._layout.head_widths[0]))
        return {weight: writer.data_offset(weight) for weight in (EMBEDDING_VALUES, EMBEDDING_SCALES)}

    def _emit_layers(self, layers: range, function: LayerFunction, inputs: dict[str, Any]) -> Any:
        emitter = FunctionEmitter(self._config, self._weights, inputs, function)
        emit_layer = layer_emitter(self._config.family)
        hidden = inputs["hidden"]
        for layer in layers:
            is_output = layer == layers[-1] and layers.stop < self._config.layers
            hidden = emit_layer(emitter, hidden, layer, "hidden_out" if is_output else f"layer_{layer}_hidden")
        if layers.stop == self._config.layers:
            hidden = emitter.norm(hidden, "final_norm", "hidden_out")
        return hidden

    def _emit_head(self, inputs: dict[str, Any]) -> Any:
        return FunctionEmitter(self._config, self._weights, inputs).logits(inputs["hidden"])


def layer_inputs(config: ModelConfig, layout: Layout, function: LayerFunction, layers: range) -> dict[str, Any]:
    """Inputs and states of a function with those layers: docs/design.md, "Package functions"."""
    width = function.width
    kinds = [kind for kind in (SLIDING, FULL) if any(config.layer_types[layer] == kind for layer in layers)]
    head_dims = {SLIDING: config.head_dim_sliding, FULL: config.head_dim_full}
    inputs = {"hidden": tensor_input((width, config.hidden_size), "fp32")}
    for kind in kinds:
        for part in ("cos", "sin"):
            inputs[f"{part}_{kind}"] = tensor_input((width, head_dims[kind] // 2), "fp32")
    inputs["query_positions"] = tensor_input((width,), "int32")
    for kind in kinds:
        inputs[f"{kind}_slot_positions"] = tensor_input((function.view_rows(kind),), "int32")
    for kind in kinds:
        inputs[f"{kind}_write_start"] = tensor_input((1,), "int32")
    return inputs | {name: make() for name, make in state_inputs(config, layout, layers).items()}


def state_inputs(config: ModelConfig, layout: Layout, layers: range) -> dict[str, Callable[[], Any]]:
    """What makes the state inputs of each function of the package with those layers, by name."""
    return {
        f"{part}_{layer}": partial(state_input, state_shape(config, layout, layer)) for layer in layers for part in "kv"
    }
