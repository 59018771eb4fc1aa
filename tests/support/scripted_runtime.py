"""A runtime whose model says what a test's script says, so that engine, chat and plugin run for real.

The model is a function of the tokens of its context, like a real one: the embedding spells a token's id, the layers
keep the ids in their K/V states, and the head favours the token with which the scripted reply goes on. A script is a
JSON file, named by the environment variable SCRIPT, so that child processes find it too:

    {"replies": [[text in the prompt, reply], ...], "seconds_per_call": 0.0}

The reply of the entry whose text stands last in the prompt is given. Control tokens are written by their names.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from llm_gemma_coreml.bundle.checksums import file_entries
from llm_gemma_coreml.bundle.manifest import (
    EmbeddingTable,
    LayerPackage,
    Manifest,
    RotaryEmbedding,
    StateEntry,
    head_function_name,
    layers_function_name,
)
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.hooks import hookimpl
from llm_gemma_coreml.runtime.base import Array, RuntimeOptions

SCRIPT = "SCRIPT"
HIDDEN = HEAD_DIM = 32
DIGITS, BASE = 3, 64
RUNGS, WIDTHS, WINDOW, RING = (1024, 4096), (1, 2, 4, 8, 128), 128, 384
LAYERS_PACKAGE, HEAD_PACKAGE, EMBEDDING = "layers.mlpackage", "head.mlpackage", "embedding.bin"
SURE = 60.0
"""Logit of the scripted token; all others have 0."""
_REPLY_STARTS = {
    "transcript": ("Assistant:",),
    "gemma3": ("<start_of_turn>model\n",),
    "gemma4": ("<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model\n", "<tool_response|>"),
}


def digits(tokens: Sequence[int]) -> np.ndarray:
    """Ids as DIGITS numbers below BASE, which fp16 and int8 hold exactly: [n, DIGITS]."""
    index = np.asarray(tokens, np.int64)
    return np.stack([index // BASE**place % BASE for place in range(DIGITS)], axis=-1)


def undigits(rows: np.ndarray) -> list[int]:
    """The inverse of `digits`."""
    return [int(token) for token in np.rint(rows[..., :DIGITS]).astype(np.int64) @ BASE ** np.arange(DIGITS)]


class Script:
    """What the model says: the next token after any context."""

    def __init__(self, tokenizer: Tokenizer, template_kind: str) -> None:
        self._tokenizer = tokenizer
        self._starts = _REPLY_STARTS[template_kind]
        names = sorted(tokenizer.control_names(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names)))
        self._end = tokenizer.control_id("<eos>" if template_kind == "transcript" else self._turn_end())

    def _turn_end(self) -> str:
        return next(name for name in ("<turn|>", "<end_of_turn>") if self._tokenizer.find_control(name))

    def next_token(self, context: Sequence[int], replies: Sequence[Sequence[str]]) -> int:
        text = "".join(self._spelled(token) for token in context)
        prompt_end = max(text.rfind(start) + len(start) for start in self._starts if start in text)
        prompt, said = text[:prompt_end], text[prompt_end:]
        places = [(prompt.rfind(key), reply) for key, reply in replies if key in prompt]
        wanted = max(places, key=lambda place: place[0])[1] if places else "I have no script for that."
        if not wanted.startswith(said) or wanted == said:
            return self._end
        return self._first_token(wanted[len(said) :])

    def _spelled(self, token: int) -> str:
        if self._tokenizer.is_control(token):
            return self._tokenizer.piece(token)
        return self._tokenizer.piece(token).replace("\u2581", " ")

    def _first_token(self, text: str) -> int:
        found = self._control.search(text)
        if found is not None and found.start() == 0:
            return self._tokenizer.control_id(found.group())
        return self._tokenizer.encode_text(text[: found.start()] if found else text)[0]


class ScriptedState:
    """Plain arrays."""

    def __init__(self, arrays: dict[str, Array]) -> None:
        self.arrays = arrays

    def buffers(self) -> Mapping[str, Array]:
        return self.arrays

    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


@dataclasses.dataclass
class ScriptedFunction:
    name: str
    compute: Callable[[Mapping[str, Array], ScriptedState | None], dict[str, Array]]

    def run(self, inputs: Mapping[str, Array], state: Any = None) -> dict[str, Array]:
        return self.compute(inputs, state)


class ScriptedPackage:
    """The layers or the head of a scripted bundle."""

    def __init__(self, path: Path, runtime: ScriptedRuntime) -> None:
        manifest = Manifest.from_json((path.parent / "bundle.json").read_bytes())
        self._manifest, self._runtime, self._is_head = manifest, runtime, path.name == HEAD_PACKAGE
        self._script = _script(path.parent / manifest.tokenizer, manifest.template_kind)
        if self._is_head:
            self.function_names = [head_function_name(width) for width in manifest.head_widths]
        else:
            self.function_names = [layers_function_name(r, w) for r in manifest.rungs for w in manifest.widths]

    def function(self, name: str) -> ScriptedFunction:
        assert name in self.function_names
        return ScriptedFunction(name, self._run_head if self._is_head else self._run_layers)

    def make_state(self) -> ScriptedState | None:
        if self._is_head:
            return None
        return ScriptedState({entry.name: np.zeros(entry.shape, np.float16) for entry in self._manifest.states})

    def fork_state(self, state: ScriptedState) -> ScriptedState:
        return ScriptedState({name: array.copy() for name, array in state.arrays.items()})

    def close(self) -> None:
        return None

    def _run_layers(self, inputs: Mapping[str, Array], state: ScriptedState | None) -> dict[str, Array]:
        """hidden_out: the number of the call, then the row's position."""
        assert state is not None
        hidden, positions = inputs["hidden"], inputs["query_positions"]
        rows = len(hidden)
        for kind, layer in (("sliding", 0), ("full", 1)):
            start = int(inputs[f"{kind}_write_start"][0])
            state.arrays[f"k_{layer}"][0, start : start + rows] = hidden
        held = inputs["full_slot_positions"]
        count = int((held >= 0).sum())
        assert np.array_equal(held[:count], np.arange(count)), "the full buffers hold a prefix"
        call = self._runtime.remember(undigits(state.arrays["k_1"][0, :count].astype(np.float32)))
        out = np.zeros((rows, HIDDEN), np.float32)
        out[:, 0], out[:, 1] = call, positions
        return {"hidden_out": out}

    def _run_head(self, inputs: Mapping[str, Array], state: ScriptedState | None) -> dict[str, Array]:
        settings = json.loads(Path(os.environ[SCRIPT]).read_text(encoding="utf-8"))
        time.sleep(settings.get("seconds_per_call", 0.0))
        hidden = inputs["hidden"]
        logits = np.zeros((len(hidden), self._manifest.vocabulary_size), np.float32)
        for row, (call, position) in enumerate(hidden[:, :2]):
            context = self._runtime.recall(int(call))
            if position < len(context):  # else padding
                token = self._script.next_token(context[: int(position) + 1], settings["replies"])
                logits[row, token] = SURE
        return {"logits": logits}


