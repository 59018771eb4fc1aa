"""Tokenizers for tests: Gemma 3's from the quick-start package, and a stand-in for Gemma 4's made from it.

Gemma 4 has the same pieces; only control tokens took over names, so renaming them gives a tokenizer with its ids.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import pytest

from llm_gemma_coreml.convert import quickstart
from llm_gemma_coreml.convert import tokenizer as convert_tokenizer

GEMMA4_NAMES = {
    46: "<|tool>",
    47: "<tool|>",
    48: "<|tool_call>",
    49: "<tool_call|>",
    50: "<|tool_response>",
    51: "<tool_response|>",
    52: '<|"|>',
    98: "<|think|>",
    100: "<|channel>",
    101: "<channel|>",
    105: "<|turn>",
    106: "<turn|>",
    255999: "<|image>",
    256000: "<|audio>",
    258880: "<|image|>",
    258881: "<|audio|>",
    258882: "<image|>",
    258883: "<audio|>",
    258884: "<|video|>",
}


@cache
def gemma3_model() -> Path:
    """Path of Gemma 3's SentencePiece model. Skips the test if the quick-start package is not installed."""
    path = _folder() / "gemma3.model"
    if not path.exists():
        if not quickstart.is_installed():
            pytest.skip("needs the quick-start package")
        source = quickstart.open_quickstart()
        _write(path, source.tokenizer_model())
        source.close()
    return path


@cache
def gemma4_model() -> Path:
    """Path of the stand-in for Gemma 4's SentencePiece model."""
    path = _folder() / "gemma4.model"
    if not path.exists():
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(gemma3_model().read_bytes())
        for token, name in GEMMA4_NAMES.items():
            proto.pieces[token].piece = name
            proto.pieces[token].type = 3
        _write(path, proto.SerializeToString())
    return path


def _folder() -> Path:
    """A folder kept between runs, of its own for each state of the code that builds the models."""
    builders = [Path(__file__), Path(convert_tokenizer.__file__)]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in builders)).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"llm-gemma-coreml-tests-{user}" / key
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _write(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(name, path)
