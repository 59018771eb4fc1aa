"""The checkpoint of an assistant (drafter), checked against the model that it is to draft for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_gemma_coreml.convert.checkpoint_config import read_assistant_config
from llm_gemma_coreml.convert.safetensors_source import SafetensorsSource
from llm_gemma_coreml.convert.source import FULL, SLIDING, ModelConfig, TokenizerFacts
from llm_gemma_coreml.errors import SourceError

_PROJECTIONS = {f"{name}.weight": name for name in ("pre_projection", "post_projection")}
_SHARED_SETTINGS = {
    "kv_heads_sliding": "key/value heads of sliding layers",
    "kv_heads_full": "key/value heads of full layers",
    "head_dim_sliding": "head dimension of sliding layers",
    "head_dim_full": "head dimension of full layers",
    "sliding_window": "sliding window",
    "rope_theta_sliding": "RoPE theta of sliding layers",
    "rope_theta_full": "RoPE theta of full layers",
    "rope_scaling_full": "RoPE scaling of full layers",
    "live_frequencies_full": "RoPE frequencies of full layers",
}


class AssistantSource(SafetensorsSource):
    """A directory with an assistant's `config.json` and tensors as a `Source`. It has no tokenizer of its own."""

    def __init__(self, path: Path, target: ModelConfig) -> None:
        """Raises SourceError for what is no assistant, is not supported, or was made for another model than `target`."""
        self._open(path)
        check_fits(path, self.config, target)
        # Rows beyond the target's vocabulary (padding) could only propose what the target never says.
        self.config = replace(self.config, vocabulary_size=target.vocabulary_size)
        self.chat_template = None
        self.tokenizer_facts = TokenizerFacts(bos_id=2, stop_ids=())

    def _read_config(self, path: Path, document: dict[str, Any], embedding_dtype: str) -> ModelConfig:
        return read_assistant_config(path, document, self.path.name, embedding_dtype)

    @staticmethod
    def _canonical_name(key: str) -> str | None:
        return _PROJECTIONS.get(key) or SafetensorsSource._canonical_name(key)


def check_fits(path: Path, assistant: ModelConfig, target: ModelConfig) -> None:
    """Raise SourceError, with what disagrees, if `assistant` (of the checkpoint at `path`) is not one of `target`."""

    def refuse(what: str, own: object, wanted: object) -> None:
        raise SourceError(
            f"{path}: this drafter was made for another model than {target.name}: its {what} is {own}, the model's "
            f"{wanted}. Give the assistant of the model that is converted."
        )

    if assistant.family != target.family:
        refuse("family", assistant.family, target.family)
    if assistant.backbone_hidden_size != target.hidden_size:
        refuse("backbone_hidden_size", assistant.backbone_hidden_size, target.hidden_size)
    if assistant.vocabulary_size < target.vocabulary_size:
        refuse("vocabulary", assistant.vocabulary_size, target.vocabulary_size)
    for field, what in _SHARED_SETTINGS.items():
        own, wanted = getattr(assistant, field), getattr(target, field)
        if own != wanted:
            refuse(what, own, wanted)
    for kind in (SLIDING, FULL):
        if kind not in assistant.layer_types or kind not in target.layer_types:
            raise SourceError(f"{path}: a drafter and its model need layers of both kinds; one of them has no {kind} layer.")
