"""The model options of the llm plugin."""

from __future__ import annotations

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
