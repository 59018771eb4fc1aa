"""Which bundle a model name means, and what it can do; nothing is opened here."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from langchain_core.language_models.model_profile import ModelProfile

from langchain_adapter.exceptions import ModelMissingError
from llm_gemma_coreml import catalog
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.store import find_bundle
from llm_gemma_coreml.errors import BundleError

MANIFEST = "bundle.json"


def locate(model: str) -> Path:
    """The folder of the bundle: a path to one, or a name or alias as `llm` knows it. Builds the quick start if need be.

    Raises ModelMissingError with the way to get the model, MissingDependencyError, BundleError.
    """
    folder = Path(model).expanduser()
    if (folder / MANIFEST).is_file():
        return folder
    for entry in catalog.models():
        if model in (entry.model_id, entry.model_id.removeprefix(catalog.MODEL_PREFIX), *entry.aliases):
            return entry.locate()
    try:
        return catalog.installed_bundle(model).path
    except BundleError as error:
        raise ModelMissingError(f"{error} A path to a bundle's folder can be given too.") from error


def find(model: str) -> Path | None:
    """The folder of the bundle if it is there already; nothing is built and nothing is raised."""
    folder = Path(model).expanduser()
    if (folder / MANIFEST).is_file():
        return folder
    plain = model.removeprefix(catalog.MODEL_PREFIX)
    plain = catalog.alias_meanings().get(plain, plain)
    return find_bundle(plain)


def weights_identity(model: str) -> str | None:
    """A digest of the bundle's manifest, which holds the checksums of weights, tokenizer and template."""
    folder = find(model)
    if folder is None:
        return None
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:32]
    except OSError:
        return None


def profile(model: str, context: int | None) -> ModelProfile | None:
    """What the model can do; None if its bundle is not there yet. context: the user's cap in tokens."""
    folder = find(model)
    if folder is None:
        return None
    manifest = load_manifest(folder)
    largest = max(manifest.rungs)
    tokens = largest if context is None else min(context, largest)
    constrained = find_spec("llguidance") is not None and manifest.head_output == "logits"
    return ModelProfile(
        name=manifest.name,
        open_weights=True,
        max_input_tokens=tokens,
        max_output_tokens=tokens,
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        image_tool_message=False,
        pdf_tool_message=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=manifest.template_kind == "gemma4",
        tool_calling=True,
        tool_choice=constrained,
        tool_call_streaming=True,
        structured_output=constrained,
        attachment=False,
        temperature=True,
    )
