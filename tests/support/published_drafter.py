"""The drafter of a tiny published bundle: packages that take the target's K/V as inputs, made from a random assistant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from portable_programs import mb, types
from support import published_bundle as published
from support.trained_pair import assistant_settings, random_assistant

LAYERS = "sf"


def assistant(seed: int = 5) -> Any:
    """transformers' assistant of the tiny model, weights rounded to fp16."""
    import torch

    made = random_assistant(assistant_settings(published.settings(), LAYERS), seed)
    with torch.no_grad():
        for value in (*made.parameters(), *made.buffers()):
            if value.is_floating_point():
                value.copy_(value.half().float())
    return made


def write_drafters(folder: Path, made: Any) -> None:
    """Write a drafter for each function, as packages that this machine can run."""
    weights = {name: value.detach().numpy() for name, value in made.state_dict().items()}
    for name, window in zip(published.DRAFTERS, published.FUNCTIONS.values(), strict=True):
        with published.function_of(_inputs(window)) as function:
            function.set_outputs(_Drafter(weights, function.inputs, window).outputs())
        published.save(folder / name.replace(".mlmodelc", ".mlpackage"), {"main": function}, "main")


def _inputs(window: int) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (published.HIDDEN,),
        "hidden": (published.HIDDEN,),
        "cos_s": (published.HEAD_DIM,),
        "sin_s": (published.HEAD_DIM,),
        "cos_f": (published.FULL_HEAD_DIM,),
        "sin_f": (published.FULL_HEAD_DIM,),
        "mask_s": (published.WINDOW,),
        "mask_f": (window,),
        "sks": (published.KV_HEADS, published.WINDOW, published.HEAD_DIM),
        "svs": (published.KV_HEADS, published.WINDOW, published.HEAD_DIM),
        "skf": (1, window, published.FULL_HEAD_DIM),
        "svf": (1, window, published.FULL_HEAD_DIM),
    }
    return {name: mb.placeholder(shape=shape, dtype=types.fp16) for name, shape in shapes.items()}


class _Drafter(published.Emitter):
    """Emits the drafter: layers that take keys and values from outside."""

    def outputs(self) -> list[Any]:
        self.kinds = LAYERS
        joined = mb.concat(values=[self.inputs["embed"], self.inputs["hidden"]], axis=0)
        hidden = self._linear(mb.expand_dims(x=joined, axes=[0]), "pre_projection.weight")
        for layer in range(len(LAYERS)):
            hidden = self._layer(hidden, layer)
        final = self._norm(hidden, "model.norm.weight")
        following = mb.squeeze(x=self._linear(final, "post_projection.weight"), axes=[0], name="hidden_next")
        logits = self._linear(final, "model.embed_tokens.weight")
        return [mb.reduce_argmax(x=logits, axis=-1, keep_dims=False, name="token"), following]

    def _attention(self, normed: Any, layer: int) -> Any:
        prefix, kind = f"model.layers.{layer}.self_attn.", self.kinds[layer]
        keys, values = self.inputs[f"sk{kind}"], self.inputs[f"sv{kind}"]
        query = self._heads(self._linear(normed, f"{prefix}q_proj.weight"), published.HEADS, keys.shape[2])
        query = self._rotate(self._norm(query, f"{prefix}q_norm.weight"), kind)
        return self._mixed(query, keys, values, layer)

    def _linear(self, x: Any, name: str) -> Any:
        return mb.linear(x=x, weight=self.weights[name].astype(np.float16))


def drafts(bundle: published.Bundle, made: Any, ids: Sequence[int], count: int, first: str = "transformers") -> list[int]:
    """Drafts after `ids`, whose last token is the one just produced, by transformers' assistant on the target's K/V.

    first: how the round starts, "transformers" or "as-published" (the bundle author's way).
    """
    import torch

    past = list(ids[:-1])
    table = torch.from_numpy(published.embedding_table(bundle.model).astype(np.float32))
    with torch.no_grad():
        output = bundle.model(
            inputs_embeds=table[past][None], output_hidden_states=True, return_shared_kv_states=True, use_cache=True
        )
        shared = {kind: tuple(each.half().float() for each in pair) for kind, pair in output.shared_kv_states.items()}
        # A cache in use hands over one window; a whole text at once, as here, hands over all, and one more is seen.
        shared["sliding_attention"] = tuple(each[:, :, -published.WINDOW :] for each in shared["sliding_attention"])
        hidden = output.hidden_states[-1][:, -1:]
        position = len(past) - (first == "as-published")

        def step(token: int, hidden: Any) -> tuple[int, Any]:
            found = made(
                inputs_embeds=torch.cat([table[token][None, None], hidden], -1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
                attention_mask=None,
            )
            return int(found.logits[0, -1].argmax()), found.last_hidden_state

        if first == "as-published":
            _, hidden = step(past[-1], hidden)
        tokens, token = [], ids[-1]
        for _ in range(count):
            token, hidden = step(token, hidden)
            tokens.append(token)
    return tokens
