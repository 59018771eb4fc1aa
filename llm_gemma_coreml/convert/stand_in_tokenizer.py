"""A tokenizer for weights that came without one: given, taken from the quick-start package, or made of bytes."""

from __future__ import annotations

from pathlib import Path

from llm_gemma_coreml.convert.random_models import VOCABULARY
from llm_gemma_coreml.convert.tokenizer import (
    SPACE,
    Piece,
    PieceKind,
    build_model,
    from_sentencepiece,
    from_tokenizer_json,
    piece_count,
)
from llm_gemma_coreml.errors import MissingDependencyError, SourceError

_MARKERS = ("<pad>", "<eos>", "<bos>", "<unk>")
_SMALLEST = len(_MARKERS) + 256 + 1


def stand_in(vocabulary_size: int, given: Path | None = None) -> tuple[bytes, str]:
    """A serialised SentencePiece model with that many pieces, and what it is, for people.

    given: a `tokenizer.model` or `tokenizer.json`. Without one, Gemma 3's from the quick-start package if it is installed and as
    large, else single bytes. Raises SourceError if `given` cannot be used or is of another size.
    """
    if given is not None:
        return _given(given, vocabulary_size), given.name
    taken = _from_quickstart() if vocabulary_size == VOCABULARY else None
    if taken is not None:
        return taken, "that of Gemma 3, from the quick-start package"
    return byte_model(vocabulary_size), "a stand-in, one token for each byte"


def _given(path: Path, vocabulary_size: int) -> bytes:
    try:
        content = path.read_bytes()
        is_json = path.suffix == ".json"
        model = from_tokenizer_json(content.decode(), str(path)) if is_json else from_sentencepiece(content, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read ({error}). Give a tokenizer.model or a tokenizer.json.") from error
    if piece_count(model) != vocabulary_size:
        raise SourceError(f"{path}: has {piece_count(model)} pieces, but the model has {vocabulary_size}. Use another tokenizer.")
    return model


def _from_quickstart() -> bytes | None:
    from llm_gemma_coreml.convert import quickstart

    if not quickstart.is_installed():
        return None
    try:
        source = quickstart.open_quickstart()
    except (SourceError, MissingDependencyError):
        return None  # an incomplete package is no reason to fail: it is wanted for its words only
    try:
        return source.tokenizer_model()
    finally:
        source.close()


def byte_model(vocabulary_size: int) -> bytes:
    """Markers, 256 bytes, the space, and words that no text produces (so that every id has a text), as many as needed.

    Raises SourceError for a vocabulary that cannot hold the bytes.
    """
    if vocabulary_size < _SMALLEST:
        raise SourceError(f"A vocabulary of {vocabulary_size} pieces is too small: {_SMALLEST} or more are needed.")
    pieces = [Piece(name, 0.0, PieceKind.CONTROL) for name in _MARKERS]
    pieces += [Piece(f"<0x{value:02X}>", 0.0, PieceKind.BYTE) for value in range(256)]
    pieces.append(Piece(SPACE, 0.0, PieceKind.NORMAL))
    pieces += [Piece(f"{SPACE}w{number}", -1e6, PieceKind.NORMAL) for number in range(_SMALLEST, vocabulary_size)]
    return build_model(pieces, "stand-in tokenizer")
