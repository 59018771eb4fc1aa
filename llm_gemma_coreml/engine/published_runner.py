"""Runs one call of a bundle in the published layout: host-made one-hots, masks and RoPE, and a head that gives token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.bundle.manifest import Manifest
from llm_gemma_coreml.bundle.published import PublishedConfig, read_published
from llm_gemma_coreml.engine.published_drafter import PublishedDrafter
from llm_gemma_coreml.engine.published_mode import PublishedMode
from llm_gemma_coreml.engine.published_slots import AsPublishedSlots, ExactSlots, PublishedSlots
from llm_gemma_coreml.engine.rotary import RotaryTable
from llm_gemma_coreml.engine.runner import Float32, Runner, States
from llm_gemma_coreml.engine.slots import Geometry, SlotTable
from llm_gemma_coreml.errors import BundleError, PackageError
from llm_gemma_coreml.runtime.base import Array, Runtime, RuntimeOptions

_MANY_SINGLE_ROWS = 64
_SLOTS: dict[str, type[PublishedSlots]] = {"exact": ExactSlots, "as-published": AsPublishedSlots}


class PublishedRunner(Runner):
    """The packages of a bundle in the published layout."""

    def __init__(
        self,
        bundle_path: Path,
        manifest: Manifest,
        runtime: Runtime,
        options: RuntimeOptions,
        *,
        context: int | None = None,
        mode: PublishedMode | None = None,
    ) -> None:
        """Arguments and errors are those of Runner; BundleError too if the bundle's own two files cannot be read."""
        self.mode = mode or PublishedMode()
        self.config = config = read_published(bundle_path).config
        _check_agreement(config, manifest, bundle_path)
        geometry = Geometry(config.window, config.ring_length, config.full_length, block=config.most_rows)
        super().__init__(bundle_path, manifest, runtime, options, geometry, context)
        self.drafter = PublishedDrafter(bundle_path, runtime, options, manifest.rungs)
        self.drafter_refused = False
        """The runtime cannot run the drafter, and the user was told."""
        self._names = dict(config.functions)
        self._head_function = _only_function(self._head.function_names, manifest.head_package)
        self._rotary = {
            "s": RotaryTable.of_frequencies(config.frequencies_sliding),
            "f": RotaryTable.of_frequencies(config.frequencies_full),
        }

    def make_slots(self) -> PublishedSlots:
        """Empty slots that follow the mode's rules."""
        return _SLOTS[self.mode.ring](self.geometry)

    def prefill_notice(self, first: int, end: int) -> str | None:
        ring = self.geometry.capacity
        alone = end - max(first, ring)
        if self.mode.ring != "exact" or alone < _MANY_SINGLE_ROWS:
            return None
        return (
            f"{alone} tokens of the prompt lie beyond the ring of {ring} and run one by one, to be exact. "
            "-o ring as-published runs them in blocks, and loses tokens."
        )

    def run(self, states: States, slots: SlotTable, tokens: Sequence[int]) -> Float32:
        assert isinstance(slots, PublishedSlots)
        rows, position = len(tokens), slots.length
        width = self.width_for(rows)
        rung = self.rung_for(position + rows)
        hidden: Array = self._embedding.rows([*tokens, *[tokens[-1]] * (width - rows)])
        slots.write(rows, width)
        common = self._inputs(slots, position, rows, width, rung)
        for package, state in zip(self._layers, states, strict=True):
            hidden = package.function(self._names[rung]).run({"hidden_in": hidden, **common}, state)["hidden"]
        return hidden[:rows]

    def _inputs(self, slots: PublishedSlots, position: int, rows: int, width: int, rung: int) -> dict[str, Array]:
        """All inputs but `hidden_in`. Padding rows see what the last real row sees, and are written nowhere."""
        written = np.arange(position, position + rows)
        queries = np.minimum(np.arange(position, position + width), position + rows - 1)
        ring = self.geometry.capacity
        return {
            "onehot_s": _one_hot(written % ring, width, ring),
            "onehot_f": _one_hot(written, width, rung),
            "mask_s": self._mask(slots.visible(queries, position, rows)),
            "mask_f": self._mask(np.arange(rung)[None] <= queries[:, None]),
            **self.rotary_inputs(position, width),
        }

    def rotary_inputs(self, position: int, width: int) -> dict[str, Array]:
        """cos_s, sin_s, cos_f, sin_f for `width` positions: each half twice, fp32 [width, head dim]."""
        inputs: dict[str, Array] = {}
        for kind, table in self._rotary.items():
            for part, values in zip(("cos", "sin"), table.rows(position, width), strict=True):
                inputs[f"{part}_{kind}"] = np.concatenate([values, values], axis=1)
        return inputs

    def _mask(self, visible: NDArray[np.bool_]) -> Float32:
        """The additive mask, fp32: 0 for what is visible."""
        return np.where(visible, np.float32(0), np.float32(self.config.masked_value))

    def embedding_row(self, token: int) -> Float32:
        """The scaled embedding of a token, fp32 [hidden size]."""
        row: Float32 = self._embedding.rows([token])[0]
        return row

    def drafter_rung(self, position: int) -> int:
        """The smallest rung with a drafter that holds `position` tokens; the largest there is if none does."""
        rungs = self.drafter.rungs
        return rungs[min(bisect_left(rungs, position), len(rungs) - 1)]

    def drafter_inputs(self, slots: SlotTable, position: int, rung: int) -> dict[str, Array]:
        """RoPE and masks of a drafter's round after `position` committed tokens, vectors; the same for all its calls."""
        as_published = self.mode.drafting == "as-published"
        rotary = self.rotary_inputs(position - 1 if as_published else position, 1)
        if as_published:
            seen = np.arange(self.geometry.capacity) <= position - 1
            seen |= position - 1 >= self.geometry.capacity
        else:
            seen = (slots.sliding >= 0) & (slots.sliding >= position - self.geometry.window)
        return {
            **{name: values[0] for name, values in rotary.items()},
            "mask_s": self._mask(seen),
            "mask_f": self._mask(np.arange(rung) <= position - 1),
        }

    def close(self) -> None:
        self.drafter.close()
        super().close()

    def logits(self, hidden: Float32) -> NDArray[np.int32]:
        """The most likely token after each row, int32 [n]: the head gives no more."""
        widths = self.manifest.head_widths
        tokens: list[NDArray[np.int32]] = []
        for start in range(0, len(hidden), widths[-1]):
            part = hidden[start : start + widths[-1]]
            width = widths[bisect_left(widths, len(part))]
            padded = np.concatenate([part, np.repeat(part[-1:], width - len(part), axis=0)])
            found = self._head.function(self._head_function).run({"hidden": np.ascontiguousarray(padded)})["token"]
            tokens.append(self._checked_tokens(found, width)[: len(part)])
        return np.concatenate(tokens)

    def _checked_tokens(self, found: Array, width: int) -> NDArray[np.int32]:
        ids: NDArray[np.int32] = np.rint(found).astype(np.int32).reshape(-1)
        if len(ids) != width or ids.min() < 0 or ids.max() >= self.manifest.vocabulary_size:
            raise PackageError(
                f"The head {self.manifest.head_package} gave {found.shape} for {width} rows, or ids outside of the "
                "vocabulary. Download the bundle again."
            )
        return ids


