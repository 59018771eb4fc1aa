"""For which machine a bundle is made: what `convert --target iphone` changes, and the limits that it keeps to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llm_gemma_coreml.convert.palettise import ENTRIES, group_rows
from llm_gemma_coreml.convert.source import ModelConfig, expected_shapes
from llm_gemma_coreml.errors import RequestError

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.build import BuildOptions

TARGETS = ("mac", "iphone")
DEFAULT_CONTEXTS = (4096, 32768, 131072)
DEFAULT_WIDTHS = (1, 2, 4, 8, 128)
IPHONE_CONTEXTS = (1024, 4096)
IPHONE_WIDTHS = (1, 4)
PACKAGE_BUDGET = 1_000_000_000
"""Bytes of a package's weights, with room below what the Neural Engine is reported to take."""
NEURAL_ENGINE_BYTES = 1_400_000_000
"""Larger packages it is reported to leave to the GPU, without a word."""
MOST_STATES = 2
"""States of a package: with more, the Neural Engine is reported to fail when it predicts."""
_STATE_MULTIPLE = 32
"""Sizes of a state's rows and columns, as the Neural Engine wants them."""


@dataclass(frozen=True)
class Cut:
    """How many layers go into a package, and what limits it."""

    layers: int
    reason: str


def for_target(options: BuildOptions, config: ModelConfig) -> BuildOptions:
    """The options with what their target asks for where the user chose nothing (or the usual contexts and widths).

    Raises RequestError for an unknown target, or a choice or a model that it cannot have.
    """
    target = options.target
    if target not in TARGETS:
        raise RequestError(f"There is no target {target!r}. Choose one of {', '.join(TARGETS)}.")
    if target == "mac":
        return options
    if options.bits not in (None, 4):
        raise RequestError(f"--target iphone has palettised weights of 4 bits, not {options.bits}: leave out --bits.")
    if options.layers_per_package is not None:
        raise RequestError("--target iphone cuts the packages itself: leave out --layers-per-package.")
    _check_state_sizes(config)
    return replace(
        options,
        bits=4,
        contexts=IPHONE_CONTEXTS if tuple(options.contexts) == DEFAULT_CONTEXTS else options.contexts,
        widths=IPHONE_WIDTHS if tuple(options.widths) == DEFAULT_WIDTHS else options.widths,
        layers_per_package=cut_layers(config).layers,
    )


def cut_layers(config: ModelConfig, budget: int = PACKAGE_BUDGET, states: int = MOST_STATES) -> Cut:
    """How many layers a package may have: each brings two states, and its weights. Raises RequestError if not even one."""
    largest = max(layer_bytes(config, layer) for layer in range(config.layers))
    by_size, by_states = budget // largest, states // 2
    if by_size < 1:
        raise RequestError(
            f"A layer of {config.name} has {largest / 1e6:.0f} MB of palettised weights, more than a package of "
            f"{budget / 1e6:.0f} MB may hold: this model is too large for the target."
        )
    layers = min(by_size, by_states, config.layers)
    reason = "the number of states" if by_states <= by_size else "the size of a package"
    return Cut(max(1, layers), reason)


def layer_bytes(config: ModelConfig, layer: int) -> int:
    """Bytes of a layer's palettised weights: half a byte for each, and the tables."""
    total = 0
    for name, shape in expected_shapes(config).items():
        if name.startswith(f"layers.{layer}."):
            count = math.prod(shape)
            total += count // 2 + shape[0] // group_rows(shape[0]) * ENTRIES * 2 if len(shape) > 1 else 4 * count
    return total


def _check_state_sizes(config: ModelConfig) -> None:
    for head_dim in (config.head_dim_sliding, config.head_dim_full):
        if head_dim % _STATE_MULTIPLE:
            raise RequestError(
                f"{config.name} has heads of {head_dim} values, but the Neural Engine wants states whose sizes are "
                f"multiples of {_STATE_MULTIPLE}: this model cannot be converted for the target."
            )
