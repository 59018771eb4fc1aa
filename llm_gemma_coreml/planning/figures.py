"""A number that says where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Basis = Literal["computed", "measured", "published"]
MARKS: dict[Basis, str] = {"computed": "c", "measured": "m", "published": "p"}


@dataclass(frozen=True)
class Figure:
    """A value in `unit`. source: who published it, how it was measured, or what it was computed from."""

    value: float
    unit: str
    basis: Basis
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"value": round(self.value, 4), "unit": self.unit, "basis": self.basis, "source": self.source}
        return {name: value for name, value in facts.items() if value != ""}


def computed(value: float, unit: str, source: str = "") -> Figure:
    """A figure of our own model."""
    return Figure(value, unit, "computed", source)


def published(value: float, unit: str, source: str) -> Figure:
    """A figure that somebody else gives."""
    return Figure(value, unit, "published", source)
