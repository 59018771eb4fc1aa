"""A bundle and a runtime whose logits favour given replies, so that all above the runtime runs for real.

The embedding row of a token spells its id, the layers keep the ids in their states at the slots that the engine
names, and the head favours what the script says after the ids that the states hold. The module is a plug-in:
register it with `hooks.plugin_manager()` (the fixture of `installed`), or by an entry point in a child process.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.zero_state import ZeroState

from llm_gemma_coreml import hooks
from llm_gemma_coreml.bundle.checksums import file_entries
from llm_gemma_coreml.bundle.manifest import (
    EmbeddingTable,
    LayerPackage,
    Manifest,
    RotaryEmbedding,
    StateEntry,
    load_manifest,
)
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.errors import GemmaCoreMLError, PackageError
from llm_gemma_coreml.runtime.base import Runtime, RuntimeOptions

Array = np.ndarray[Any, Any]
Reply = str | Sequence[int]
Replies = Sequence[Reply] | Callable[[tuple[int, ...]], Reply]
"""One reply for each request in order, or a function from the prompt's ids to the reply."""

WINDOW, CAPACITY, SPILL = 128, 256, 128
RUNGS, WIDTHS, HEAD_WIDTHS = (1024, 8192), (1, 2, 4, 8, 128), (1, 2, 4, 8)
HIDDEN, DIM = 32, 2
SCRIPT_FILE = "script.json"
_TRANSCRIPT = Path(__file__).parents[2] / "llm_gemma_coreml" / "chat" / "templates" / "transcript.jinja"
_STOP_NAMES = ("<eos>", "<end_of_turn>", "<turn|>")
_FAVOUR = 40.0
_REMEMBERED_CALLS = 64


class Script:
    """What the model of one bundle says. Tests may change `replies` and `delay` at any time."""

    def __init__(self, replies: Replies, tokenizer: Path, end: int, delay: float = 0.0) -> None:
        self._tokenizer_path = tokenizer
        self._tokenizer: Tokenizer | None = None
        self.replies = replies
        self.end = end
        """The id that follows the last one of a reply."""
        self.delay = delay
        """Seconds that each layer call takes."""
        self.prompts: list[tuple[int, ...]] = []
        """The prompts of all requests so far."""
        self._reply: list[int] = []
        self._latest: tuple[int, ...] = ()
        self._rows = 0

    def reply_ids(self, reply: Reply) -> list[int]:
        """The ids of a reply; control tokens are written by name in a text."""
        if not isinstance(reply, str):
            return list(reply)
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._tokenizer_path)
        names = self._tokenizer.control_names()
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, names)) + ")", reply) if names else [reply]:
            ids += [self._tokenizer.control_id(part)] if part in names else self._tokenizer.encode_text(part)
        return ids

    def favoured(self, contexts: Sequence[tuple[int, ...]]) -> list[int]:
        """The next token after each row of one head call. The first row is on the true path, drafts follow."""
        first = contexts[0]
        new_tokens = len(first) - len(self._latest)
        if not (0 < new_tokens <= self._rows and first[: len(self._latest)] == self._latest):
            self._start(first)
        self._latest, self._rows = first, len(contexts)
        return [self._next(context) for context in contexts]

    def _start(self, prompt: tuple[int, ...]) -> None:
        """A new request: take its reply."""
        if callable(self.replies):
            reply = self.replies(prompt)
        else:
            if len(self.prompts) >= len(self.replies):
                raise GemmaCoreMLError(f"The script has {len(self.replies)} replies, this is one request more.")
            reply = self.replies[len(self.prompts)]
        self._reply = self.reply_ids(reply)
        self.prompts.append(prompt)

    def _next(self, context: tuple[int, ...]) -> int:
        done = len(context) - len(self.prompts[-1])
        return self._reply[done] if done < len(self._reply) else self.end


_scripts: dict[Path, Script] = {}


def script_of(bundle: Path) -> Script:
    """The script of the bundle in that folder."""
    key = bundle.resolve()
    if key not in _scripts:
        stored = json.loads((key / SCRIPT_FILE).read_text(encoding="utf-8"))
        manifest = load_manifest(key)
        _scripts[key] = Script(stored["replies"], key / manifest.tokenizer, stored["end"], stored["delay"])
    return _scripts[key]


