"""What one call of the model reads, and how long that takes at least and about."""

from __future__ import annotations

from dataclasses import dataclass

from llm_gemma_coreml.planning.devices import Device
from llm_gemma_coreml.planning.shapes import CacheKind, ModelShape

ONE_HOT_PASSES = 8
"""Times that a row write by one-hot products goes over the whole K/V of a layer: K times (1 - sum) reads and writes it,
the outer product writes it, the sum reads two and writes one, the state is read and written back."""
_VERIFY_ROWS_MEASURED = 4


@dataclass(frozen=True)
class StepBytes:
    """Bytes that a call moves, by part."""

    body: float
    head: float
    ring: float
    full: float

    @property
    def total(self) -> float:
        return self.body + self.head + self.ring + self.full


def passes(shape: ModelShape, kind: CacheKind) -> float:
    """How many times a call goes over the K/V of these layers.

    Our layout writes the new rows where they belong and multiplies the query heads of a group together: K/V is read once.
    The published one writes by one-hot products over all slots, and repeats K/V for each query head (read once, written
    and read `group` times).
    """
    if shape.layout == "ladder":
        return 1
    return ONE_HOT_PASSES + 1 + 2 * kind.group


def bytes_once(shape: ModelShape, rung: int) -> StepBytes:
    """What a call must read at least: all weights and the K/V of the rung, once."""
    ring = shape.ring * shape.sliding.bytes_per_slot
    return StepBytes(shape.body_bytes, shape.head_bytes, ring, rung * shape.full.bytes_per_slot)


def bytes_moved(shape: ModelShape, rung: int) -> StepBytes:
    """What a call moves in the way that its layout computes."""
    once = bytes_once(shape, rung)
    return StepBytes(once.body, once.head, once.ring * passes(shape, shape.sliding), once.full * passes(shape, shape.full))


def floor_milliseconds(shape: ModelShape, device: Device, rung: int) -> float:
    """No call can be faster: everything is read once, at the full bandwidth."""
    return bytes_once(shape, rung).total / device.bandwidth.value / 1e6


def is_load_bound(shape: ModelShape, device: Device, rung: int) -> bool:
    """Whether the model does not fit the device's memory, so that weights are read from flash for each call."""
    return device.flash is not None and shape.memory_bytes(rung) > device.usable_memory


def call_milliseconds(shape: ModelShape, device: Device, rung: int, rows: int = 1) -> float:
    """About how long a call of `rows` rows takes.

    Bytes at the efficiency that decoders reach, the device's surcharge for more rows on the weight products, a start of
    each package; and the time to load the weights, if they do not stay in memory.
    """
    moved = bytes_moved(shape, rung)
    surcharge = (device.verify_ratio.value - 1) / (_VERIFY_ROWS_MEASURED - 1) * (rows - 1)
    weights = (moved.body + moved.head) * (1 + surcharge)
    reached = device.bandwidth.value * device.efficiency.value * 1e6
    computing = (weights + moved.ring + moved.full) / reached + shape.packages * device.dispatch.value
    return computing + (load_milliseconds(shape, device) if is_load_bound(shape, device, rung) else 0)


def load_milliseconds(shape: ModelShape, device: Device) -> float:
    """How long reading all weights from flash takes; 0 if the device's flash is not known."""
    return 0.0 if device.flash is None else shape.weight_bytes / device.flash.value / 1e6


def draft_milliseconds(shape: ModelShape, device: Device, rung: int) -> float:
    """About how long one call of the assistant model takes: its weights, and the K/V of two layers of the target."""
    if shape.drafter_bytes is None:
        return 0.0
    kinds = ((shape.sliding, shape.ring), (shape.full, rung))
    cache = sum(slots * kind.bytes_per_slot / max(1, kind.layers) for kind, slots in kinds)
    reached = device.bandwidth.value * device.efficiency.value * 1e6
    return (shape.drafter_bytes + cache) / reached + device.dispatch.value
