"""What is asked of the engine, and what it answers: requests, token streams, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "cancelled", "stop_check", "constraint"]
Speculate = Literal["auto", "off"] | int


@dataclass(frozen=True)
class SamplingParameters:
    """How a token is drawn. temperature 0 is greedy. Randomness is keyed by (seed, position): same seed, same text."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


class TokenConstraint(Protocol):
    """A grammar over token ids. Used on the engine thread only."""

    def masks(self, drafts: Sequence[int]) -> list[NDArray[np.bool_] | None]:
        """Allowed tokens for the next token and after each draft: len(drafts) + 1 rows of [vocabulary] (None = all
        allowed). Rows after a draft that the grammar forbids may be anything. Does not change the state."""

    def forced(self, limit: int) -> Sequence[int]:
        """Up to `limit` tokens that must come next (used as drafts); empty if the next token is open."""

    def advance(self, token: int) -> None:
        """`token` was accepted."""

    def complete(self) -> bool:
        """True if the text so far is a whole sentence of the grammar (it may end here)."""


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. token_ids is the whole prompt, `<bos>` included; the engine reuses what it holds already."""

    token_ids: tuple[int, ...]
    max_tokens: int | None = None
    """None: until a stop id or the end of the context."""
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingParameters = SamplingParameters()
    speculate: Speculate = "auto"
    constraint: TokenConstraint | None = None
    stop_check: Callable[[int], bool] | None = None
    """Called on the engine thread with each token of the output in order (stop ids excluded); True ends the output
    after that token (finish reason "stop_check")."""
    pinned: tuple[tuple[int, ...], ...] = ()
    """Token ids of documents and earlier turns that drafters may look into."""


@dataclass
class DrafterStatistics:
    """Counts for one drafter in one response. The free token of each round is not counted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass
class GenerationStatistics:
    """Filled while the response is generated; final when the stream has ended. Times in seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, tokens whose K/V was held already."""
    output_tokens: int = 0
    """Stop id excluded."""
    time_to_first_token: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    """Target calls of the decoding loop."""
    drafters: dict[str, DrafterStatistics] = field(default_factory=dict)
    promotions: int = 0
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    """The stop id that ended the output, if one did."""
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for `usage.details`, `--json` and LangChain metadata; zeros that say nothing are left out."""
        drafted = sum(d.drafted for d in self.drafters.values())
        accepted = sum(d.accepted for d in self.drafters.values())
        details: dict[str, object] = {
            "cached_tokens": self.cached_tokens,
            "time_to_first_token": round(self.time_to_first_token, 4),
            "rounds": self.rounds,
            "finish_reason": self.finish_reason,
        }
        computed = self.prompt_tokens - self.cached_tokens
        if self.prefill_seconds > 0 and computed > 0:
            details["prefill_tokens_per_second"] = round(computed / self.prefill_seconds, 1)
        if self.decode_seconds > 0 and self.output_tokens > 1:
            details["decode_tokens_per_second"] = round((self.output_tokens - 1) / self.decode_seconds, 2)
        if self.rounds:
            details["tokens_per_round"] = round(self.output_tokens / self.rounds, 3)
        if drafted:
            details["drafted"] = drafted
            details["accepted"] = accepted
            details["drafters"] = {
                name: {"rounds": d.rounds, "drafted": d.drafted, "accepted": d.accepted}
                for name, d in self.drafters.items()
                if d.drafted
            }
        if self.promotions:
            details["promotions"] = self.promotions
        return details
