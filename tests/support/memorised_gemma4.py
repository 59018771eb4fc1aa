"""A tiny Gemma 4 checkpoint as a user would have it, trained on the spot to know two answers by heart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_checkpoints as tiny
from support import tiny_gemma4

TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' ~ message.content | trim ~ '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""
"""The checkpoint's own template: without the empty thought that the built-in one writes."""
QUESTION, ANSWER = "What is that?", "That is the hat on the table."
MORE, MORE_ANSWER = "And then?", "There and then, another one: éa & ü."
GENERATION = {
    "bos_token_id": 2,
    "do_sample": True,
    "eos_token_id": [1, 7],
    "suppress_tokens": [258883, 258882],
    "temperature": 1.0,
    "top_k": 64,
    "top_p": 0.95,
}
_STEPS = 120


def conversation() -> str:
    """What the model knows by heart, as rendered text."""
    turns = [("user", QUESTION), ("model", ANSWER), ("user", MORE), ("model", MORE_ANSWER)]
    return "<bos>" + "".join(f"<|turn>{role}\n{text}<turn|>\n" for role, text in turns)


def encode(folder: Path, text: str) -> list[int]:
    """Ids of rendered text by Hugging Face's tokenizers from the checkpoint's tokenizer.json."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def write_checkpoint(folder: Path, layers: str = "ssfsf") -> Path:
    """Train a model and save it with transformers: bfloat16, names and configuration as published, vision parts too."""
    import torch
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tiny.tokenizer_json(tiny.gemma4_pieces()), encoding="utf-8")
    text = {key: value for key, value in tiny_gemma4.config(layers).items() if not key.startswith("hidden_size_per")}
    parts = {"vision_config": {"mm_embed_dim": 96, "mm_posemb_size": 16, "output_proj_dims": 96}, "audio_config": {}}
    torch.manual_seed(0)
    model = Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(text_config=text, **parts))
    _learn(model, encode(folder, conversation()))
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer", "add_bos_token": False}))
    return folder


def _learn(model: Any, ids: list[int]) -> None:
    import torch

    text = torch.tensor([ids])
    optimiser = torch.optim.Adam([weight for name, weight in model.named_parameters() if "language_model" in name], lr=3e-3)
    for _ in range(_STEPS):
        optimiser.zero_grad()
        model(input_ids=text, labels=text).loss.backward()
        optimiser.step()
    assert model(input_ids=text, labels=text).loss < 0.05
