"""The model options of the llm plugin."""

from __future__ import annotations

from typing import Literal

import llm
from pydantic import Field

from llm_gemma_coreml.settings import GenerationSettings


class GemmaOptions(GenerationSettings, llm.Options):
    """Options of every model; None means the bundle's own default."""


class ThinkingOptions(GemmaOptions):
    """Options of models that can think before they answer."""

    thinking: bool | None = Field(
        description="on: the model thinks before it answers; off (default): it answers at once", default=None
    )


class PublishedOptions(ThinkingOptions):
    """Options of bundles in the published layout."""

    ring: Literal["exact", "as-published"] | None = Field(
        description="exact (default): every token sees its whole window; as-published: as the bundle's author runs it, faster "
        "beyond the window, and not what the model computes",
        default=None,
    )
    drafting: Literal["transformers", "as-published"] | None = Field(
        description="How the bundle's drafter is driven: as transformers does (default), or as its author does; never changes "
        "the text",
        default=None,
    )
