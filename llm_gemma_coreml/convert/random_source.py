"""A source of random weights in a real model's shape, made tensor by tensor: for planning, and for tests of scale.

The layers' weights lie on the int4 grid, like those of a checkpoint trained for int4; the embedding does not. The
sizes of the numbers are such that activations stay in the range of a real model's. The text is meaningless.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np

from llm_gemma_coreml.bundle.store import RANDOM_WEIGHTS
from llm_gemma_coreml.convert.quantise import Quantised
from llm_gemma_coreml.convert.quantise_search import BLOCK
from llm_gemma_coreml.convert.random_models import random_assistant_config, random_config
from llm_gemma_coreml.convert.source import HEAD_NORMS, Float32, ModelConfig, TokenizerFacts, check_config, expected_shapes

_GROUP_ROWS = 256
"""Rows that are made together: any range of rows can be had without making those before it."""
_SPREAD = 2.6
"""Standard deviation of the int4 values: few are cut off at -8 and 7."""
_GRID = np.array([round(_SPREAD * NormalDist().inv_cdf((i + 0.5) / 256)) for i in range(256)], np.int8).clip(-8, 7)
"""int4 value for each random byte: normally distributed."""
_LOGIT_SPREAD = 2.0
_SCORE_SPREAD = 2.0


class RandomSource:
    """Random weights as a `Source`. The same configuration, seed and tokenizer give the same numbers anywhere."""

    chat_template: str | None = None

    def __init__(self, config: ModelConfig, seed: int = 0, tokenizer: Path | None = None) -> None:
        """tokenizer: a `tokenizer.model` or `tokenizer.json` with the configuration's vocabulary; else a stand-in.

        Raises SourceError for a configuration or tokenizer that cannot be used.
        """
        self.path = Path(config.name)
        check_config(self.path, config)
        self.config = replace(
            config, name=f"{config.name}-random", licence="None: the weights are random numbers", licence_url=""
        )
        self.tokenizer_facts = TokenizerFacts(bos_id=2, stop_ids=(1, 106) if config.vocabulary_size > 106 else (1,))
        self._seed = seed
        self._shapes = expected_shapes(config)
        self._tokenizer = tokenizer

    @classmethod
    def of_model(cls, name: str, seed: int = 0, tokenizer: Path | None = None) -> RandomSource:
        """Random weights in the shape of a published model. Raises SourceError for an unknown name."""
        return cls(random_config(name), seed, tokenizer)

    @classmethod
    def of_assistant(cls, name: str, seed: int = 0) -> RandomSource:
        """The same for a published model's assistant. Raises SourceError if the shape of none is known."""
        return cls(random_assistant_config(name), seed)

    @property
    def description(self) -> str:
        return f"{RANDOM_WEIGHTS} (seed {self._seed}) in the shape of {self.path.name}"

    @property
    def notes(self) -> tuple[str, ...]:
        """For the bundle: that it is none to talk to."""
        return ("The weights are random: whatever this model writes is meaningless.", f"Tokenizer: {self._tokenizer_model[1]}.")

    def tensor(self, name: str) -> Float32:
        shape = self._shapes[name]
        return self._vector(name, shape[0]) if len(shape) == 1 else self.rows(name, 0, shape[0])

    def rows(self, name: str, start: int, stop: int) -> Float32:
        if name != "embedding":
            return self._on_grid(name, start, stop, 8).dequantise()
        columns = self._shapes[name][1]
        size = np.float32(_LOGIT_SPREAD / math.sqrt(columns))
        whole = np.empty((stop - start, columns), np.float32)
        for group, inside, outside in _groups(start, stop):
            whole[outside] = self._random(name, group).standard_normal((_GROUP_ROWS, columns), np.float32)[inside]
        whole *= size
        return whole

    def blocks(self, name: str, bits: int) -> Quantised | None:
        if name == "embedding" or bits not in (4, 8):
            return None
        return self._on_grid(name, 0, self._shapes[name][0], bits)

    def tokenizer_model(self) -> bytes:
        return self._tokenizer_model[0]

    def close(self) -> None:
        """Nothing is open."""

    @cached_property
    def _tokenizer_model(self) -> tuple[bytes, str]:
        from llm_gemma_coreml.convert.stand_in_tokenizer import stand_in

        return stand_in(self.config.vocabulary_size, self._tokenizer)

    def _on_grid(self, name: str, start: int, stop: int, bits: int) -> Quantised:
        """int4 values whose products with inputs of size one have size one."""
        columns = self._shapes[name][1]
        unit = 1 / (_SPREAD * math.sqrt(columns))
        values = np.empty((stop - start, columns), np.int8)
        scales = np.empty((stop - start, columns // BLOCK), np.float16)
        for group, inside, outside in _groups(start, stop):
            random = self._random(name, group)
            bytes_ = random.integers(0, 1 << 64, _GROUP_ROWS * columns // 8, np.uint64).view(np.uint8)
            np.take(_GRID, bytes_.reshape(_GROUP_ROWS, columns)[inside], out=values[outside])
            sizes = random.random((_GROUP_ROWS, columns // BLOCK), np.float32)[inside]
            scales[outside] = (sizes + np.float32(0.5)) * np.float32(unit)
        return Quantised(values, scales, bits)

    def _vector(self, name: str, length: int) -> Float32:
        """A norm's weight or a layer's scalar: around one, or what gives attention scores a fair size."""
        middle = 1.0
        if name.rpartition(".")[2] in HEAD_NORMS:
            # The two norms together: scores are query_scale times a sum of `length` products.
            middle = math.sqrt(_SCORE_SPREAD / (self.config.query_scale * math.sqrt(length)))
        noise = self._random(name, 0).standard_normal(length, np.float32)
        return np.float32(middle) * (1 + np.float32(0.05) * noise)

    def _random(self, name: str, group: int) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}/{group}".encode()).digest()
        return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


def _groups(start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """(group, its rows that are wanted, where they belong in the result) for rows start .. stop - 1."""
    for group in range(start // _GROUP_ROWS, -(-stop // _GROUP_ROWS)):
        first = group * _GROUP_ROWS
        low, high = max(start, first), min(stop, first + _GROUP_ROWS)
        yield group, slice(low - first, high - first), slice(low - start, high - start)
