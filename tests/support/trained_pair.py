"""A tiny Gemma 4 and its assistant, trained on the spot on made-up text: the assistant knows what its target will say.

The text is a chain of made-up words of one to four tokens; which word follows is likely, not certain, so that plain
decoding has something to decide and drafts can be wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
from support import tiny_gemma4

LAYERS, WINDOW = "sssfsf", 100
ASSISTANT_LAYERS = "sssf"
WORDS = 48
LENGTH, BATCH = 96, 4
TARGET_STEPS, ASSISTANT_STEPS = 200, 100
ROUND = 3
"""Steps of a round that the assistant is trained for."""
_FIRST_PIECE = 16
"""Ids from here on are bytes and ordinary pieces."""


@dataclass(frozen=True)
class TrainedPair:
    """Two checkpoint directories."""

    target: Path
    assistant: Path


def trained_pair(config: pytest.Config, seed: int = 0) -> TrainedPair:
    """The pair for a seed, from pytest's cache if it was trained before by this code with these settings."""
    made_of = json.dumps([settings(), assistant_settings(), seed, tiny.tokenizer_json()], sort_keys=True)
    key = hashlib.sha256(Path(__file__).read_bytes() + made_of.encode()).hexdigest()[:16]
    assert config.cache is not None
    folder = config.cache.mkdir("trained-pairs") / key
    if not folder.exists():
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            train_pair(unfinished, seed)
            os.replace(unfinished, folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return TrainedPair(folder / "target", folder / "assistant")


def settings() -> dict[str, Any]:
    """config.json of the target."""
    return tiny_gemma4.config(LAYERS, sliding_window=WINDOW)


def assistant_settings(target: dict[str, Any] | None = None, layers: str = ASSISTANT_LAYERS, **changes: Any) -> dict[str, Any]:
    """config.json of an assistant of a target with these settings; `changes` are to its text_config."""
    target = settings() if target is None else target
    own = tiny_gemma4.config(layers)
    text = target | {name: own[name] for name in ("num_hidden_layers", "layer_types")}
    text |= {"hidden_size": 64, "intermediate_size": 128, "final_logit_softcapping": None} | changes
    return {
        "model_type": "gemma4_unified_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        "text_config": text,
    }


def assistant_model(document: dict[str, Any]) -> Any:
    """transformers' assistant with that config.json, weights as transformers initialises them."""
    from transformers import Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM, Gemma4UnifiedTextConfig

    others = {name: value for name, value in document.items() if name not in ("model_type", "text_config")}
    text = {name: value for name, value in document["text_config"].items() if name != "model_type"}
    config = Gemma4UnifiedAssistantConfig(text_config=Gemma4UnifiedTextConfig(**text), **others)
    config._attn_implementation = "eager"
    return Gemma4UnifiedAssistantForCausalLM(config)


def random_assistant(document: dict[str, Any], seed: int = 5) -> Any:
    """The same with random weights that matter, norms and scalars included."""
    import torch

    model = assistant_model(document)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def save_assistant(model: Any, document: dict[str, Any], folder: Path) -> Path:
    """Write the checkpoint directory of an assistant."""
    tensors = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return tiny.write_checkpoint(folder, document, tensors, tokenizer=False)


class MadeUpText:
    """An endless text of made-up words."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        chance = np.random.default_rng(1234)  # the language is the same for all seeds
        self._words = [
            chance.integers(_FIRST_PIECE, tiny.VOCABULARY - 32, length).tolist() for length in chance.integers(1, 5, WORDS)
        ]
        self._followers = [chance.choice(WORDS, 3, replace=False) for _ in range(WORDS)]

    def ids(self, length: int) -> list[int]:
        """`<bos>` and a text of that many tokens in all."""
        ids, word = [2], int(self._random.integers(WORDS))
        while len(ids) < length:
            ids += self._words[word]
            word = int(self._random.choice(self._followers[word], p=(0.8, 0.15, 0.05)))
        return ids[:length]


def train_pair(folder: Path, seed: int = 0) -> None:
    """Train both and write their checkpoints into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    others = {name: value for name, value in settings().items() if name != "model_type"}
    config = AutoConfig.for_model(settings()["model_type"], **others)
    config._attn_implementation = "eager"
    target, text = AutoModelForCausalLM.from_config(config), MadeUpText(seed)
    _train_target(target, text)
    assistant = assistant_model(assistant_settings())
    _train_assistant(assistant, target, text)
    tensors = {name: value.numpy() for name, value in target.state_dict().items() if name != "lm_head.weight"}
    tiny.write_checkpoint(folder / "target", settings(), tensors)
    save_assistant(assistant, assistant_settings(), folder / "assistant")


def _batch(text: MadeUpText) -> Any:
    import torch

    return torch.tensor([text.ids(LENGTH) for _ in range(BATCH)])


def _optimise(model: Any, steps: int, loss_of: Any) -> None:
    import torch

    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


def _train_target(target: Any, text: MadeUpText) -> None:
    def loss() -> Any:
        ids = _batch(text)
        return target(input_ids=ids, labels=ids, use_cache=False).loss

    _optimise(target, TARGET_STEPS, loss)


def _train_assistant(assistant: Any, target: Any, text: MadeUpText) -> None:
    """Every position of a text is the start of a round of ROUND steps; labels are what the target finds most likely."""
    import torch

    queries = torch.arange(1, LENGTH - ROUND)
    seen = torch.arange(LENGTH)[None] < queries[:, None]
    near = seen & (torch.arange(LENGTH)[None] >= queries[:, None] - 1 - WINDOW)
    masks = {
        kind: torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        for kind, mask in (("full_attention", seen), ("sliding_attention", near))
    }

    def loss() -> Any:
        ids = _batch(text)
        with torch.no_grad():
            found = target(input_ids=ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
            embedded = target.get_input_embeddings()(ids)
        labels, hidden = found.logits.argmax(-1), found.hidden_states[-1][:, : len(queries)]
        total: Any = 0.0
        for step in range(ROUND):
            joined = torch.cat([embedded[:, 1 + step : 1 + step + len(queries)], hidden], dim=-1)
            final = assistant.model(
                inputs_embeds=assistant.pre_projection(joined),
                attention_mask=masks,
                position_ids=queries[None].expand(len(ids), -1),
                shared_kv_states=found.shared_kv_states,
                use_cache=False,
            ).last_hidden_state
            hidden = assistant.post_projection(final)
            wanted = labels[:, 1 + step : 1 + step + len(queries)]
            total = total + torch.nn.functional.cross_entropy(assistant.lm_head(final).flatten(0, 1), wanted.flatten())
        return total / ROUND

    _optimise(assistant, ASSISTANT_STEPS, loss)
