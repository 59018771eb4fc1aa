"""llama.cpp as a side of a benchmark: its shared library, driven through ctypes.

The parameter structs grow with each release, so they are handled as blocks of bytes: the library fills in its
defaults, and only the fields that have kept their place are set, after a look at their default values.
Run as a program: `python -m llm_gemma_coreml.benchmark.llamacpp DIRECTORY GGUF THREADS CONTEXT`.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llm_gemma_coreml.benchmark.side import BenchmarkError, process_memory, random_tokens, serve

BATCH = 2048
_PHYSICAL_BATCH = 512
_PARAMETER_BYTES = 1024
_FIRST_DEFAULTS = (512, 2048, 512, 1)
"""n_ctx, n_batch, n_ubatch, n_seq_max: the first four fields of llama_context_params and their defaults."""
_FLAG_DEFAULTS = bytes([0, 1, 1, 1, 1, 0])
"""embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified: six bools in a row, their defaults."""
_SWA_FULL = 4


class _Parameters(ctypes.Structure):
    """A parameter struct of unknown size, passed by value: larger than in any release."""

    _fields_ = (("data", ctypes.c_ubyte * _PARAMETER_BYTES),)


class _Batch(ctypes.Structure):
    """llama_batch, unchanged since 2023."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = _LOG_CALLBACK(lambda level, text, data: None)

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "llama_log_set": (None, [_LOG_CALLBACK, ctypes.c_void_p]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_Parameters, []),
    "llama_context_default_params": (_Parameters, []),
    "llama_model_load_from_file": (ctypes.c_void_p, [ctypes.c_char_p, _Parameters]),
    "llama_init_from_model": (ctypes.c_void_p, [ctypes.c_void_p, _Parameters]),
    "llama_set_n_threads": (None, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]),
    "llama_n_ctx": (ctypes.c_uint32, [ctypes.c_void_p]),
    "llama_model_get_vocab": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_vocab_n_tokens": (ctypes.c_int32, [ctypes.c_void_p]),
    "llama_get_memory": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llama_memory_clear": (None, [ctypes.c_void_p, ctypes.c_bool]),
    "llama_memory_seq_rm": (
        ctypes.c_bool,
        [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
    ),
    "llama_batch_init": (_Batch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
    "llama_decode": (ctypes.c_int32, [ctypes.c_void_p, _Batch]),
    "llama_synchronize": (None, [ctypes.c_void_p]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]),
}


def open_library(directory: Path) -> ctypes.CDLL:
    """libllama of that directory with its backends registered and its functions declared.

    Raises BenchmarkError if there is none, or if it lacks a function that is needed here.
    """
    candidates = [
        path
        for pattern in ("libllama.so*", "libllama.*.so", "libllama.dylib", "libllama.*.dylib", "llama.dll")
        for path in sorted(directory.glob(pattern))
    ]
    if not candidates:
        raise BenchmarkError(f"{directory} holds no libllama: give the directory with llama.cpp's libraries.")
    try:
        for pattern in ("libggml-base.*", "libggml.*"):
            for path in sorted(directory.glob(pattern)):
                ggml = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(candidates[0]), mode=ctypes.RTLD_GLOBAL)
        if hasattr(ggml, "ggml_backend_load_all_from_path"):
            ggml.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
            ggml.ggml_backend_load_all_from_path.restype = None
            ggml.ggml_backend_load_all_from_path(str(directory).encode())
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError, UnboundLocalError) as error:
        raise BenchmarkError(f"{candidates[0]} cannot be used: {error}") from None
    library.llama_log_set(_SILENT, None)
    library.llama_backend_init()
    return library


def context_parameters(library: ctypes.CDLL, context: int) -> _Parameters:
    """Parameters for a context of that many tokens, with the small sliding-window cache that its tools use.

    Raises BenchmarkError if the defaults are not where they have always been.
    """
    parameters: _Parameters = library.llama_context_default_params()
    data = bytearray(parameters.data)
    if struct.unpack_from("<4I", data) != _FIRST_DEFAULTS:
        raise BenchmarkError("This release of llama.cpp has other context parameters than are known here.")
    struct.pack_into("<3I", data, 0, context, BATCH, _PHYSICAL_BATCH)
    places = [at for at in range(64, 256, 8) if data[at : at + 6] == _FLAG_DEFAULTS]
    if len(places) != 1:
        raise BenchmarkError("The flags of this release's context parameters are not where they were.")
    data[places[0] + _SWA_FULL] = 0
    return _Parameters.from_buffer_copy(bytes(data))


class LlamaCpp:
    """The Side for llama.cpp. Tokens are random but the same in every run."""

    def __init__(self, directory: Path, model: Path, threads: int, context: int) -> None:
        self._directory, self._model_path = directory, model
        self._threads, self._context_tokens = threads, context
        self._position = 0

    def load(self) -> float:
        """Library, model and context, and one token to touch the weights."""
        start = time.perf_counter()
        self._library = library = open_library(self._directory)
        self._model = library.llama_model_load_from_file(str(self._model_path).encode(), library.llama_model_default_params())
        if not self._model:
            raise BenchmarkError(f"llama.cpp cannot load {self._model_path}.")
        parameters = context_parameters(library, self._context_tokens)
        self._context = library.llama_init_from_model(self._model, parameters)
        if not self._context or library.llama_n_ctx(self._context) < self._context_tokens:
            raise BenchmarkError(f"llama.cpp cannot make a context of {self._context_tokens} tokens.")
        library.llama_set_n_threads(self._context, self._threads, self._threads)
        self._vocabulary = int(library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model)))
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        self._decode(self._random(1), all_logits=True)
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        self._forget()
        seconds = 0.0
        while self._position < tokens:
            seconds += self._decode(self._random(min(BATCH, tokens - self._position)), all_logits=False)
        return seconds

    def calls(self, rows: int, count: int) -> list[float]:
        depth = self._position
        times = []
        for _ in range(count):
            times.append(self._decode(self._random(rows), all_logits=True))
            self._rewind(depth)
        return times

    def memory(self) -> dict[str, int]:
        return process_memory()

    def _random(self, count: int) -> list[int]:
        return random_tokens(self._position, count, self._vocabulary)

    def _forget(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        self._position = 0

    def _rewind(self, position: int) -> None:
        """Keep the first `position` tokens. Exact for the rows of the last call: they overwrote only what is out of the
        window of the position before them."""
        if not self._library.llama_memory_seq_rm(self._library.llama_get_memory(self._context), 0, position, -1):
            raise BenchmarkError("llama.cpp could not forget the last tokens.")
        self._position = position

    def _decode(self, tokens: Sequence[int], all_logits: bool) -> float:
        """One call; the time of the call itself, without filling in the batch."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            position = self._position + row
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = int(all_logits or row == len(tokens) - 1)
        start = time.perf_counter()
        status = self._library.llama_decode(self._context, batch)
        self._library.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        if status != 0:
            raise BenchmarkError(f"llama_decode failed with status {status} at position {self._position}.")
        self._position += len(tokens)
        return seconds


if __name__ == "__main__":
    serve(LlamaCpp(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
