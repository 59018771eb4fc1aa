"""Constrained decoding: grammars over token ids with llguidance (the extra `structured`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.chat.tokenizer import WORD_BOUNDARY, Tokenizer
from llm_gemma_coreml.errors import MissingDependencyError, RequestError

INSTALL_HINT = "Install it with: pip install 'llm-gemma-coreml[structured]'"
_POSITION = re.compile(r"\bat [0-9]+\([0-9]+\): (?:failed to compile JSON schema: )?")
MAX_GRAMMAR_CHARACTERS = 1_000_000


def hint_if_missing() -> str:
    """What holds calls to their form, as a sentence after a space; "" if it is installed."""
    if has_llguidance():
        return ""
    return f" The package llguidance would hold calls to their form. {INSTALL_HINT}"


class GrammarConstraint:
    """One reply's grammar and how far the reply has come in it; an `engine.request.TokenConstraint`."""

    def __init__(self, matcher: Any, pieces: int, vocabulary_size: int, stop_ids: Sequence[int], what: str) -> None:
        self._matcher = matcher
        self._stop_ids = tuple(stop_ids)
        self._vocabulary_size = vocabulary_size
        self._what = what
        self._bits = np.zeros((1, (pieces + 31) // 32), dtype=np.int32)
        self._pieces = min(pieces, vocabulary_size)

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.bool_] | None]:
        """len(drafts) + 1 rows of [vocabulary]: what may come next, and after each draft."""
        rows = [self._mask()]
        consumed = 0
        for draft in drafts:
            allowed = 0 <= draft < self._vocabulary_size and rows[-1][draft]
            if not allowed or draft in self._stop_ids:
                break
            if not self._matcher.consume_token(draft):
                self._fail()
            consumed += 1
            rows.append(self._mask())
        if consumed and not self._matcher.rollback(consumed):
            self._fail()
        return [*rows, *[None] * (len(drafts) + 1 - len(rows))]

    def forced(self, limit: int) -> Sequence[int]:
        """Up to `limit` tokens that must come next."""
        if limit <= 0 or self._matcher.is_stopped():
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:limit])

    def advance(self, token: int) -> None:
        """`token` was accepted. Raises RequestError if the grammar forbids it."""
        if token in self._stop_ids and self.complete():
            return
        if not self._matcher.consume_token(token):
            self._fail()

    def complete(self) -> bool:
        """True if the reply so far is whole: it may end here."""
        return bool(self._matcher.is_accepting())

    def _mask(self) -> NDArray[np.bool_]:
        from llguidance.numpy import fill_next_token_bitmask

        if self._matcher.is_error():
            self._fail()
        if self._matcher.is_stopped():  # nothing but the end may follow
            mask = np.zeros(self._vocabulary_size, dtype=np.bool_)
            mask[list(self._stop_ids)] = True
            return mask

        fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            self._fail()
        bits = np.unpackbits(self._bits[0].view(np.uint8), count=self._pieces, bitorder="little")
        if self._pieces < self._vocabulary_size:  # columns without a piece
            bits = np.pad(bits, (0, self._vocabulary_size - self._pieces))
        return bits.view(np.bool_)

    def _fail(self) -> None:
        problem = self._matcher.get_error() or "it does not allow the token"
        if "NoExtension" in problem:
            problem = "nothing satisfies it"
        raise RequestError(f"The reply cannot follow {self._what}: {_in_one_line(problem)}. Use a simpler one.")


class GrammarCompiler:
    """Makes constraints for one model. The tokenizer's trie is built when first needed (a second or so), then kept.

    vocabulary_size: columns of the model's logits. stop_ids: the ids that may end a reply.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()
        self._built: Any = None

    def constraint(self, lark: str, what: str) -> GrammarConstraint:
        """A constraint for the Lark grammar; `what` names its origin in errors ("the JSON schema").

        Raises MissingDependencyError without llguidance, RequestError for a grammar that cannot be compiled.
        """
        if len(lark) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(f"{what[:1].upper()}{what[1:]} is larger than {MAX_GRAMMAR_CHARACTERS} characters.")
        trie = self._trie()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(trie, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"Cannot compile {what}: {_in_one_line(matcher.get_error())}. Simplify it.")
        constraint = GrammarConstraint(matcher, trie.vocab_size, self._vocabulary_size, self._stop_ids, what)
        constraint.masks(())  # fails here, before anything is computed, if no reply at all satisfies the grammar
        return constraint

    def prepare(self) -> None:
        """Build the tokenizer's trie now. Raises MissingDependencyError without llguidance."""
        self._trie()

    def _trie(self) -> Any:
        with self._lock:
            if self._built is None:
                require_llguidance()
                from llguidance import LLTokenizer, TokenizerWrapper

                pieces = TokenizerWrapper(_Pieces(self._tokenizer, self._stop_ids[0]))
                self._built = LLTokenizer(pieces, eos_token=self._stop_ids)
            return self._built


class _Pieces:
    """The vocabulary in the form that llguidance reads: bytes of each id, ids of control tokens, text to ids."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos
        self.bos_token_id = tokenizer.find_control("<bos>")
        self.special_token_ids: list[int] = []
        self.tokens: list[bytes] = []
        for token, piece in enumerate(tokenizer.pieces()):
            if tokenizer.is_control(token):
                self.special_token_ids.append(token)
                self.tokens.append(piece.encode("utf-8"))
            elif tokenizer.is_byte(token):
                self.tokens.append(bytes([int(piece[3:-1], 16)]))
            else:
                self.tokens.append(piece.replace(WORD_BOUNDARY, " ").encode("utf-8", "replace"))

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode_text(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def require_llguidance() -> None:
    """Raise MissingDependencyError if llguidance is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f"Schemas and forced tool calls need the package llguidance. {INSTALL_HINT}") from error


def has_llguidance() -> bool:
    """True if llguidance can be imported."""
    try:
        require_llguidance()
    except MissingDependencyError:
        return False
    return True


def _in_one_line(problem: str) -> str:
    """llguidance's message without its position in the grammar, which the user has not written."""
    return _POSITION.sub("", " ".join(problem.split()))[:300].rstrip(". ") or "unknown reason"
