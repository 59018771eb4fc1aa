"""Writes a tiny bundle in the published layout: chunks of two functions with host-made one-hots, masks and RoPE, an argmax head.

Built with coremltools' MIL builder from the random weights of a transformers model, which is given the very values that the
packages hold. Nothing of the project's own converter is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints as tiny
from coremltools.converters.mil.mil import get_new_symbol
from portable_programs import ct, mb, quiet, types

Weights = dict[str, np.ndarray]

LAYERS = "ssfssf"
CHUNKS = ((0, 3), (3, 6))
HIDDEN, WIDE, HEADS, KV_HEADS, FULL_KV_HEADS, HEAD_DIM, FULL_HEAD_DIM = 64, 96, 4, 2, 1, 32, 64
WINDOW, MOST_ROWS = 32, 16
FUNCTIONS = {"ctx32k": 64, "ctx128k": 256}
LONGEST = FUNCTIONS["ctx128k"]
MASKED = -10000.0
EPSILON = 1e-6
CONTROL_NAMES = (
    *("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)
VOCABULARY = tiny.VOCABULARY + 32
TURN_END = tiny.VOCABULARY + CONTROL_NAMES.index("<turn|>")
DRAFTERS = ("drafter_ring32k.mlmodelc", "drafter_ring.mlmodelc")


def settings(**changes: Any) -> dict[str, Any]:
    """config.json of the model."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    return {
        "model_type": "gemma4_unified_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_global_key_value_heads": FULL_KV_HEADS,
        "head_dim": HEAD_DIM,
        "global_head_dim": FULL_HEAD_DIM,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": WINDOW,
        "layer_types": [kinds[layer] for layer in LAYERS],
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
    } | changes


def model(seed: int = 5) -> Any:
    """transformers' model, fp32, whose weights are those that the bundle's packages hold: int4 body, int8 head, fp16 rest."""
    import torch
    from support.half_states import register_half_states

    made = tiny.random_transformers_model(settings(), seed)
    made.set_attn_implementation(register_half_states())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("embed_tokens.weight"):
                continue
            values = parameter.numpy()
            rounded = _Quantised.of(values, 4).dequantised() if values.ndim == 2 else values.astype(np.float16)
            parameter.copy_(torch.from_numpy(rounded.astype(np.float32)))
        for name, buffer in made.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(buffer.half().float())
    return made


def quantised_head(made: Any) -> np.ndarray:
    """The head's weights as the package holds them, fp32 [vocabulary, hidden]: the embedding in int8."""
    return _Quantised.of(made.get_input_embeddings().weight.detach().numpy(), 8).dequantised()


@dataclass
class Bundle:
    """A bundle on disk and the model that it was made from."""

    path: Path
    model: Any
    head: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.head = quantised_head(self.model)

    def hidden(self, ids: Sequence[int]) -> np.ndarray:
        """Rows after the final norm by transformers, fp32 [len(ids), hidden]."""
        import torch

        table = torch.from_numpy(embedding_table(self.model).astype(np.float32))
        with torch.no_grad():
            output = self.model(inputs_embeds=table[list(ids)][None], output_hidden_states=True)
        rows: np.ndarray = output.hidden_states[-1][0].numpy()
        return rows

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits without the softcap, which changes no argmax: fp32 [len(ids), vocabulary]."""
        return self.hidden(ids) @ self.head.T

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens by transformers, one by one."""
        tokens = list(ids)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(ids) :]


def embedding_table(made: Any) -> np.ndarray:
    """The embedding sidecar: fp16 rows with sqrt(hidden size) baked in."""
    table: np.ndarray = made.get_input_embeddings().weight.detach().numpy() * np.sqrt(HIDDEN)
    return table.astype(np.float16)


def write_published(folder: Path, made: Any | None = None, drafters: bool = True) -> Bundle:
    """Write all files of the published bundle into `folder`."""
    made = made or model()
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().numpy() for name, value in made.state_dict().items()}
    for first, end in CHUNKS:
        _write_chunk(folder / f"chunk_{first}_{end}.mlpackage", weights, range(first, end))
    _write_head(folder / "lmhead.mlpackage", made)
    embedding_table(made).astype("<f2").tofile(folder / "embed_fp16.bin")
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}\n')
    (folder / "LICENSE").write_text("Apache License 2.0\n")
    (folder / "manifest.json").write_text(json.dumps(manifest(), indent=2))
    (folder / "convert_config_ladder.json").write_text(json.dumps(config(), indent=1))
    for name in DRAFTERS if drafters else ():
        (folder / name).mkdir()
        (folder / name / "coremldata.bin").write_bytes(b"compiled elsewhere")
    return Bundle(folder, made)


