"""What a conversion reads: the model's configuration and its tensors, whatever file format they come in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.errors import SourceError

if TYPE_CHECKING:
    from llm_gemma_coreml.convert.quantise import Quantised

Float32 = NDArray[np.float32]

SUPPORTED_FAMILIES = ("gemma3", "gemma4")
SLIDING, FULL = "sliding", "full"
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
ATTENTION_NORMS = ("input_norm", "post_attention_norm")
"""Before and after the attention."""
FEEDFORWARD_NORMS = ("pre_feedforward_norm", "post_feedforward_norm")
LAYER_NORMS = (*ATTENTION_NORMS, *FEEDFORWARD_NORMS)
HEAD_NORMS = ("q_norm", "k_norm")
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class ModelConfig:
    """A Gemma text decoder. Sizes are counts of elements; contexts and windows are counts of tokens."""

    family: str
    """"gemma3" or "gemma4"."""
    name: str
    vocabulary_size: int
    """Rows of the embedding that stand for tokenizer pieces (padding rows are left out)."""
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    """"sliding" or "full" for each layer."""
    query_heads: int
    kv_heads_sliding: int
    kv_heads_full: int
    head_dim_sliding: int
    head_dim_full: int
    sliding_window: int
    """Tokens that a sliding layer sees, the query's own included."""
    rms_norm_epsilon: float
    rope_theta_sliding: float
    rope_theta_full: float
    rope_scaling_full: float
    """Divides the position in full layers (Gemma 3 4B and larger: 8.0)."""
    live_frequencies_full: int
    """Rotary frequencies of full layers that are not zero; half the head dimension, or less if partial."""
    query_scale: float
    """Factor on the attention scores."""
    final_softcap: float | None
    norm_adds_one: bool
    """Whether the checkpoint stores norm weights minus one. `Source.tensor` has already added it."""
    embedding_multiplier: float
    context_length: int
    licence: str
    licence_url: str
    value_norm: bool = False
    """Gemma 4: values are RMS-normalised, without a weight."""
    value_is_key_full: bool = False
    """Gemma 4: full layers have no `v`; the value is the raw key projection, normalised."""
    layer_scalar: bool = False
    """Gemma 4: tensors `layers.{i}.layer_scalar` (one number) multiply the layer's output."""
    backbone_hidden_size: int | None = None
    """Of an assistant: the hidden size of its target, whose K/V its layers attend to; they have none of their own."""

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def kv_heads(self, layer: int) -> int:
        return self.kv_heads_sliding if self.layer_types[layer] == SLIDING else self.kv_heads_full

    def head_dim(self, layer: int) -> int:
        return self.head_dim_sliding if self.layer_types[layer] == SLIDING else self.head_dim_full


@dataclass(frozen=True)
class TokenizerFacts:
    """What a bundle must know about the tokens, besides the SentencePiece model."""

    bos_id: int
    stop_ids: tuple[int, ...]
    """Every id that ends a reply, ascending."""
    suppressed_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """temperature, top_k, top_p where the checkpoint recommends them."""


class Source(Protocol):
    """An open checkpoint. Tensors are read one at a time and nothing is kept.

    Canonical names: "embedding" [vocabulary, hidden], "final_norm" [hidden] and, for each layer i,
    "layers.{i}.q|k|v|o|gate|up|down" [out, in] and "layers.{i}.input_norm|post_attention_norm|
    pre_feedforward_norm|post_feedforward_norm|q_norm|k_norm" (1-D); Gemma 4 adds "layers.{i}.layer_scalar"
    [1]; an assistant has "pre_projection", "post_projection" and no k, v and k_norm. The head is tied to the embedding.
    """

    config: ModelConfig
    path: Path
    tokenizer_facts: TokenizerFacts
    chat_template: str | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the bundle's users have to know besides; for `bundle.json`."""

    @property
    def description(self) -> str:
        """Where the weights came from, with a SHA-256 or a revision; for `bundle.json`."""

    def tensor(self, name: str) -> Float32:
        """The whole tensor, fp32, ready to multiply with. Raises SourceError for NaN or infinity."""

    def rows(self, name: str, start: int, stop: int) -> Float32:
        """Rows start .. stop - 1 of a 2-D tensor, fp32."""

    def blocks(self, name: str, bits: int) -> Quantised | None:
        """The tensor in blocks of 32, if the checkpoint already stores it on a grid that `bits` can hold.

        Bit-exact; None if the tensor has to be quantised from its fp32 values.
        """

    def tokenizer_model(self) -> bytes:
        """The SentencePiece model (serialised proto) that gives the tokens the model was trained on."""

    def close(self) -> None: ...


