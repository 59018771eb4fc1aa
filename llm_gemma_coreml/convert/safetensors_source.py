"""Gemma weights, configuration and tokenizer out of a Hugging Face checkpoint directory."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.convert.checkpoint_config import read_config
from llm_gemma_coreml.convert.checkpoint_facts import read_chat_template, read_json, read_text, read_tokenizer_facts
from llm_gemma_coreml.convert.quantise import Quantised, exact_int4
from llm_gemma_coreml.convert.source import (
    Float32,
    ModelConfig,
    check_config,
    check_finite,
    check_tensors,
    expected_shapes,
    row_chunks,
)
from llm_gemma_coreml.errors import MissingDependencyError, SourceError

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_vision|embed_audio|vision_embedder)\."
)
# The head is tied to the embedding; some checkpoints store it a second time.
_HEAD = re.compile(r"(language_model\.)?lm_head\.weight")
_OUTER_NAMES = {"embed_tokens.weight": "embedding", "norm.weight": "final_norm"}
_LAYER_NAMES = {
    **{f"self_attn.{name}_proj.weight": name for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": name for name in ("gate", "up", "down")},
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_feedforward_norm",
    "post_feedforward_layernorm.weight": "post_feedforward_norm",
    "layer_scalar": "layer_scalar",
}
_LAYER_TENSOR = re.compile(r"layers\.(\d{1,4})\.(.+)")
_DTYPES = ("F32", "F16", "BF16")
_MAX_JSON = 256 << 20


@dataclass(frozen=True)
class _Place:
    file: Any
    key: str
    shape: tuple[int, ...]
    dtype: str


class SafetensorsSource:
    """A directory with `config.json` and one or more `.safetensors` files as a `Source`."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        document = self._open(path)
        self._trim_vocabulary()
        self.chat_template = read_chat_template(path, self.config.family, self._pieces)
        self.tokenizer_facts = read_tokenizer_facts(path, document, self._pieces, self.config.vocabulary_size)

    def _open(self, path: Path) -> dict[str, Any]:
        """Find the tensors and check them against the configuration; returns the parsed `config.json`."""
        self.path = path
        self._open_files = ExitStack()
        places, unknown = self._find_tensors()
        if "embedding" not in places:
            raise SourceError(f"{path}: tensor embed_tokens.weight is missing. Is the download complete?")
        config_path = path / "config.json"
        document = read_json(config_path)
        self.config = self._read_config(config_path, document, places["embedding"].dtype)
        self._tokenizer: bytes | None = None
        check_config(path, self.config)
        check_tensors(path, self.config, {name: place.shape for name, place in places.items()}, unknown)
        for name, place in places.items():
            if place.dtype not in _DTYPES:
                raise SourceError(
                    f"{path}: tensor {name} is stored as {place.dtype}; {', '.join(_DTYPES)} are supported. "
                    "Use the unquantised checkpoint."
                )
        self._places = places
        return document

    def _read_config(self, path: Path, document: dict[str, Any], embedding_dtype: str) -> ModelConfig:
        return read_config(path, document, self.path.name, embedding_dtype)

    @cached_property
    def description(self) -> str:
        if self.path.parent.name == "snapshots":
            repository = self.path.parent.parent.name.removeprefix("models--").replace("--", "/")
            return f"{repository} (revision {self.path.name})"
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in sorted(self.path.glob("*.safetensors")):
            with file.open("rb") as stream:
                size = min(int.from_bytes(stream.read(8), "little"), _MAX_JSON)
                digest.update(f"{file.name} {file.stat().st_size} ".encode() + stream.read(size))
        return f"{self.path.name} (sha256 of configuration and tensor tables {digest.hexdigest()})"

    def tensor(self, name: str) -> Float32:
        shape = expected_shapes(self.config)[name]
        if len(shape) == 1:
            values = self._read(name, slice(None))
            return values + 1 if self.config.norm_adds_one else values
        whole = np.empty(shape, np.float32)
        for start, stop in row_chunks(*shape):
            whole[start:stop] = self.rows(name, start, stop)
        return whole

    def rows(self, name: str, start: int, stop: int) -> Float32:
        return self._read(name, slice(start, stop))

    def blocks(self, name: str, bits: int) -> Quantised | None:
        """Blocks of a q4_0 quantisation-aware checkpoint, whose weights lie on the int4 grid already."""
        shape = expected_shapes(self.config)[name]
        if bits != 4 or len(shape) != 2:
            return None
        values = np.empty(shape, np.int8)
        scales = np.empty((shape[0], shape[1] // 32), np.float16)
        for start, stop in row_chunks(*shape, bytes_per_value=32):
            part = exact_int4(self.rows(name, start, stop), self._places[name].dtype)
            if part is None:
                return None
            values[start:stop], scales[start:stop] = part.values, part.scales
        return Quantised(values, scales, 4)

    def tokenizer_model(self) -> bytes:
        from llm_gemma_coreml.convert import tokenizer

        if self._tokenizer is None:
            model, document = self.path / "tokenizer.model", self.path / "tokenizer.json"
            # tokenizer.json comes first: tokens that a fine-tuner added are only there.
            if document.exists():
                self._tokenizer = tokenizer.from_tokenizer_json(read_text(document), str(document))
            elif model.exists():
                self._tokenizer = tokenizer.from_sentencepiece(model.read_bytes(), str(model))
            else:
                raise SourceError(
                    f"{self.path}: neither tokenizer.model nor tokenizer.json. Add one of them."
                )
        return self._tokenizer

    def close(self) -> None:
        self._open_files.close()

    def _find_tensors(self) -> tuple[dict[str, _Place], list[str]]:
        try:
            import ml_dtypes  # noqa: F401 - makes NumPy know bfloat16
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise MissingDependencyError(
                "Reading checkpoints needs safetensors and ml_dtypes: pip install 'llm-gemma-coreml[convert]'"
            ) from error
        places: dict[str, _Place] = {}
        unknown: list[str] = []
        for file_path in self._files():
            try:
                file = self._open_files.enter_context(safe_open(file_path, "np"))
                keys = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise SourceError(f"{file_path}: damaged or incomplete ({error}). Fetch it again.") from error
            for key in keys:
                name = self._canonical_name(key)
                if name is None:
                    unknown.append(key)
                elif name:
                    if name in places:
                        raise SourceError(f"{file_path}: tensor {key} is given twice in {self.path}.")
                    part = file.get_slice(key)
                    places[name] = _Place(file, key, tuple(part.get_shape()), part.get_dtype())
        return places, unknown

    @staticmethod
    def _canonical_name(key: str) -> str | None:
        """Canonical name of a tensor; "" for one of a part that is not converted, None if it is unknown."""
        return _canonical_name(key)

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise SourceError(
                    f"{self.path}: no .safetensors file. Give a Hugging Face checkpoint directory."
                )
            return files
        document = read_json(index)
        weight_map = document.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise SourceError(f"{index}: weight_map is missing.")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise SourceError(f"{index}: {name!r} is not the name of a .safetensors file beside it.")
            if not (self.path / name).exists():
                raise SourceError(
                    f"{self.path / name}: missing, though {index.name} names it. Fetch it again."
                )
        return [self.path / name for name in names]

    def _read(self, name: str, rows: slice) -> Float32:
        place = self._places[name]
        raw = place.file.get_slice(place.key)[rows]
        # Going through the bits is several times as fast as the cast of bfloat16.
        values: Float32 = (
            (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            if place.dtype == "BF16"
            else raw.astype(np.float32)
        )
        check_finite(self.path, name, values)
        return values

    def _trim_vocabulary(self) -> None:
        """Leave out embedding rows that no piece of the tokenizer names (padding, image placeholders)."""
        if not self._has_tokenizer():
            return  # reported when the tokenizer is asked for
        pieces = len(self._pieces)
        if pieces > self.config.vocabulary_size:
            raise SourceError(
                f"{self.path}: the tokenizer has {pieces} pieces, the embedding "
                f"{self.config.vocabulary_size} rows. "
                "They belong to different models."
            )
        self.config = replace(self.config, vocabulary_size=pieces)

    @cached_property
    def _pieces(self) -> dict[str, int]:
        """Id of each piece of the tokenizer; empty if there is none, which is reported when it is asked for."""
        from llm_gemma_coreml.convert.tokenizer import piece_ids

        return piece_ids(self.tokenizer_model()) if self._has_tokenizer() else {}

    def _has_tokenizer(self) -> bool:
        return any((self.path / name).exists() for name in ("tokenizer.model", "tokenizer.json"))


def _canonical_name(key: str) -> str | None:
    """Canonical name of a tensor; "" for one of a part that is not converted, None if it is unknown."""
    if _OTHER_PARTS.match(key) or _HEAD.fullmatch(key):
        return ""
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            key = key.removeprefix(prefix)
            break
    if key in _OUTER_NAMES:
        return _OUTER_NAMES[key]
    match = _LAYER_TENSOR.fullmatch(key)
    if match is None or match.group(2) not in _LAYER_NAMES:
        return None
    return f"layers.{int(match.group(1))}.{_LAYER_NAMES[match.group(2)]}"