def _check_agreement(config: PublishedConfig, manifest: Manifest, bundle_path: Path) -> None:
    """Raise BundleError if the configuration is not the one that the bundle was installed with."""
    read = {
        "hidden size": (config.hidden_size, manifest.hidden_size),
        "vocabulary": (config.vocabulary_size, manifest.vocabulary_size),
        "layers": (config.layer_types, manifest.layer_types),
        "window": (config.window, manifest.sliding_window),
        "ring": (config.ring_length, manifest.ring_capacity),
        "contexts": (tuple(window for window, _ in config.functions), manifest.rungs),
        "head dimensions": (
            (config.head_dim_sliding, config.head_dim_full),
            (manifest.head_dim_sliding, manifest.head_dim_full),
        ),
    }
    for what, (now, then) in read.items():
        if now != then:
            raise BundleError(
                f"{bundle_path / config.file} was changed since the bundle was installed ({what}: {now} instead of {then}). "
                "Install the bundle again."
            )


def _one_hot(columns: NDArray[np.int64], height: int, width: int) -> Float32:
    """fp32 [height, width] with a 1 in row r at columns[r]; rows beyond them are zero."""
    matrix = np.zeros((height, width), np.float32)
    matrix[np.arange(len(columns)), columns] = 1
    return matrix


def _only_function(names: Sequence[str], package: str) -> str:
    """The function of a package that should have one, or is called "main"."""
    if len(names) == 1:
        return names[0]
    if "main" in names:
        return "main"
    raise PackageError(f"{package} has the functions {', '.join(names)}, but one was expected. Download the bundle again.")
