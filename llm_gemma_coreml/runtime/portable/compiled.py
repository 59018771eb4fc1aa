"""A translated package as plain data: which ONNX model runs each function, and how to feed it. Cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llm_gemma_coreml.errors import PackageError
from llm_gemma_coreml.runtime.portable.attention import AttentionPlan
from llm_gemma_coreml.runtime.portable.recipes import WeightRecipe, from_json, to_json

FORMAT = 11
"""Raised whenever translations change, so that older caches are not used."""


@dataclass(frozen=True)
class CompiledModel:
    """An ONNX model without its weights; functions that are one program at several sizes share it."""

    onnx: bytes
    weights: dict[str, WeightRecipe]

    def digest(self) -> str:
        """Hex digest of model and recipes."""
        recipes = json.dumps({name: to_json(recipe) for name, recipe in self.weights.items()}, sort_keys=True)
        return hashlib.sha256(self.onnx + recipes.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CompiledFunction:
    """How to run one function: its model, its declared inputs (name -> dtype, shape), outputs, states, attentions."""

    model: str
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    outputs: tuple[str, ...]
    state_inputs: dict[str, str]
    state_outputs: dict[str, str]
    attentions: tuple[AttentionPlan, ...]
    rows: int
    """Rows that each attention writes; 0 without attentions."""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CompiledFunction:
        return cls(
            str(data["model"]),
            {str(name): (str(kind), tuple(int(n) for n in shape)) for name, (kind, shape) in data["inputs"].items()},
            tuple(str(name) for name in data["outputs"]),
            {str(k): str(v) for k, v in data["state_inputs"].items()},
            {str(k): str(v) for k, v in data["state_outputs"].items()},
            tuple(AttentionPlan(**plan) for plan in data["attentions"]),
            int(data["rows"]),
        )


@dataclass
class CompiledPackage:
    """All that is known of a package so far; grows as functions are first used."""

    function_names: tuple[str, ...]
    states: dict[str, tuple[int, ...]]
    functions: dict[str, CompiledFunction] = field(default_factory=dict)
    models: dict[str, CompiledModel] = field(default_factory=dict)
    originals_packed: bool | None = None
    """What probes.originals_are_packed found; None if it was not asked."""
    slot_order: dict[str, bool] = field(default_factory=dict)
    """What probes.sums_in_slot_order found, by head dimension and threads."""


class Cache:
    """Keeps a CompiledPackage in files of `folder`, all named by `key`; writes are atomic. No folder: keeps nothing."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self._folder = folder
        self._key = key

    def load(self) -> CompiledPackage | None:
        """What was stored under the key, or None. A damaged cache counts as none."""
        if self._folder is None:
            return None
        try:
            index = json.loads((self._folder / f"{self._key}.json").read_bytes())
            package = CompiledPackage(
                tuple(index["function_names"]), {name: tuple(shape) for name, shape in index["states"].items()}
            )
            package.originals_packed = bool(index["originals_packed"])
            package.slot_order = {str(key): bool(found) for key, found in index["slot_order"].items()}
            for name, data in index["functions"].items():
                package.functions[name] = CompiledFunction.from_json(data)
            for digest in {function.model for function in package.functions.values()}:
                recipes = json.loads((self._folder / f"{self._key}-{digest}.weights.json").read_bytes())
                onnx = (self._folder / f"{self._key}-{digest}.onnx").read_bytes()
                model = CompiledModel(onnx, {name: from_json(data) for name, data in recipes.items()})
                if model.digest() != digest:
                    return None
                package.models[digest] = model
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PackageError):
            return None
        return package

    def store(self, package: CompiledPackage) -> None:
        """Write what is new. A folder that cannot be written to is no error: the next start translates again."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for digest, model in package.models.items():
                target = self._folder / f"{self._key}-{digest}.onnx"
                if not target.exists():
                    recipes = {name: to_json(recipe) for name, recipe in model.weights.items()}
                    self._write(f"{self._key}-{digest}.weights.json", json.dumps(recipes).encode())
                    self._write(target.name, model.onnx)
            index = {
                "function_names": package.function_names,
                "states": package.states,
                "originals_packed": package.originals_packed,
                "slot_order": package.slot_order,
                "functions": {name: asdict(function) for name, function in package.functions.items()},
            }
            self._write(f"{self._key}.json", json.dumps(index).encode())
        except OSError:
            return

    def _write(self, name: str, content: bytes) -> None:
        assert self._folder is not None
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".writing-")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            os.replace(temporary, self._folder / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
