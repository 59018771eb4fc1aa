"""What speculative decoding brings: tokens of a round against the cost of a round."""

from __future__ import annotations

ACCEPTANCES = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def tokens_per_round(acceptance: float, drafts: int) -> float:
    """Expected tokens of a round of `drafts` drafts, each kept with the chance `acceptance` if those before it were."""
    return sum(acceptance**kept for kept in range(drafts + 1))


def speedup(tokens: float, plain: float, verify: float, drafting: float) -> float:
    """How many times faster than plain decoding; the times of a plain call, a verify call and of all drafting of a round."""
    return tokens * plain / (verify + drafting)


def break_even(drafts: int, plain: float, verify: float, drafting: float) -> float | None:
    """The acceptance at which a round just pays; None if it never does."""
    needed = (verify + drafting) / plain
    if needed > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if tokens_per_round(middle, drafts) < needed:
            low = middle
        else:
            high = middle
    return high
