"""Gemma weights, configuration and tokenizer out of a GGUF file."""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.convert.gguf_file import GGUFFile, GGUFTensor
from llm_gemma_coreml.convert.quantise import Quantised
from llm_gemma_coreml.convert.source import (
    FULL,
    SLIDING,
    Float32,
    ModelConfig,
    TokenizerFacts,
    check_config,
    check_finite,
    check_tensors,
    file_sha256,
    row_chunks,
)
from llm_gemma_coreml.errors import MissingDependencyError, SourceError

_OUTER_NAMES = {"token_embd.weight": "embedding", "output_norm.weight": "final_norm"}
_LAYER_NAMES = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "attn_norm": "input_norm",
    "post_attention_norm": "post_attention_norm",
    "ffn_norm": "pre_feedforward_norm",
    "post_ffw_norm": "post_feedforward_norm",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,4})\.(\w+)\.weight")
# Blocks of 32 with one fp16 scale in front and integers behind: a grid that `bits` hold exactly.
_GRID_BITS = {"Q4_0": 4, "Q5_0": 8, "Q8_0": 8, "IQ4_NL": 8}
_END_OF_TURN = ("<end_of_turn>", "<turn|>")
# What Google recommends for its instruction-tuned models; GGUF files seldom carry it.
_INSTRUCT_SAMPLING = {"temperature": 1.0, "top_k": 64.0, "top_p": 0.95}


class GGUFSource:
    """A GGUF file as a `Source`. All quantisation types that the gguf package dequantises are read."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, sha256: str | None = None, content: bytearray | None = None) -> None:
        """sha256: the file's, if it is known already. content: its bytes, if they are in memory already."""
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                "Reading GGUF files needs the gguf package: pip install 'llm-gemma-coreml[convert]'"
            ) from error
        self.path = path
        self._sha256 = sha256
        self._file = GGUFFile(path, content)
        metadata = _Metadata(path, self._file.metadata)
        unknown = []
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in self._file.tensors.items():
            canonical = _canonical_name(name)
            if canonical is None:
                unknown.append(name)
            else:
                self._tensors[canonical] = tensor
        self.config = _read_config(metadata, self._tensors)
        check_config(path, self.config)
        check_tensors(path, self.config, {name: each.shape for name, each in self._tensors.items()}, unknown)
        self._check_kinds()
        self.chat_template = metadata.optional_text("tokenizer.chat_template")
        self.tokenizer_facts = _tokenizer_facts(metadata, self.chat_template is not None)
        self._metadata = metadata

    @cached_property
    def description(self) -> str:
        return f"{self.path.name} (sha256 {self._sha256 or file_sha256(self.path)})"

    def tensor(self, name: str) -> Float32:
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            return self.rows(name, 0, 1).reshape(tensor.shape)
        rows, columns = self._shape(name)
        whole = np.empty((rows, columns), np.float32)
        for start, stop in row_chunks(rows, columns):
            whole[start:stop] = self.rows(name, start, stop)
        return whole

    def rows(self, name: str, start: int, stop: int) -> Float32:
        from gguf import dequantize

        tensor = self._tensors[name]
        # Broken blocks may overflow while they are decoded; check_finite reports them.
        with np.errstate(all="ignore"):
            values: Float32 = dequantize(self._file.data(tensor)[start:stop].copy(), tensor.kind)
        check_finite(self.path, name, values)
        return values

    def blocks(self, name: str, bits: int) -> Quantised | None:
        from gguf import dequantize

        tensor = self._tensors[name]
        if len(tensor.shape) != 2 or _GRID_BITS.get(tensor.kind.name, 99) > bits:
            return None
        rows, columns = self._shape(name)
        data = self._file.data(tensor)[:rows]
        count = columns // 32
        values = np.empty((rows, columns), np.int8)
        scales = np.empty((rows, count), np.float16)
        for start, stop in row_chunks(rows, columns):
            part = data[start:stop].reshape(stop - start, count, -1).copy()
            scales[start:stop] = part[:, :, :2].copy().view("<f2")[:, :, 0]
            # With every scale set to one, the gguf package decodes the integers themselves.
            part[:, :, :2] = np.array([1.0], "<f2").view(np.uint8)
            values[start:stop] = dequantize(part.reshape(stop - start, -1), tensor.kind)
        check_finite(self.path, name, scales)
        if bits == 8 and values.min() == -128:
            return None  # legal in the file, but outside of the symmetric range
        return Quantised(values, scales, bits)

    def tokenizer_model(self) -> bytes:
        from llm_gemma_coreml.convert import tokenizer

        kind = self._metadata.text("tokenizer.ggml.model")
        if kind not in ("llama", "gemma4"):
            raise SourceError(
                f"{self.path}: its tokenizer is of kind {kind!r}; Gemma's is 'llama' or 'gemma4'."
            )
        tokens = self._metadata.texts("tokenizer.ggml.tokens")[: self.config.vocabulary_size]
        limit = len(tokens)
        return tokenizer.from_gguf(
            tokens,
            self._metadata.numbers("tokenizer.ggml.scores")[:limit],
            [int(kind) for kind in self._metadata.numbers("tokenizer.ggml.token_type")[:limit]],
            str(self.path),
        )

    def close(self) -> None:
        self._file.close()

    def _shape(self, name: str) -> tuple[int, int]:
        rows, columns = self._tensors[name].shape
        return (min(rows, self.config.vocabulary_size) if name == "embedding" else rows), columns

    def _check_kinds(self) -> None:
        for name, tensor in self._tensors.items():
            if tensor.kind.name not in _readable_kinds():
                raise SourceError(
                    f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which cannot be read. "
                    "Use a file of another quantisation, such as Q8_0 or BF16."
                )


