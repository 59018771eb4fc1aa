"""Prompt lookup: propose what followed the last time the session's latest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_gemma_coreml.engine.session import Session

MINIMUM_MATCH = 3
MAXIMUM_MATCH = 16
MAXIMUM_CANDIDATES = 24
"""Earlier occurrences of the last tokens that are compared, so that frequent n-grams cannot cost a scan."""

_TOKEN_BITS = 21
_KEY_MASK = (1 << (_TOKEN_BITS * MINIMUM_MATCH)) - 1


class NgramIndex:
    """A growing list of tokens that finds the earlier places where its last tokens (or others) occurred.

    Every position is linked to the one before it that ends in the same MINIMUM_MATCH tokens, so that adding
    and removing a token cost O(1) and a search at most MAXIMUM_CANDIDATES * MAXIMUM_MATCH comparisons.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._keys: list[int] = []
        self._earlier: list[int] = []
        self._latest: dict[int, int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        latest, keys, earlier = self._latest, self._keys, self._earlier
        key = keys[-1] if keys else _KEY_MASK
        for position, token in enumerate(tokens, len(self.tokens)):
            key = ((key << _TOKEN_BITS) | token) & _KEY_MASK
            keys.append(key)
            earlier.append(latest.get(key, -1))
            latest[key] = position
        self.tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        for position in range(len(self.tokens) - 1, length - 1, -1):
            if self._earlier[position] < 0:
                del self._latest[self._keys[position]]
            else:
                self._latest[self._keys[position]] = self._earlier[position]
        del self.tokens[length:], self._keys[length:], self._earlier[length:]

    def reset(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the content, at the cost of what differs from the present content."""
        kept = _common_prefix(self.tokens, tokens)
        if len(self.tokens) - kept > len(tokens):
            self.__init__()  # type: ignore[misc]  # cheaper than undoing position by position
            kept = 0
        self.truncate(kept)
        self.extend(tokens[kept:])

    def find(self, suffix: Sequence[int]) -> tuple[int, int]:
        """(position after the match, its length) for the longest, then latest match of the end of `suffix`.

        Length 0 if fewer than MINIMUM_MATCH tokens match. A match that ends at the end of the content has no
        continuation and is not returned.
        """
        if len(suffix) < MINIMUM_MATCH:
            return 0, 0
        key = 0
        for token in suffix[-MINIMUM_MATCH:]:
            key = ((key << _TOKEN_BITS) | token) & _KEY_MASK
        candidate = self._latest.get(key, -1)
        if candidate == len(self.tokens) - 1 and candidate >= 0:
            candidate = self._earlier[candidate]
        best_end, best_length = 0, 0
        for _ in range(MAXIMUM_CANDIDATES):
            if candidate < 0:
                break
            length = self._match_length(candidate, suffix)
            if length > best_length:
                best_end, best_length = candidate + 1, length
                if length == MAXIMUM_MATCH:
                    break
            candidate = self._earlier[candidate]
        return (best_end, best_length) if best_length >= MINIMUM_MATCH else (0, 0)

    def _match_length(self, end: int, suffix: Sequence[int]) -> int:
        """How many tokens up to position `end` equal the end of `suffix`, at most MAXIMUM_MATCH."""
        tokens, limit = self.tokens, min(MAXIMUM_MATCH, end + 1, len(suffix))
        length = 0
        while length < limit and tokens[end - length] == suffix[-1 - length]:
            length += 1
        return length

    def continuation(self, start: int, limit: int) -> list[int]:
        """Up to `limit` tokens from position `start` on."""
        return self.tokens[start : start + limit]


def match_grade(length: int) -> int:
    """Class of certainty of a match of that many tokens, 0 (short) to 3 (long)."""
    return 0 if length < 4 else 1 if length < 6 else 2 if length < 10 else 3


class PromptLookup:
    """Drafts from the session's own tokens (prompt and output)."""

    name = "prompt-lookup"

    def __init__(self) -> None:
        self._index = NgramIndex()
        self.grade = 0

    def begin(self, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        self._index.reset(tokens)

    def propose(self, limit: int) -> Sequence[int]:
        index = self._index
        start, length = index.find(index.tokens[-MAXIMUM_MATCH:])
        if length == 0:
            return ()
        self.grade = match_grade(length)
        drafts = index.continuation(start, limit)
        period = len(drafts)
        while len(drafts) < limit:  # the match runs into the end: go on repeating, as the text seems to do
            drafts.append(drafts[-period])
        return drafts

    def observe(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        self._index.extend(tokens)


class PromptLookupFactory:
    """Makes a PromptLookup for every session."""

    name = PromptLookup.name

    def create(self, session: Session) -> PromptLookup:
        return PromptLookup()


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    limit = min(len(left), len(right))
    step = 4096
    for start in range(0, limit, step):  # compare slices first: far faster than token by token
        end = min(start + step, limit)
        if list(left[start:end]) != list(right[start:end]):
            while left[start] == right[start]:
                start += 1
            return start
    return limit