def manifest() -> dict[str, Any]:
    """manifest.json."""
    return {
        "name": "Gemma 4 12B it (Core ML, 128k)",
        "architecture": "gemma4",
        "contextLength": LONGEST,
        "format": "coreml-stateful-chain-v2",
        "modelRelativePath": ".",
        "tokenizerRelativePath": ".",
        "promptPrefix": "<|turn>user\n",
        "promptSuffix": "<turn|>\n<|turn>model\n",
        "computeUnits": "cpuAndGPU",
    }


def config() -> dict[str, Any]:
    """convert_config_ladder.json."""
    return {
        "H": HIDDEN,
        "HD": HEAD_DIM,
        "GHD": FULL_HEAD_DIM,
        "NH": HEADS,
        "NKV": KV_HEADS,
        "NKV_FULL": FULL_KV_HEADS,
        "NLAYERS": len(LAYERS),
        "N_MAX": LONGEST,
        "WSLIDE": WINDOW,
        "SLIDING": WINDOW,
        "SOFTCAP": 30.0,
        "NEG": MASKED,
        "S_range": {"lower": 1, "upper": MOST_ROWS, "default": 1},
        "chunk_bounds": [list(bounds) for bounds in CHUNKS],
        "layer_types": [{"s": "sliding", "f": "full"}[layer] for layer in LAYERS],
        "chunks": [f"chunk_{first}_{end}.mlpackage" for first, end in CHUNKS],
        "lmhead": "lmhead.mlpackage",
        "hostio": {"inv_slide": inverse_frequencies("s"), "inv_full": inverse_frequencies("f")},
        "sidecars": {"embed": {"file": "embed_fp16.bin", "shape": [VOCABULARY, HIDDEN], "dtype": "float16"}},
        "eos_ids": [1, TURN_END],
        "kind": "multifunction_ctx_ladder",
        "functions": {name: {"full_window": window} for name, window in FUNCTIONS.items()},
        "default_function": "ctx32k",
        "state_shapes": {"for": "information"},
    }


