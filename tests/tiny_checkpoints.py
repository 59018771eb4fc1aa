"""Small Gemma checkpoints made on the spot: a vocabulary, a GGUF file, directories of safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
Pieces = list[tuple[str, float, int]]


def tiny_pieces() -> Pieces:
    """A vocabulary with all that Gemma's has: (text, score, type) by id. Runs hold plain spaces."""
    pieces: Pieces = [(text, -1000.0, CONTROL) for text in ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")]
    pieces += [(text, -1000.0, USER_DEFINED) for text in ("[multimodal]", "<start_of_turn>", "<end_of_turn>")]
    pieces += [("\n" * n, -1000.0, USER_DEFINED) for n in (1, 2, 3)]
    pieces += [(" " * n, -1000.0, USER_DEFINED) for n in (2, 3, 4)]
    pieces += [(text, -1000.0, USER_DEFINED) for text in ("<td>", "</td>")]
    pieces += [(f"<0x{byte:02X}>", -1000.0, BYTE) for byte in range(256)]
    merged = [
        "▁t",
        "he",
        "in",
        "▁the",
        "er",
        "an",
        "▁a",
        "on",
        "th",
        "▁th",
        "and",
        "▁and",
        "ther",
        "the",
        "éa",
        "aa",
    ]
    merged += ["aaaa", "▁an", "ha", "hat", "▁that", "at"]
    pieces += [(text, -float(rank), NORMAL) for rank, text in enumerate(merged)]
    singles = "▁etaoinshrdlucmfwypvbgkjqxz<>_[]/'.,;éü日本"
    pieces += [(text, -float(len(merged) + rank), NORMAL) for rank, text in enumerate(singles)]
    while len(pieces) % 32:
        pieces.append((f"<unused{len(pieces)}>", -1000.0, CONTROL))
    return pieces


VOCABULARY = len(tiny_pieces())
HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 96, 7, 4, 2, 32, 16


def gguf_tensors(seed: int = 1) -> dict[str, np.ndarray]:
    """fp32 tensors of a tiny Gemma 3 under their GGUF names; norm weights ready to multiply with."""
    random = np.random.default_rng(seed)

    def weights(*shape: int) -> np.ndarray:
        return random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {"token_embd.weight": weights(VOCABULARY, HIDDEN), "output_norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        own = {
            "attn_q": weights(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": weights(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": weights(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": weights(HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": weights(WIDE, HIDDEN),
            "ffn_up": weights(WIDE, HIDDEN),
            "ffn_down": weights(HIDDEN, WIDE),
            **{
                name: norm(HIDDEN)
                for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
            },
            **{name: norm(HEAD_DIM) for name in ("attn_q_norm", "attn_k_norm")},
        }
        tensors.update({f"blk.{layer}.{name}.weight": tensor for name, tensor in own.items()})
    return tensors


def write_gguf(
    path: Path,
    kind: str = "F32",
    tensors: Mapping[str, np.ndarray] | None = None,
    change: Callable[[Any], None] | None = None,
    architecture: str = "gemma3",
) -> dict[str, np.ndarray]:
    """Write a tiny Gemma 3 GGUF; 2-D tensors are stored as `kind`. Returns what a reader must give.

    change: called with the GGUFWriter before it writes, to add metadata.
    """
    import gguf

    tensors = gguf_tensors() if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    pieces = tiny_pieces()
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _, _ in pieces])
    writer.add_token_scores([score for _, score, _ in pieces])
    writer.add_token_types([kind for _, _, kind in pieces])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    if change is not None:
        change(writer)
    stored: dict[str, np.ndarray] = {}
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
            stored[name] = tensor
        else:
            data = gguf.quants.quantize(tensor, quantisation)
            writer.add_tensor(name, data, raw_dtype=quantisation)
            stored[name] = gguf.quants.dequantize(data, quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


GEMMA4_MARKERS = (
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|think|>",
    "<|channel>",
    "<channel|>",
)


def gemma4_pieces() -> Pieces:
    """The tiny vocabulary with Gemma 4's markers in the place of Gemma 3's and of unused ones."""
    pieces = tiny_pieces()
    unused = [number for number, (text, _, _) in enumerate(pieces) if text.startswith("<unused")]
    places = {text: number for number, (text, _, _) in enumerate(pieces)}
    names = dict(zip(unused, GEMMA4_MARKERS, strict=False))
    names |= {places["<start_of_turn>"]: "<|turn>", places["<end_of_turn>"]: "<turn|>"}
    return [(names[number], -1000.0, CONTROL) if number in names else piece for number, piece in enumerate(pieces)]


def tokenizer_json(pieces: Pieces | None = None) -> str:
    """A vocabulary, by default the tiny one, in the form of Gemma's tokenizer.json (merges spelled out, markers added)."""
    pieces = tiny_pieces() if pieces is None else pieces
    texts = {text.replace(" ", "▁") for text, _, _ in pieces}
    ranked = sorted((piece for piece in pieces if piece[2] == NORMAL), key=lambda piece: -piece[1])
    merges = [
        [text[:cut], text[cut:]]
        for text, _, _ in ranked
        for cut in range(1, len(text))
        if text[:cut] in texts and text[cut:] in texts
    ]
    # As in Gemma's file, runs of spaces are made by merges that come before all others.
    runs = [["▁" * (n - 1), "▁"] for n in (2, 3, 4)] + [["▁▁", "▁▁"]]
    added = [
        {
            "id": number,
            "content": text.replace(" ", "▁"),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for number, (text, _, kind) in enumerate(pieces)
        if kind in (CONTROL, USER_DEFINED)
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": {text.replace(" ", "▁"): number for number, (text, _, _) in enumerate(pieces)},
                "merges": sorted(runs, key=lambda pair: -len(pair[0] + pair[1])) + merges,
            },
        },
        ensure_ascii=False,
    )


def tiny_gemma3_config() -> dict[str, Any]:
    """config.json of a tiny Gemma 3 text model with one full layer and scaled global RoPE."""
    return {
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }


def tiny_gemma4_config() -> dict[str, Any]:
    """config.json of a tiny Gemma 4 text model with every feature of the 12B."""
    return {
        "model_type": "gemma4_unified_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 5,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_global_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "global_head_dim": 2 * HEAD_DIM,
        "attention_k_eq_v": True,
        "sliding_window": WINDOW,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
    }


def random_transformers_model(config: Mapping[str, Any], seed: int = 3) -> Any:
    """A transformers model of that configuration with random weights, norms and scalars included."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-0.5, 1.0)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def write_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokenizer: bool = True
) -> Path:
    """A checkpoint directory with config.json, model.safetensors and (optionally) tokenizer.json."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    if tokenizer:
        (path / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    return path


def gemma3_tensors(seed: int = 1, prefix: str = "model.") -> dict[str, np.ndarray]:
    """The tensors of `gguf_tensors` under Hugging Face names, norm weights minus one."""
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    renamed = {}
    for name, tensor in gguf_tensors(seed).items():
        part = name.split(".")
        if part[0] == "blk":
            key = f"layers.{part[1]}.{names[part[2]]}.weight"
        else:
            key = {"token_embd": "embed_tokens.weight", "output_norm": "norm.weight"}[part[0]]
        renamed[prefix + key] = tensor - 1 if tensor.ndim == 1 else tensor
    return renamed
