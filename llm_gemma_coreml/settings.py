"""What can be set for one generation, checked; and its translation into what the engine understands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, field_validator

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.request import SamplingParameters, Speculate


class GenerationSettings(BaseModel):
    """Settings of every model; None means the bundle's own default. llm's options and LangChain's fields alike."""

    temperature: float | None = Field(
        description="Randomness of the output: 0 always takes the most likely token; default from the bundle",
        ge=0,
        le=10,
        default=None,
    )
    top_k: int | None = Field(
        description="Draw only from this many of the most likely tokens; default from the bundle", ge=1, default=None
    )
    top_p: float | None = Field(
        description="Draw only from the most likely tokens that together have this probability; default from the bundle",
        gt=0,
        le=1,
        default=None,
    )
    min_p: float | None = Field(
        description="Leave out tokens less likely than this fraction of the most likely one",
        ge=0,
        le=1,
        default=None,
    )
    repetition_penalty: float | None = Field(
        description="Above 1: tokens that occurred already become less likely", gt=0, le=10, default=None
    )
    seed: int | None = Field(
        description="The same seed gives the same text; without one each answer is drawn anew",
        ge=0,
        lt=2**63,
        default=None,
    )
    max_tokens: int | None = Field(
        description="End the output after this many tokens; base models, which do not know when to end: 1024", ge=1, default=None
    )
    stop: str | list[str] | None = Field(description="End the output before this text; several as a JSON list", default=None)
    context: int | None = Field(
        description="Hold at most this many tokens, to cap the memory; default: all that the bundle offers",
        ge=1,
        default=None,
    )
    speculate: str | int | None = Field(
        description="Speculative decoding: auto, off or how many tokens to draft; never changes the text",
        default=None,
    )

    @field_validator("stop")
    @classmethod
    def _stop_is_texts(cls, value: str | list[str] | None) -> list[str] | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = _json_list_or_text(value)
        if not value or not all(value):
            raise ValueError("stop must not be empty")
        return value

    @field_validator("speculate")
    @classmethod
    def _speculate_is_known(cls, value: str | int | None) -> str | int | None:
        if value is None or value in ("auto", "off"):
            return value
        text = str(value)
        if text.isascii() and text.isdigit() and len(text) <= 3:
            return int(text)
        raise ValueError("speculate must be auto, off or a number of tokens from 0 to 999")


def _json_list_or_text(value: str) -> list[str]:
    """`["a", "b"]` is a list of two texts; everything else is one text."""
    if value.startswith("["):
        try:
            parsed = json.loads(value)
        except ValueError:
            return [value]
        if isinstance(parsed, list) and all(isinstance(item, str) for item in parsed):
            return parsed
    return [value]


def sampling_parameters(settings: GenerationSettings, defaults: Mapping[str, float]) -> SamplingParameters:
    """The settings, completed by the bundle's `sampling_defaults` (temperature, top_k, top_p).

    `temperature` 0 leaves the other defaults out: they mean nothing to a greedy choice. Without a seed a
    fresh one is drawn, so that answers differ from run to run.
    """
    import secrets

    from llm_gemma_coreml.engine.request import SamplingParameters

    temperature = settings.temperature
    if temperature is None:
        temperature = float(defaults.get("temperature", 0.0))
    if temperature == 0:
        return SamplingParameters(temperature=0.0, repetition_penalty=settings.repetition_penalty, seed=settings.seed)
    top_k = settings.top_k if settings.top_k is not None else defaults.get("top_k")
    top_p = settings.top_p if settings.top_p is not None else defaults.get("top_p")
    return SamplingParameters(
        temperature=temperature,
        top_k=None if top_k is None else int(top_k),
        top_p=top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        seed=secrets.randbits(31) if settings.seed is None else settings.seed,
    )


def speculation(settings: GenerationSettings) -> Speculate:
    """ "auto" (default), "off" or the number of tokens to draft; 0 is off."""
    value = settings.speculate
    if value is None or value == "auto":
        return "auto"
    if value == "off" or value == 0:
        return "off"
    return int(value)