def inverse_frequencies(kind: str) -> list[float]:
    """RoPE of sliding layers: base 1e4; of full ones: base 1e6, a quarter of the pairs alive."""
    if kind == "s":
        return [float(10000.0 ** (-2 * i / HEAD_DIM)) for i in range(HEAD_DIM // 2)]
    live = int(0.25 * FULL_HEAD_DIM / 2)
    return [float(1e6 ** (-2 * i / FULL_HEAD_DIM)) for i in range(live)] + [0.0] * (FULL_HEAD_DIM // 2 - live)


def tokenizer_json() -> str:
    """The tiny vocabulary with Gemma 4's control tokens behind it."""
    document = json.loads(tiny.tokenizer_json())
    names = [*CONTROL_NAMES, *(f"<unused{i}>" for i in range(900, 900 + 32 - len(CONTROL_NAMES)))]
    pattern = document["added_tokens"][0]
    for number, name in enumerate(names, tiny.VOCABULARY):
        document["added_tokens"].append({**pattern, "id": number, "content": name})
        document["model"]["vocab"][name] = number
    return json.dumps(document, ensure_ascii=False)


# The programs


@dataclass(frozen=True)
class _Quantised:
    """Values of a weight in blocks along its columns: int4 of 32 columns, int8 of a whole row."""

    values: np.ndarray
    scales: np.ndarray
    bits: int

    @classmethod
    def of(cls, weight: np.ndarray, bits: int) -> _Quantised:
        rows, columns = weight.shape
        block = 32 if bits == 4 else columns
        blocks = weight.reshape(rows, columns // block, block)
        largest = 2 ** (bits - 1) - 1
        scales = (np.abs(blocks).max(-1) / largest).astype(np.float16)
        values = np.rint(blocks / scales.astype(np.float32)[..., None]).clip(-largest, largest)
        return cls(values.astype(np.int8).reshape(rows, columns), scales, bits)

    def dequantised(self) -> np.ndarray:
        blocks = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        return (blocks * self.scales.astype(np.float32)[..., None]).reshape(self.values.shape)

    def emit(self, name: str) -> Any:
        data = self.values.view(types.np_int4_dtype) if self.bits == 4 else self.values
        return mb.constexpr_blockwise_shift_scale(data=data, scale=self.scales, name=name)


def _write_head(path: Path, made: Any) -> None:
    head = _Quantised.of(made.get_input_embeddings().weight.detach().numpy(), 8)
    rows = get_new_symbol()
    with function_of({"hidden": mb.placeholder(shape=(rows, HIDDEN), dtype=types.fp16)}) as function:
        logits = mb.linear(x=function.inputs["hidden"], weight=head.emit("head_weight"), name="logits")
        function.set_outputs([mb.reduce_argmax(x=logits, axis=-1, keep_dims=False, name="token")])
    save(path, {"main": function}, "main")


def _write_chunk(path: Path, weights: Mapping[str, np.ndarray], layers: range) -> None:
    functions = {}
    for name, window in FUNCTIONS.items():
        inputs = chunk_inputs(window, layers)
        with function_of(inputs) as function:
            function.set_outputs([Emitter(weights, function.inputs, window).emit(layers)])
        functions[name] = function
    save(path, functions, "ctx32k")


def chunk_inputs(window: int, layers: range) -> dict[str, Any]:
    """Inputs and states of a chunk's function over `window` slots of the full layers."""
    rows = get_new_symbol()

    def half(*shape: Any) -> Any:
        return mb.placeholder(shape=shape, dtype=types.fp16)

    inputs = {
        "hidden_in": half(rows, HIDDEN),
        "onehot_s": half(rows, WINDOW),
        "onehot_f": half(rows, window),
        "cos_s": half(rows, HEAD_DIM),
        "sin_s": half(rows, HEAD_DIM),
        "cos_f": half(rows, FULL_HEAD_DIM),
        "sin_f": half(rows, FULL_HEAD_DIM),
        "mask_s": half(rows, WINDOW),
        "mask_f": half(rows, window),
    }
    for layer in layers:
        sliding = LAYERS[layer] == "s"
        shape = (KV_HEADS, WINDOW, HEAD_DIM) if sliding else (FULL_KV_HEADS, LONGEST, FULL_HEAD_DIM)
        inputs |= {f"{part}_{layer}": mb.state_tensor_placeholder(shape=shape, dtype=types.fp16) for part in "kv"}
    return inputs


class Emitter:
    """Emits the layers of one function."""

    def __init__(self, weights: Mapping[str, np.ndarray], inputs: Mapping[str, Any], window: int) -> None:
        self.weights, self.inputs, self.window, self.kinds = weights, inputs, window, LAYERS

    def emit(self, layers: range) -> Any:
        hidden = self.inputs["hidden_in"]
        for layer in layers:
            hidden = self._layer(hidden, layer)
        if layers.stop == len(LAYERS):
            return self._norm(hidden, "model.norm.weight", "hidden")
        return mb.identity(x=hidden, name="hidden")

    def _layer(self, hidden: Any, layer: int) -> Any:
        prefix = f"model.layers.{layer}."
        attended = self._attention(self._norm(hidden, f"{prefix}input_layernorm.weight"), layer)
        hidden = mb.add(x=hidden, y=self._norm(attended, f"{prefix}post_attention_layernorm.weight"))
        normed = self._norm(hidden, f"{prefix}pre_feedforward_layernorm.weight")
        gate = mb.gelu(x=self._linear(normed, f"{prefix}mlp.gate_proj.weight"), mode="TANH_APPROXIMATION")
        product = mb.mul(x=gate, y=self._linear(normed, f"{prefix}mlp.up_proj.weight"))
        fed = self._linear(product, f"{prefix}mlp.down_proj.weight")
        hidden = mb.add(x=hidden, y=self._norm(fed, f"{prefix}post_feedforward_layernorm.weight"))
        return mb.mul(x=hidden, y=np.float16(self.weights[f"{prefix}layer_scalar"].item()))

    def _attention(self, normed: Any, layer: int) -> Any:
        prefix, kind = f"model.layers.{layer}.self_attn.", self.kinds[layer]
        dim = HEAD_DIM if kind == "s" else FULL_HEAD_DIM
        kv_heads = KV_HEADS if kind == "s" else FULL_KV_HEADS
        query = self._heads(self._linear(normed, f"{prefix}q_proj.weight"), HEADS, dim)
        raw_key = self._heads(self._linear(normed, f"{prefix}k_proj.weight"), kv_heads, dim)
        raw_value = raw_key if kind == "f" else self._heads(self._linear(normed, f"{prefix}v_proj.weight"), kv_heads, dim)
        query = self._rotate(self._norm(query, f"{prefix}q_norm.weight"), kind)
        key = self._rotate(self._norm(raw_key, f"{prefix}k_norm.weight"), kind)
        keys = self._written(key, f"k_{layer}", kind)
        values = self._written(self._norm(raw_value, None), f"v_{layer}", kind)
        return self._mixed(query, keys, values, layer)

    def _mixed(self, query: Any, keys: Any, values: Any, layer: int) -> Any:
        """Attention of rotated queries [heads, S, D] over keys and values [KV heads, W, D], and the output linear."""
        kv_heads, _, dim = keys.shape
        grouped = mb.reshape(x=query, shape=[kv_heads, HEADS // kv_heads, -1, dim])
        scores = mb.matmul(x=grouped, y=mb.expand_dims(x=keys, axes=[1]), transpose_y=True)
        weights = mb.softmax(x=mb.add(x=scores, y=self.inputs[f"mask_{self.kinds[layer]}"]), axis=-1)
        mixed = mb.matmul(x=weights, y=mb.expand_dims(x=values, axes=[1]))
        rows_first = mb.transpose(x=mixed, perm=[2, 0, 1, 3])
        return self._linear(mb.reshape(x=rows_first, shape=[-1, HEADS * dim]), f"model.layers.{layer}.self_attn.o_proj.weight")

    def _written(self, rows: Any, state: str, kind: str) -> Any:
        """The state after K <- K (1 - sum of one-hots) + one-hots^T K_new; full layers: its first `window` rows."""
        one_hot, handle = self.inputs[f"onehot_{kind}"], self.inputs[state]
        current = mb.read_state(input=handle)
        heads, length, dim = current.shape
        width = length if kind == "s" else self.window
        old = current if width == length else mb.slice_by_size(x=current, begin=[0, 0, 0], size=[heads, width, dim])
        touched = mb.expand_dims(x=mb.reduce_sum(x=one_hot, axes=[0], keep_dims=False), axes=[0, 2])
        placed = mb.matmul(x=mb.expand_dims(x=one_hot, axes=[0]), y=rows, transpose_x=True)
        new = mb.add(x=mb.mul(x=old, y=mb.sub(x=np.float16(1), y=touched)), y=placed)
        if width == length:
            return mb.coreml_update_state(state=handle, value=new)
        whole = mb.slice_update(x=current, update=new, begin=[0, 0, 0], end=[heads, width, dim])
        updated = mb.coreml_update_state(state=handle, value=whole)
        return mb.slice_by_size(x=updated, begin=[0, 0, 0], size=[heads, width, dim])

    def _heads(self, x: Any, heads: int, dim: int) -> Any:
        return mb.transpose(x=mb.reshape(x=x, shape=[-1, heads, dim]), perm=[1, 0, 2])

    def _rotate(self, x: Any, kind: str) -> Any:
        first, second = mb.split(x=x, num_splits=2, axis=-1)
        turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=-1)
        return mb.add(x=mb.mul(x=x, y=self.inputs[f"cos_{kind}"]), y=mb.mul(x=turned, y=self.inputs[f"sin_{kind}"]))

    def _linear(self, x: Any, name: str) -> Any:
        return mb.linear(x=x, weight=_Quantised.of(self.weights[name], 4).emit(f"{name.replace('.', '_')}_quantised"))

    def _norm(self, x: Any, name: str | None, result: str | None = None) -> Any:
        wide = mb.cast(x=x, dtype="fp32")
        mean = mb.reduce_mean(x=mb.mul(x=wide, y=wide), axes=[-1], keep_dims=True)
        normed = mb.mul(x=wide, y=mb.rsqrt(x=mb.add(x=mean, y=np.float32(EPSILON)), epsilon=1e-12))
        if name is not None:
            normed = mb.mul(x=normed, y=self.weights[name].astype(np.float32))
        return mb.cast(x=normed, dtype="fp16", **({} if result is None else {"name": result}))


@contextmanager
def function_of(inputs: dict[str, Any]) -> Iterator[Any]:
    from coremltools.converters.mil.mil import Function

    with Function(inputs, opset_version=ct.target.iOS18) as function:
        yield function


def save(path: Path, functions: Mapping[str, Any], default: str) -> None:
    from coremltools.converters.mil.mil import Program

    program = Program()
    for name, function in functions.items():
        program.add_function(name, function)
    program.default_function_name = default
    program.export_as_multifunction = len(functions) > 1
    with quiet():
        package = ct.convert(
            program,
            convert_to="mlprogram",
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        package.save(str(path))
