"""A tiktoken encoding that gives exactly the ids of a bundle's tokenizer: for text splitters and token budgets.

tiktoken merges bytes by rank, SentencePiece merges characters by score. The two agree if whole characters come first
among the ranks (bytes, then characters, then pieces by score), if ranks are translated to ids afterwards, and if the
pattern that cuts the text never cuts inside a piece. What cannot be made exact is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_adapter.bundles import locate
from langchain_adapter.encoding_ranks import RankTable, rank_table
from llm_gemma_coreml.chat.tokenizer import WORD_BOUNDARY, Tokenizer
from llm_gemma_coreml.errors import BundleError, MissingDependencyError, RequestError

try:
    import tiktoken
    import tiktoken.registry
except ModuleNotFoundError as error:
    raise MissingDependencyError("gemma_encoding needs tiktoken: pip install 'llm-gemma-coreml[langchain]'") from error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_MERGED_FASTER = 2
"""With more bytes per character than this, SentencePiece itself is the faster of the two: it merges characters."""


def gemma_encoding(bundle: str | Path = "gemma3-local", name: str | None = None) -> GemmaEncoding:
    """The encoding of a bundle's tokenizer, registered with tiktoken so that `tiktoken.get_encoding(name)` finds it.

    bundle: the name or alias of an installed model, or a bundle's folder. name: how tiktoken shall call it; default: the
    bundle's family ("gemma3"). No control token ever comes from text, and no `<bos>` is added. Raises BundleError,
    ModelNotInstalledError, and RequestError if tiktoken knows that name as another encoding.
    """
    from llm_gemma_coreml.bundle.manifest import load_manifest

    folder = locate(str(bundle))
    manifest = load_manifest(folder)
    path = folder / manifest.tokenizer
    name = name or manifest.family
    if name not in tiktoken.registry.ENCODINGS and name in tiktoken.list_encoding_names():
        raise RequestError(f"tiktoken has an encoding {name!r} of its own: pass another name.")
    return _registered(name, path)


def _registered(name: str, path: Path) -> GemmaEncoding:
    known = tiktoken.registry.ENCODINGS.get(name)
    if known is None:
        known = tiktoken.registry.ENCODINGS.setdefault(name, GemmaEncoding(name, path))
    if not isinstance(known, GemmaEncoding) or not known.is_of(path):
        raise RequestError(f"The encoding {name!r} is registered for another tokenizer than {path}: pass another name.")
    return known


class GemmaEncoding(tiktoken.Encoding):
    """tiktoken's `Encoding` for one SentencePiece file. Ids are those of the file; safe to use from several threads."""

    def __init__(self, name: str, path: str | Path) -> None:
        """Reads the file at `path`. Raises BundleError if it cannot be encoded exactly."""
        self._path = Path(path)
        self._tokenizer = Tokenizer(self._path)
        self._table: RankTable = rank_table(self._tokenizer)
        super().__init__(name, pat_str=self._table.pattern, mergeable_ranks=self._table.ranks, special_tokens={})
        self.max_token_value = len(self._table.bytes_of) - 1

    def is_of(self, path: Path) -> bool:
        """Whether this encodes as the file at `path` does."""
        return self._path == path or self._path.read_bytes() == path.read_bytes()

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids of `text`; never control tokens."""
        if not text.isascii():
            encoded = text.encode("utf-8", "replace")  # half characters become "?", as in the bundle's tokenizer
            if len(encoded) > _MERGED_FASTER * len(text):
                return self._tokenizer.encode_text(text)
            text = encoded.decode("utf-8")
        ids: list[int] = self._merged(text).tolist()
        return ids

    def encode(
        self,
        text: str,
        *,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = (),
    ) -> list[int]:
        """The ids of `text`. There are no special tokens, so there is none to allow or to refuse."""
        return self.encode_ordinary(text)

    def encode_to_numpy(
        self,
        text: str,
        *,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = (),
    ) -> NDArray[np.uint32]:
        """The ids of `text`, uint32 [number of tokens]."""
        import numpy as np

        return np.array(self.encode_ordinary(text), np.uint32)

    def encode_single_token(self, text_or_bytes: str | bytes) -> int:
        """The id of a piece that is exactly this text. Raises KeyError if there is none."""
        text = text_or_bytes.encode() if isinstance(text_or_bytes, str) else text_or_bytes
        ids = self._table.ids_of(self._table.ranks[text])
        if len(ids) != 1:
            raise KeyError(text_or_bytes)
        return ids[0]

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """The UTF-8 bytes that the ids stand for; control tokens stand for none. Raises KeyError for an unknown id."""
        return b"".join(map(self.decode_single_token_bytes, tokens))

    def decode(self, tokens: Sequence[int], errors: str = "replace") -> str:
        """The text that the ids stand for."""
        return self.decode_bytes(tokens).decode("utf-8", errors=errors)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one id. Raises KeyError if there is no such id."""
        if not 0 <= token <= self.max_token_value:
            raise KeyError(token)
        return self._table.bytes_of[token]

    def decode_with_offsets(self, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """The text, and where in it each token starts. Control tokens have no place in a text: leave them out."""
        bare = next((token for token in tokens if not self.decode_single_token_bytes(token)), None)
        if bare is not None:
            raise KeyError(bare)
        text, offsets = super().decode_with_offsets(tokens)
        return str(text), list(offsets)

    def token_byte_values(self) -> list[bytes]:
        """The bytes of all ids, in their order; empty for control tokens."""
        return list(self._table.bytes_of)

    @property
    def eot_token(self) -> int:
        """The id of `<eos>`."""
        return self._table.end_of_text

    def encode_with_unstable(self, text: str, **options: Any) -> NoReturn:
        """Not offered."""
        raise NotImplementedError("A Gemma encoding has no unstable encoding: use encode.")

    def _encode_single_piece(self, text_or_bytes: str | bytes) -> NoReturn:
        raise NotImplementedError("A Gemma encoding cannot encode pieces out of their text: use encode.")

    def _encode_only_native_bpe(self, text: str) -> list[int]:
        return self.encode_ordinary(text)

    def _encode_bytes(self, text: bytes) -> NoReturn:
        raise NotImplementedError("A Gemma encoding encodes text, not bytes: use encode.")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.name, self._path)

    def _merged(self, text: str) -> NDArray[np.uint32]:
        """The ids as tiktoken finds them."""
        import numpy as np

        text = text.replace(WORD_BOUNDARY, " ")  # they are one piece
        ranks = np.frombuffer(self._core_bpe.encode_to_tiktoken_buffer(text, set()), dtype=np.uint32)
        return self._table.ids(ranks)


def _restore(name: str, path: Path) -> GemmaEncoding:
    """The encoding in another process: the registered one if it is the same."""
    if not path.is_file():
        raise BundleError(f"The tokenizer {path} of the encoding {name!r} is gone: install the bundle again.")
    return _registered(name, path)