def _readable_kinds() -> frozenset[str]:
    from gguf import quants

    return frozenset({"F32", "F16"} | {kind.name for kind in quants._type_traits})


def _canonical_name(name: str) -> str | None:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match.group(2) not in _LAYER_NAMES:
        return None
    return f"layers.{int(match.group(1))}.{_LAYER_NAMES[match.group(2)]}"


class _Metadata:
    """Typed look-ups in a GGUF's metadata, with errors that name file and key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def _get(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self._values.get(key, default)
        if value is ...:
            raise SourceError(f"{self.path}: metadata {key!r} is missing; this is no complete Gemma GGUF.")
        if value is not default and (
            not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool))
        ):
            raise SourceError(
                f"{self.path}: metadata {key!r} is {str(value)[:40]!r}, not a {kinds[0].__name__}."
            )
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, (str,), ...))

    def optional_text(self, key: str) -> str | None:
        value = self._get(key, (str,), None)
        return None if value is None else str(value)

    def integer(self, key: str, default: Any = ...) -> int:
        return int(self._get(key, (int,), default))

    def number(self, key: str, default: Any = ...) -> float:
        return float(self._get(key, (float, int), default))

    def optional_number(self, key: str) -> float | None:
        value = self._get(key, (float, int), None)
        return None if value is None else float(value)

    def texts(self, key: str) -> list[str]:
        return self._list(key, (str,))

    def numbers(self, key: str) -> list[float]:
        return self._list(key, (float, int))

    def optional_integers(self, key: str) -> list[int]:
        return self._list(key, (int,)) if key in self._values else []

    def _list(self, key: str, kinds: tuple[type, ...]) -> list[Any]:
        values: list[Any] = self._get(key, (list,), ...)
        if not all(isinstance(value, kinds) for value in values):
            raise SourceError(f"{self.path}: metadata {key!r} must be a list of {kinds[0].__name__}.")
        return values


def _read_config(metadata: _Metadata, tensors: dict[str, GGUFTensor]) -> ModelConfig:
    architecture = metadata.text("general.architecture")
    if metadata.integer("split.count", 1) > 1:
        raise SourceError(
            f"{metadata.path}: part of a split GGUF. Join the parts first: llama-gguf-split --merge FIRST OUTPUT"
        )
    if architecture != "gemma3":
        raise SourceError(
            f"{metadata.path}: a model of family {architecture!r}. Supported GGUF families: gemma3 (text)."
        )
    if "embedding" not in tensors:
        raise SourceError(f"{metadata.path}: tensor token_embd.weight is missing. Is the download complete?")
    return _gemma3_config(metadata, tensors["embedding"].shape[0])


def _gemma3_config(metadata: _Metadata, embedding_rows: int) -> ModelConfig:
    layers = metadata.integer("gemma3.block_count")
    heads = metadata.integer("gemma3.attention.head_count")
    hidden = metadata.integer("gemma3.embedding_length")
    head_dim = metadata.integer("gemma3.attention.key_length", 256)
    if not (0 < layers <= 1024 and heads > 0 and hidden > 0 and head_dim > 0):
        raise SourceError(
            f"{metadata.path}: {layers} layers of {heads} heads and {hidden} values: no Gemma model."
        )
    tokens = len(metadata.texts("tokenizer.ggml.tokens"))
    if tokens > embedding_rows:
        raise SourceError(
            f"{metadata.path}: {tokens} tokens, but an embedding of only {embedding_rows} rows."
        )
    # Only the 27B model does not scale attention by its head dimension (llama.cpp tells it the same way).
    scalar = hidden / heads if layers == 62 else head_dim
    kv_heads = metadata.integer("gemma3.attention.head_count_kv")
    scaling_kind = metadata.optional_text("gemma3.rope.scaling.type")
    if scaling_kind not in (None, "none", "linear"):
        raise SourceError(f"{metadata.path}: RoPE scaling {scaling_kind!r} is not supported (linear is).")
    scaled = scaling_kind == "linear"
    return ModelConfig(
        family="gemma3",
        name=metadata.optional_text("general.name") or metadata.path.stem,
        vocabulary_size=tokens,
        hidden_size=hidden,
        intermediate_size=metadata.integer("gemma3.feed_forward_length"),
        layer_types=tuple(FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(layers)),
        query_heads=heads,
        kv_heads_sliding=kv_heads,
        kv_heads_full=kv_heads,
        head_dim_sliding=head_dim,
        head_dim_full=head_dim,
        sliding_window=metadata.integer("gemma3.attention.sliding_window"),
        # Stored as fp32; the checkpoint's own decimal number is what the model was trained with.
        rms_norm_epsilon=_shortest(metadata.number("gemma3.attention.layer_norm_rms_epsilon")),
        rope_theta_sliding=metadata.number("gemma3.rope.freq_base_swa", 10000.0),
        rope_theta_full=metadata.number("gemma3.rope.freq_base", 1e6),
        rope_scaling_full=metadata.number("gemma3.rope.scaling.factor", 1.0) if scaled else 1.0,
        live_frequencies_full=head_dim // 2,
        query_scale=1.0 / math.sqrt(scalar),
        final_softcap=metadata.optional_number("gemma3.final_logit_softcapping") or None,
        norm_adds_one=False,
        embedding_multiplier=float(np.float32(math.sqrt(hidden))),
        context_length=metadata.integer("gemma3.context_length"),
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
    )


def _shortest(value: float) -> float:
    """The decimal number that an fp32 value was written from: 9.999999974752427e-07 -> 1e-06."""
    return float(str(np.float32(value)))


def _tokenizer_facts(metadata: _Metadata, instruct: bool) -> TokenizerFacts:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    stops = {
        metadata.integer("tokenizer.ggml.eos_token_id", 1),
        *metadata.optional_integers("tokenizer.ggml.eot_token_ids"),
    }
    stops.add(metadata.integer("tokenizer.ggml.eot_token_id", min(stops)))
    stops |= {
        number for number, token in enumerate(tokens[:512]) if token == "<eos>" or token in _END_OF_TURN
    }
    bos = metadata.integer("tokenizer.ggml.bos_token_id", 2)
    for number in (bos, *stops):
        if not 0 <= number < len(tokens):
            raise SourceError(
                f"{metadata.path}: token id {number} is outside of the vocabulary ({len(tokens)})."
            )
    defaults = {
        name: metadata.optional_number(f"general.sampling.{key}")
        for name, key in (("temperature", "temp"), ("top_k", "top_k"), ("top_p", "top_p"))
    }
    given = {name: value for name, value in defaults.items() if value is not None}
    return TokenizerFacts(
        bos_id=bos,
        stop_ids=tuple(sorted(stops)),
        sampling_defaults=given or (_INSTRUCT_SAMPLING if instruct else {}),
    )