class ScriptedPackage:
    """The layer package or the head. The layers hand the head a number for each row's context."""

    def __init__(self, bundle: Path, name: str, contexts: OrderedDict[int, tuple[int, ...]]) -> None:
        self._bundle, self._name, self._contexts = bundle, name, contexts
        self._manifest = load_manifest(bundle)
        self._script = script_of(bundle)
        if name == self._manifest.head_package:
            self.function_names = tuple(f"width_{width}" for width in HEAD_WIDTHS)
        else:
            self.function_names = tuple(f"context_{rung}_width_{width}" for rung in RUNGS for width in WIDTHS)

    def function(self, name: str) -> ScriptedFunction:
        assert name in self.function_names, name
        head = self._name == self._manifest.head_package
        return ScriptedFunction(name, self._logits if head else self._layers)

    def make_state(self) -> ZeroState | None:
        entries = [entry for entry in self._manifest.states if entry.package == self._name]
        return ZeroState({entry.name: entry.shape for entry in entries}) if entries else None

    def close(self) -> None:
        pass

    def _layers(self, inputs: Mapping[str, Array], state: Any) -> dict[str, Array]:
        time.sleep(self._script.delay)
        ids = (inputs["hidden"] > 0).astype(np.int64) @ (1 << np.arange(HIDDEN))
        buffers = state.buffers()
        for layer, kind in enumerate(("sliding", "full")):
            start = int(inputs[f"{kind}_write_start"][0])
            buffers[f"k_{layer}"][0, start : start + len(ids)] = np.stack([ids >> 10, ids & 1023], axis=1)
        first = int(inputs["query_positions"][0])
        known = _held(buffers["k_1"], inputs["full_slot_positions"], first + len(ids))
        window = _held(buffers["k_0"], inputs["sliding_slot_positions"], first + 1)[-WINDOW:]
        assert np.array_equal(known[: first + 1][-WINDOW:], window), "ring and full buffer disagree"
        hidden = np.zeros((len(ids), HIDDEN), np.float32)
        context = tuple(known.tolist())
        for row in range(len(ids)):
            number = next(reversed(self._contexts), 0) % (1 << 23) + 1
            self._contexts[number] = context[: first + row + 1]
            hidden[row, 0] = number
        while len(self._contexts) > _REMEMBERED_CALLS * WIDTHS[-1]:
            self._contexts.popitem(last=False)
        return {"hidden_out": hidden}

    def _logits(self, inputs: Mapping[str, Array], state: Any) -> dict[str, Array]:
        numbers = list(dict.fromkeys(int(number) for number in inputs["hidden"][:, 0]))  # without padding
        favoured = self._script.favoured([self._contexts[number] for number in numbers])
        logits = np.zeros((len(inputs["hidden"]), self._manifest.vocabulary_size), np.float32)
        logits[np.arange(len(favoured)), favoured] = _FAVOUR
        return {"logits": logits}


def _held(buffer: Array, positions: Array, end: int) -> Array:
    """The ids that the slots hold at positions below `end`, in order of position."""
    slots = np.flatnonzero((positions >= 0) & (positions < end))
    rows = buffer[0, slots[np.argsort(positions[slots])]].astype(np.int64)
    return (rows[:, 0] << 10) | rows[:, 1]


class ScriptedFunction:
    def __init__(self, name: str, run: Callable[[Mapping[str, Array], Any], dict[str, Array]]) -> None:
        self.name = name
        self._run = run

    def run(self, inputs: Mapping[str, Array], state: Any = None) -> dict[str, Array]:
        return self._run(inputs, state)


class ScriptedRuntime:
    """Runs scripted bundles, and refuses all others."""

    name = "scripted"

    def __init__(self) -> None:
        self._contexts: dict[Path, OrderedDict[int, tuple[int, ...]]] = {}

    def available(self) -> str | None:
        return None

    def load(self, package: Path, options: RuntimeOptions) -> ScriptedPackage:
        bundle = package.parent
        if not (bundle / SCRIPT_FILE).exists():
            raise PackageError(f"{package} is not scripted.")
        return ScriptedPackage(bundle, package.name, self._contexts.setdefault(bundle, OrderedDict()))


@hooks.hookimpl(tryfirst=True)
def register_runtimes(register: Callable[[Runtime], None]) -> None:
    register(ScriptedRuntime())


