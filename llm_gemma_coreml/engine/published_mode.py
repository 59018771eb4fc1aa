"""How a bundle in the published layout is run: its choices by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from llm_gemma_coreml.errors import RequestError

RingMode = Literal["exact", "as-published"]
DraftingForm = Literal["transformers", "as-published"]


@dataclass(frozen=True)
class PublishedMode:
    """The choices. Raises RequestError for unknown names."""

    ring: RingMode = "exact"
    """exact: every token sees its whole window, which past the ring's end means one row a call. as-published: as the
    bundle's author runs it, with blocks that lose the oldest tokens, and with rejected drafts that stay visible."""
    drafting: DraftingForm = "transformers"
    """How its drafter is driven: as transformers does (and as it was trained), or as the bundle's author does."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("ring", self.ring, get_args(RingMode)),
            ("drafting", self.drafting, get_args(DraftingForm)),
        ):
            if value not in known:
                raise RequestError(f"{name} is {value!r}, but must be {' or '.join(known)}.")
