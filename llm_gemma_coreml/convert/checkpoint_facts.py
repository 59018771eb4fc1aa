"""What a Hugging Face checkpoint directory says beside its weights: stop ids, sampling defaults, chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from llm_gemma_coreml.convert.source import TokenizerFacts
from llm_gemma_coreml.errors import SourceError

_MAX_JSON = 256 << 20
_SAMPLING_LIMITS = {"temperature": 100, "top_k": 1 << 24, "top_p": 1}
_TURN_END, _CALL_END = "<turn|>", "<|tool_response>"


def read_tokenizer_facts(
    path: Path, config: Mapping[str, Any], pieces: Mapping[str, int], vocabulary_size: int
) -> TokenizerFacts:
    """Facts of the checkpoint directory `path`.

    config: its config.json. pieces: id of each piece of its tokenizer. Ids that the vocabulary does not have (of
    pictures and sounds) are left out. Raises SourceError for values that cannot be.
    """
    file, generation = _generation_config(path)
    stops = set(_ids(file, generation.get("eos_token_id"))) | {1}
    for document in (config, config.get("text_config") or {}):
        stops |= set(_ids(path / "config.json", document.get("eos_token_id")))
    # A turn and a call of Gemma 4 end with these; not every configuration lists them.
    stops |= {pieces[name] for name in (_TURN_END, _CALL_END) if name in pieces}
    bos = _ids(file, generation.get("bos_token_id") or config.get("bos_token_id") or 2)

    def known(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({number for number in ids if number < vocabulary_size}))

    return TokenizerFacts(
        bos_id=bos[0],
        stop_ids=known(stops),
        suppressed_ids=known(_ids(file, generation.get("suppress_tokens"))),
        sampling_defaults=_sampling_defaults(file, generation),
    )


def read_chat_template(path: Path, family: str, pieces: Mapping[str, int]) -> str | None:
    """The checkpoint's Jinja template; for an instruction-tuned Gemma 4 that has none, the built-in one.

    None for a base model, which ends texts and not turns.
    """
    own = _own_chat_template(path)
    if own is not None or family != "gemma4":
        return own
    file, generation = _generation_config(path)
    if pieces.get(_TURN_END) not in _ids(file, generation.get("eos_token_id")):
        return None
    return resources.files("llm_gemma_coreml.chat").joinpath("templates", "gemma4.jinja").read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """The text of a file of the checkpoint. Raises SourceError if it cannot be read."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise SourceError(f"{path}: larger than {_MAX_JSON >> 20} MB; this is not the file it should be.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read ({error}).") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`. Raises SourceError if there is none."""
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not JSON ({error}).") from error
    if not isinstance(document, dict):
        raise SourceError(f"{path}: not a JSON object.")
    return document


def _generation_config(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "generation_config.json"
    return file, read_json(file) if file.exists() else {}


def _sampling_defaults(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """temperature, top_k and top_p that the checkpoint recommends; temperature 0 if it recommends not to sample."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults: dict[str, float] = {}
    for key, largest in _SAMPLING_LIMITS.items():
        value = generation.get(key)
        if value is None or (key == "top_k" and value == 0):  # transformers' way to say: all tokens
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= largest:
            raise SourceError(f"{path}: {key} is {str(value)[:40]}; it must be a number from 0 to {largest}.")
        defaults[key] = float(value)
    return defaults


def _ids(path: Path, value: Any) -> list[int]:
    """Token ids given as one number, a list, or not at all."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in values):
        raise SourceError(f"{path}: {str(value)[:60]} should be token ids.")
    return values


def _own_chat_template(path: Path) -> str | None:
    """The template from any of the three places where it may be."""
    if (path / "chat_template.jinja").exists():
        return read_text(path / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (path / name).exists():
            template = read_json(path / name).get("chat_template")
            if isinstance(template, list):
                named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
                template = named.get("default")
            if isinstance(template, str):
                return template
    return None