@contextmanager
def installed() -> Iterator[None]:
    """Within it, engines that are opened without naming a runtime take the scripted one."""
    import sys

    manager = hooks.plugin_manager()
    plugin = sys.modules[__name__]
    manager.register(plugin)
    try:
        yield
    finally:
        manager.unregister(plugin)


def write_scripted_bundle(
    folder: Path,
    replies: Replies,
    *,
    tokenizer: Path,
    template_kind: str = "transcript",
    template: str | None = None,
    name: str = "scripted",
    end: int | None = None,
    delay: float = 0.0,
    **changes: Any,
) -> Script:
    """Make `folder` a bundle whose model gives `replies`; returns its script.

    tokenizer: a SentencePiece model. template: text of the chat template (default: our transcript). end: the id
    that ends each reply (default: the first of `<end_of_turn>`, `<turn|>`, `<eos>` that there is). delay: seconds
    for each call. changes: other fields of the manifest.
    """
    (folder / "layers.mlpackage").mkdir(parents=True)
    (folder / "head.mlpackage").mkdir()
    for package in ("layers.mlpackage", "head.mlpackage"):
        (folder / package / "Manifest.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    text = _TRANSCRIPT.read_text(encoding="utf-8") if template is None else template
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    pieces = Tokenizer(tokenizer)
    stops = [found for known in _STOP_NAMES if (found := pieces.find_control(known)) is not None]
    end = stops[-1] if end is None else end
    bos = pieces.find_control("<bos>")
    size = pieces.vocabulary_size
    bits = (np.arange(size)[:, None] >> np.arange(HIDDEN)) & 1
    table = bits.astype(np.int8).tobytes() + np.ones((size, 1), np.float16).tobytes()
    (folder / "embedding.bin").write_bytes(table + b"\0" * (len(table) % 2))
    stored = [] if callable(replies) else [r if isinstance(r, str) else list(r) for r in replies]
    script = {"replies": stored, "end": end, "delay": delay}
    (folder / SCRIPT_FILE).write_text(json.dumps(script), encoding="utf-8")
    fields = _fields(name, size) | {
        "template_kind": template_kind,
        "family": "gemma4" if template_kind == "gemma4" else "gemma3",
        "bos_id": 2 if bos is None else bos,
        "stop_ids": tuple(stops),
        "files": file_entries(folder),
    }
    manifest = Manifest(**(fields | changes))
    (folder / "bundle.json").write_text(manifest.to_json(), encoding="utf-8")
    _scripts[folder.resolve()] = Script(replies, folder / "tokenizer.model", end, delay)
    return _scripts[folder.resolve()]


def _fields(name: str, vocabulary_size: int) -> dict[str, Any]:
    states = [
        StateEntry(f"{letter}_{layer}", "layers.mlpackage", layer, kind, (1, rows + SPILL, DIM))
        for layer, kind, rows in ((0, "sliding", CAPACITY), (1, "full", RUNGS[-1]))
        for letter in "kv"
    ]
    rotary = RotaryEmbedding(10000.0, DIM, DIM // 2)
    offset = vocabulary_size * HIDDEN
    return {
        "name": name,
        "vocabulary_size": vocabulary_size,
        "hidden_size": HIDDEN,
        "layer_types": ("sliding", "full"),
        "query_heads": 1,
        "kv_heads_sliding": 1,
        "kv_heads_full": 1,
        "head_dim_sliding": DIM,
        "head_dim_full": DIM,
        "sliding_window": WINDOW,
        "ring_capacity": CAPACITY,
        "rungs": RUNGS,
        "widths": WIDTHS,
        "layer_packages": (LayerPackage("layers.mlpackage", 0, 2),),
        "head_package": "head.mlpackage",
        "head_widths": HEAD_WIDTHS,
        "embedding": EmbeddingTable("embedding.bin", vocabulary_size, HIDDEN, HIDDEN, 0, offset, 1.0),
        "rotary_sliding": rotary,
        "rotary_full": rotary,
        "states": tuple(states),
        "quantisation": {},
        "tokenizer": "tokenizer.model",
        "chat_template": "chat_template.jinja",
        "suppressed_ids": (),
        "sampling_defaults": {},
        "licence": "Apache-2.0",
        "licence_url": "https://www.apache.org/licenses/LICENSE-2.0",
        "source": "a script",
    }
