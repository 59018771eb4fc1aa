"""The assistant's functions inside the package of its target's last layers, whose states they read.

Core ML keeps states per package: only functions of that package can read the target's K/V without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_gemma_coreml.bundle.manifest import Drafter, assistant_function_name
from llm_gemma_coreml.convert.assistant_source import AssistantSource, check_fits
from llm_gemma_coreml.convert.quantise_search import BLOCK
from llm_gemma_coreml.convert.source import FULL, PROJECTIONS, SLIDING, ModelConfig, Source, expected_shapes
from llm_gemma_coreml.convert.weight_table import WeightTable
from llm_gemma_coreml.errors import RequestError

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.emit import LayerFunction
    from llm_gemma_coreml.convert.exporter import PackageWriter
    from llm_gemma_coreml.convert.packages import Layout

_PREFIX = "assistant."


@dataclass(frozen=True)
class Assistant:
    """An open assistant checkpoint that fits its target."""

    source: Source
    bits: int
    """8 or 4 bits for its layers' and projections' weights, 16 for plain fp16; its head has 8."""
    target: ModelConfig

    @classmethod
    def open(cls, drafter: Source | Path | str, target: ModelConfig, bits: int | None = None) -> Assistant:
        """The assistant in the directory (or source) `drafter`. Raises SourceError if it is not one of `target`.

        bits None: 4 if the checkpoint was trained for that, else 8.
        """
        if not isinstance(drafter, (str, Path)):
            check_fits(drafter.path, drafter.config, target)
            source: Source = drafter
        else:
            source = AssistantSource(Path(drafter), target)
        return cls(source, bits or (4 if _on_int4_grid(source) else 8), target)

    @property
    def sources(self) -> dict[str, int]:
        """The target's layer whose K/V is read, by kind of layer: the last one of the kind."""
        kinds = self.target.layer_types
        return {kind: len(kinds) - 1 - kinds[::-1].index(kind) for kind in (SLIDING, FULL)}

    def parameters(self) -> int:
        """Number of weights; its tied head counts once."""
        return sum(math.prod(shape) for shape in expected_shapes(self.source.config).values())

    def bytes(self) -> int:
        """Bytes that it adds to the bundle, a little more than it will have."""
        head = self.source.config.vocabulary_size * self.source.config.hidden_size
        return int(head * 1.07 + (self.parameters() - head) * (self.bits / 8 + 0.07)) + (1 << 20)

    def facts(self) -> dict[str, Any]:
        """What decides the bytes of its functions, for the fingerprint of a conversion."""
        return {"source": self.source.description, "bits": self.bits}

    def check_layout(self, layout: Layout) -> None:
        """Raise RequestError if the target's layers whose K/V it reads are not both in the last package."""
        last = layout.layer_ranges(self.target.layers)[-1]
        if any(layer not in last for layer in self.sources.values()):
            raise RequestError(
                f"With a drafter the last package must hold the layers {min(self.sources.values())} to "
                f"{self.target.layers - 1}; it starts at layer {last.start}. Put more layers into each package."
            )

    def function_count(self, layout: Layout) -> int:
        """Functions that `add_functions` adds."""
        return len(layout.rungs)

    def add_functions(self, writer: PackageWriter, layout: Layout, states: dict[str, Any]) -> Iterator[str]:
        """Add one function for each rung to the package of the last layers, yielding its name when it is done.

        states: makes the state inputs of that package: all of its functions have to declare the same ones.
        """
        from llm_gemma_coreml.convert.emit import LayerFunction

        weights = WeightTable(self.source, self.bits, prefix=_PREFIX)
        for rung in layout.rungs:
            function = LayerFunction(rung, 1, layout.rungs[-1], layout.ring_capacity, attention_form=layout.attention_form)
            name = assistant_function_name(rung)
            inputs = self._inputs(function) | {state: make() for state, make in states.items()}
            writer.add_function(name, inputs, partial(self._emit, function, weights), weights)
            yield name

    def manifest_entry(self, package: str) -> Drafter:
        """What `bundle.json` says about it; `package` holds its functions."""
        config = self.source.config
        return Drafter(
            path=package,
            sliding_source_layer=self.sources[SLIDING],
            full_source_layer=self.sources[FULL],
            hidden_size=config.hidden_size,
            layers=config.layers,
            source=self.source.description,
        )

    def quantisation(self) -> str:
        """How its weights are stored, for people."""
        body = "fp16" if self.bits == 16 else f"int{self.bits} block {BLOCK}"
        return f"{body}, head int8 block {BLOCK}"

    def _inputs(self, function: LayerFunction) -> dict[str, Any]:
        """docs/design.md, "Drafters"."""
        from llm_gemma_coreml.convert.exporter import tensor_input

        inputs = {name: tensor_input((1, self.target.hidden_size), "fp32") for name in ("token_embedding", "hidden")}
        for kind, dim in ((SLIDING, self.target.head_dim_sliding), (FULL, self.target.head_dim_full)):
            for part in ("cos", "sin"):
                inputs[f"{part}_{kind}"] = tensor_input((1, dim // 2), "fp32")
        inputs["query_positions"] = tensor_input((1,), "int32")
        for kind in (SLIDING, FULL):
            inputs[f"{kind}_slot_positions"] = tensor_input((function.view_rows(kind),), "int32")
        return inputs

    def _emit(self, function: LayerFunction, weights: WeightTable, inputs: dict[str, Any]) -> Any:
        from llm_gemma_coreml.convert.architectures.gemma4_assistant import emit_assistant
        from llm_gemma_coreml.convert.emit import FunctionEmitter

        # The row stands after the last committed token, from where it sees one more than the window: as in transformers.
        config = replace(self.source.config, sliding_window=self.target.sliding_window + 1)
        emitter = FunctionEmitter(config, weights, inputs, function)
        return emit_assistant(emitter, inputs["token_embedding"], inputs["hidden"], self.sources)


def _on_int4_grid(source: Source) -> bool:
    known = expected_shapes(source.config)
    names = [name for part in PROJECTIONS if (name := f"layers.0.{part}") in known]
    return all(source.blocks(name, 4) is not None for name in names)
