"""Bundles whose head gives the most likely token and no logits: what cannot be asked of them, and the error that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_gemma_coreml.errors import RequestError

if TYPE_CHECKING:
    from llm_gemma_coreml.bundle.manifest import Manifest
    from llm_gemma_coreml.engine.request import GenerationRequest


def check_request(request: GenerationRequest, manifest: Manifest) -> None:
    """Raise RequestError if `request` needs logits and the bundle's head gives none."""
    sampling = request.sampling
    if sampling.temperature > 0 and sampling.top_k != 1:
        require_logits(manifest, f"drawing at temperature {sampling.temperature:g}", "temperature 0 (or none)")
    if sampling.repetition_penalty not in (None, 1.0):
        require_logits(manifest, "a repetition penalty", "no repetition_penalty")
    if request.constraint is not None:
        require_logits(manifest, "a grammar (JSON schema, forced tool call)", "no schema, and tools the model may choose")


def require_logits(manifest: Manifest, what: str, instead: str) -> None:
    """Raise RequestError that `what` needs logits, unless the bundle has them. `instead`: what to ask for."""
    if manifest.head_output == "logits":
        return
    raise RequestError(
        f"{manifest.name} gives only the most likely token, no logits, and {what} needs them. Use {instead}; or convert "
        "the checkpoint yourself (llm gemma-coreml convert), which makes a bundle with logits."
    )
