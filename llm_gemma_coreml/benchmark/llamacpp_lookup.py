"""llama.cpp's own prompt lookup (`ngram-simple`) as a side of the benchmark of speculation, greedy.

Its library drafts and runs the model; the loop around them is the one of its tools, without their sampler: a call for
the known token and the drafts, of which those are accepted that are the model's own choice. Run as a program:
`python -m llm_gemma_coreml.benchmark.llamacpp_lookup DIRECTORY GGUF THREADS CONTEXT NGRAM DRAFT`.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llm_gemma_coreml.benchmark.llamacpp import BATCH, LlamaCpp
from llm_gemma_coreml.benchmark.side import BenchmarkError, Continuation, SideProcess, serve
from llm_gemma_coreml.benchmark.speculation import RIVAL, Continue, OpenRival

_SYMBOL = "_Z25common_ngram_simple_draftRK26common_ngram_simple_configRKSt6vectorIiSaIiEEi"
"""common_ngram_simple_draft(common_ngram_simple_config const&, std::vector<int> const&, int)"""


class _Config(ctypes.Structure):
    """common_ngram_simple_config."""

    _fields_ = (("ngram", ctypes.c_uint16), ("draft", ctypes.c_uint16))


class _Vector(ctypes.Structure):
    """std::vector<int>: returned like any struct of its size, through a pointer that the caller passes."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))


class NgramDrafts:
    """Drafts of the library's `common_ngram_simple_draft` over a text that grows.

    ngram: tokens to look up; draft: most tokens to draft. Raises BenchmarkError if the library is not there, cannot be
    loaded or does not have the function. libllama must have been opened before.
    """

    def __init__(self, directory: Path, ngram: int, draft: int, room: int) -> None:
        paths = [path for end in ("so", "dylib") for path in sorted(directory.glob(f"libllama-common*.{end}*"))]
        if not paths:
            raise BenchmarkError(f"{directory} holds no libllama-common: its prompt lookup cannot be measured.")
        try:
            library = ctypes.CDLL(str(paths[0]))
            self._function, self._delete = library[_SYMBOL], library["_ZdlPv"]
        except (OSError, AttributeError) as error:
            raise BenchmarkError(f"{paths[0]} does not offer prompt lookup as it is known here: {error}") from None
        self._function.restype = _Vector
        self._function.argtypes = [ctypes.POINTER(_Config), ctypes.POINTER(_Vector), ctypes.c_int32]
        self._delete.restype, self._delete.argtypes = None, [ctypes.c_void_p]
        self._config = _Config(ngram, draft)
        self._tokens = (ctypes.c_int32 * room)()
        self._length = 0

    def reset(self, tokens: Sequence[int]) -> None:
        """Start with this text."""
        self._tokens[: len(tokens)] = list(tokens)
        self._length = len(tokens)

    def append(self, token: int) -> None:
        """The text goes on; raises IndexError if it outgrows `room`."""
        self._tokens[self._length] = token
        self._length += 1

    def after(self, token: int) -> list[int]:
        """Drafts for what follows `token`, which follows the text; empty if nothing is found."""
        start = ctypes.addressof(self._tokens)
        end = start + 4 * self._length
        found = self._function(ctypes.byref(self._config), ctypes.byref(_Vector(start, end, end)), token)
        if not found.begin:
            return []
        drafts = list((ctypes.c_int32 * ((found.end - found.begin) // 4)).from_address(found.begin))
        self._delete(found.begin)
        return drafts


class LlamaCppLookup(LlamaCpp):
    """llama.cpp, continuing texts greedily with its prompt lookup or without."""

    def __init__(self, directory: Path, model: Path, threads: int, context: int, ngram: int, draft: int) -> None:
        super().__init__(directory, model, threads, context)
        self._sizes = ngram, draft

    def load(self) -> float:
        seconds = super().load()
        self._drafts = NgramDrafts(self._directory, *self._sizes, room=self._context_tokens)
        return seconds

    def generate(self, ids: Sequence[int], drafting: bool, count: int, stop_ids: Sequence[int]) -> dict[str, object]:
        """Continue `ids` by at most `count` tokens, a stop id not among them; the fields of a Continuation.

        The time is that of all rounds after the first token.
        """
        self._forget()
        for start in range(0, len(ids), BATCH):
            self._decode(ids[start : start + BATCH], all_logits=False)
        self._drafts.reset(ids)
        token = self._choice(-1)
        tokens = [] if token in stop_ids else [token]
        rounds = drafted = accepted = 0
        started = time.perf_counter()
        while token not in stop_ids and len(tokens) < count:
            drafts = self._drafts.after(token)[: count - len(tokens) - 1] if drafting else []
            depth = self._position
            self._decode([token, *drafts], all_logits=True)
            chosen = self._agreed(drafts)
            if len(chosen) <= len(drafts):
                self._rewind(depth + len(chosen))
            rounds, drafted, accepted = rounds + 1, drafted + len(drafts), accepted + len(chosen) - 1
            for following in chosen:
                self._drafts.append(token)
                token = following
                if token in stop_ids:
                    break
                tokens.append(token)
        seconds = time.perf_counter() - started
        return {"tokens": tokens, "seconds": seconds, "rounds": rounds, "drafted": drafted, "accepted": accepted}

    def _agreed(self, drafts: Sequence[int]) -> list[int]:
        """The model's choices after the known token and after each draft that is the choice before it."""
        chosen = [self._choice(0)]
        for row, draft in enumerate(drafts, 1):
            if chosen[-1] != draft:
                break
            chosen.append(self._choice(row))
        return chosen

    def _choice(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        if not logits:
            raise BenchmarkError(f"llama.cpp has no logits for row {row}.")
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


class LookupProcess(SideProcess):
    """LlamaCppLookup in a process of its own."""

    def continuation(self, ids: Sequence[int], drafting: bool, count: int, stop_ids: Sequence[int]) -> Continuation:
        """See LlamaCppLookup.generate."""
        return Continuation(**self.ask("generate", list(ids), drafting, count, list(stop_ids)))


def opener(directory: Path, model: Path, threads: int, sizes: tuple[int, int]) -> OpenRival:
    """llama.cpp as the rival of `speculation.run`; sizes: (tokens to look up, most to draft), each below 65536."""

    @contextmanager
    def opened(context: int) -> Iterator[Continue]:
        room = context + sizes[1] + 1  # rejected drafts need places too
        arguments = [str(argument) for argument in (directory, model, threads, room, *sizes)]
        with LookupProcess(RIVAL, "llm_gemma_coreml.benchmark.llamacpp_lookup", arguments) as process:
            process.load()
            yield process.continuation

    return opened


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[3:7]]
    side = LlamaCppLookup(Path(sys.argv[1]), Path(sys.argv[2]), *numbers)
    serve(side, ("load", "generate"))