class ScriptedRuntime:
    """Runs scripted bundles."""

    name = "scripted"

    def __init__(self) -> None:
        self._contexts: dict[int, list[int]] = {}
        self._calls = 0

    def available(self) -> str | None:
        return None if SCRIPT in os.environ else "no script is set"

    def load(self, package: Path, options: RuntimeOptions) -> ScriptedPackage:
        return ScriptedPackage(package, self)

    def remember(self, context: list[int]) -> int:
        """A number below 4096 under which the last calls' contexts are found."""
        self._calls = (self._calls + 1) % 4096
        self._contexts[self._calls] = context
        self._contexts.pop((self._calls - 64) % 4096, None)
        return self._calls

    def recall(self, call: int) -> list[int]:
        return self._contexts[call]


@lru_cache(maxsize=4)
def _script(tokenizer: Path, template_kind: str) -> Script:
    return Script(Tokenizer(tokenizer), template_kind)


@hookimpl
def register_runtimes(register: Callable[[Any], None]) -> None:
    register(ScriptedRuntime())


def write_scripted_bundle(path: Path, tokenizer: Path, template_kind: str, template: str | None = None) -> Path:
    """A bundle for the scripted runtime; `template`: the Jinja text, default our own of that kind."""
    path.mkdir(parents=True)
    vocabulary = Tokenizer(tokenizer).vocabulary_size
    table = np.zeros((vocabulary, HIDDEN), np.int8)
    table[:, :DIGITS] = digits(range(vocabulary))
    scales = np.ones((vocabulary, 1), "<f2")
    (path / EMBEDDING).write_bytes(table.tobytes() + scales.tobytes())
    (path / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    if template is None:
        folder = resources.files("llm_gemma_coreml.chat").joinpath("templates")
        template = folder.joinpath(f"{template_kind}.jinja").read_text(encoding="utf-8")
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    for package in (LAYERS_PACKAGE, HEAD_PACKAGE):
        (path / package).mkdir()
        (path / package / "Manifest.json").write_text("{}")
    manifest = _manifest(path, vocabulary, template_kind)
    (path / "bundle.json").write_text(manifest.to_json(), encoding="utf-8")
    return path


def _manifest(path: Path, vocabulary: int, template_kind: str) -> Manifest:
    rotary = RotaryEmbedding(10_000.0, HEAD_DIM, HEAD_DIM // 2)
    rows = {0: ("sliding", RING + 128), 1: ("full", RUNGS[-1] + 128)}
    states = tuple(
        StateEntry(f"{part}_{layer}", LAYERS_PACKAGE, layer, kind, (1, count, HEAD_DIM))
        for layer, (kind, count) in rows.items()
        for part in "kv"
    )
    return Manifest(
        name=path.name,
        family="gemma4" if template_kind == "gemma4" else "gemma3",
        vocabulary_size=vocabulary,
        hidden_size=HIDDEN,
        layer_types=("sliding", "full"),
        query_heads=1,
        kv_heads_sliding=1,
        kv_heads_full=1,
        head_dim_sliding=HEAD_DIM,
        head_dim_full=HEAD_DIM,
        sliding_window=WINDOW,
        ring_capacity=RING,
        rungs=RUNGS,
        widths=WIDTHS,
        layer_packages=(LayerPackage(LAYERS_PACKAGE, 0, 2),),
        head_package=HEAD_PACKAGE,
        head_widths=WIDTHS,
        embedding=EmbeddingTable(EMBEDDING, vocabulary, HIDDEN, HIDDEN, 0, vocabulary * HIDDEN, 1.0),
        rotary_sliding=rotary,
        rotary_full=rotary,
        states=states,
        quantisation={},
        tokenizer="tokenizer.model",
        template_kind=template_kind,
        chat_template="chat_template.jinja",
        bos_id=2,
        stop_ids=(1,),
        suppressed_ids=(),
        sampling_defaults={},
        licence="none",
        licence_url="",
        source="a script",
        files=file_entries(path),
    )
