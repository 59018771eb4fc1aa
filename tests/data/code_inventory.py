"""A small inventory of parts: adding, removing and counting them."""

from dataclasses import dataclass, field


@dataclass
class Part:
    """A part that the workshop keeps on a shelf."""

    name: str
    shelf: str
    quantity: int = 0
    minimum: int = 5


@dataclass
class Inventory:
    """All parts of the workshop by name."""

    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, name: str, shelf: str, quantity: int) -> Part:
        """Add a quantity of a part; a part that is new gets a shelf."""
        if quantity <= 0:
            raise ValueError(f"quantity must be positive, not {quantity}")
        part = self.parts.get(name)
        if part is None:
            part = Part(name, shelf)
            self.parts[name] = part
        part.quantity += quantity
        return part

    def remove(self, name: str, quantity: int) -> Part:
        """Take a quantity of a part from its shelf."""
        if quantity <= 0:
            raise ValueError(f"quantity must be positive, not {quantity}")
        part = self.parts.get(name)
        if part is None:
            raise KeyError(f"there is no part called {name}")
        if part.quantity < quantity:
            raise ValueError(f"only {part.quantity} of {name} are left")
        part.quantity -= quantity
        return part

    def to_order(self) -> list[Part]:
        """Parts of which fewer are left than the minimum, fewest first."""
        short = [part for part in self.parts.values() if part.quantity < part.minimum]
        return sorted(short, key=lambda part: part.quantity)

    def total(self) -> int:
        """How many parts there are in all."""
        return sum(part.quantity for part in self.parts.values())