def open_source(path: str | Path) -> Source:
    """Open a GGUF file or a directory of safetensors. Raises SourceError if it cannot be used."""
    path = Path(path)
    if path.is_dir():
        from llm_gemma_coreml.convert.safetensors_source import SafetensorsSource

        return SafetensorsSource(path)
    if not path.exists():
        raise SourceError(
            f"{path}: no such file. Give a .gguf file or a directory that holds .safetensors files."
        )
    if path.suffix == ".safetensors":
        raise SourceError(
            f"{path}: give the directory that holds this file with its config.json, not the file."
        )
    from llm_gemma_coreml.convert.gguf_source import GGUFSource

    return GGUFSource(path)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of this configuration must have, by canonical name."""
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocabulary_size, hidden),
        "final_norm": (hidden,),
    }
    for layer, kind in enumerate(config.layer_types):
        dim = config.head_dim(layer)
        queries, keys = config.query_heads * dim, config.kv_heads(layer) * dim
        own: dict[str, tuple[int, ...]] = {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, queries),
            "gate": (wide, hidden),
            "up": (wide, hidden),
            "down": (hidden, wide),
            **dict.fromkeys(LAYER_NORMS, (hidden,)),
            **dict.fromkeys(HEAD_NORMS, (dim,)),
        }
        if kind == FULL and config.value_is_key_full:
            del own["v"]
        if config.backbone_hidden_size is not None:
            own = {name: size for name, size in own.items() if name not in ("k", "v", "k_norm")}
        if config.layer_scalar:
            own["layer_scalar"] = (1,)
        shapes.update({f"layers.{layer}.{name}": shape for name, shape in own.items()})
    if config.backbone_hidden_size is not None:
        shapes["pre_projection"] = (hidden, 2 * config.backbone_hidden_size)
        shapes["post_projection"] = (config.backbone_hidden_size, hidden)
    return shapes


def check_tensors(
    path: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]], unknown: list[str]
) -> None:
    """Raise SourceError naming the tensors that are missing, unknown or of another shape than configured.

    `found` maps canonical names to shapes; `unknown` holds the file's names that have no canonical name.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise SourceError(f"{path}: {_listed('tensor', missing)} missing. Is the download complete?")
    extra = unknown + [name for name in found if name not in expected]
    if extra:
        raise SourceError(
            f"{path}: {_listed('tensor', extra)} not part of a {config.family} text model with "
            f"{config.layers} layers. The configuration disagrees with the weights, or the model is unsupported."
        )
    for name, shape in expected.items():
        have = found[name]
        if name == "embedding" and have[1:] == shape[1:] and have[0] >= shape[0]:
            continue  # checkpoints may pad the vocabulary
        if have != shape:
            raise SourceError(
                f"{path}: tensor {name} has shape {list(have)}, the configuration asks for {list(shape)}."
            )


def check_config(path: Path, config: ModelConfig) -> None:
    """Raise SourceError for sizes that no Gemma has, before anything is allocated by them."""
    positive = (
        "vocabulary_size", "hidden_size", "intermediate_size", "query_heads", "kv_heads_sliding",
        "kv_heads_full", "head_dim_sliding", "head_dim_full", "sliding_window", "context_length",
    )  # fmt: skip
    for name in positive:
        if not 0 < getattr(config, name) <= 1 << 24:
            raise SourceError(f"{path}: {name} is {getattr(config, name)}, which no Gemma model has.")
    if not 0 < config.layers <= 1024:
        raise SourceError(f"{path}: {config.layers} layers, which no Gemma model has.")
    for name in (
        "rms_norm_epsilon",
        "rope_theta_sliding",
        "rope_theta_full",
        "rope_scaling_full",
        "query_scale",
    ):
        value = getattr(config, name)
        if not (np.isfinite(value) and value > 0):
            raise SourceError(f"{path}: {name} is {value}; it must be a positive number.")
    for kv_heads in (config.kv_heads_sliding, config.kv_heads_full):
        if config.query_heads % kv_heads:
            raise SourceError(
                f"{path}: {config.query_heads} query heads cannot share {kv_heads} key/value heads."
            )
    for head_dim in (config.head_dim_sliding, config.head_dim_full):
        if head_dim % 2:
            raise SourceError(f"{path}: the head dimension {head_dim} is odd: rotary embedding needs pairs.")
    mixed = {config.query_heads * config.head_dim(layer) for layer in range(config.layers)}
    for size in (config.hidden_size, config.intermediate_size, *mixed):
        if size % 32:
            raise SourceError(
                f"{path}: hidden size {config.hidden_size}, intermediate size {config.intermediate_size} and query heads "
                f"times head dimension ({', '.join(map(str, sorted(mixed)))}) must be multiples of 32 (the quantisation block)."
            )


def check_finite(path: Path, name: str, values: NDArray[np.floating]) -> None:
    """Raise SourceError if `values`, read from tensor `name`, holds a NaN or an infinity."""
    if not np.isfinite(values).all():
        raise SourceError(
            f"{path}: tensor {name} holds NaN or infinity. The file is damaged; fetch it again."
        )


def row_chunks(rows: int, columns: int, bytes_per_value: int = 4) -> Iterator[tuple[int, int]]:
    """Ranges of rows small enough (16 MB) to work on at a time."""
    step = max(1, _CHUNK_BYTES // (columns * bytes_per_value))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'}"
