"""Token ids for the gates: short texts in Gemma's vocabulary, and text of any length made from them."""

from __future__ import annotations

import random

# The opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, public domain).
PROSE = (
    85305, 691, 6534, 531, 974, 1401, 20718, 529, 8116, 684, 1116, 12198, 580, 506, 4856, 236764, 532, 529,
    2963, 5017, 531, 776, 236787, 3622, 653, 10911, 1304, 1053, 154312, 524, 1131, 506, 2260, 1116, 12198,
    691, 6013, 236764, 840, 625, 1053, 951, 7829, 653, 23695, 528, 625, 236764, 623, 624, 1144, 563, 506,
    1161, 529, 496, 2260, 2098, 3305, 32858, 623, 31048, 7829, 653, 23695, 7462, 108, 4324, 1304, 691, 11337,
    528, 1116, 1852, 3666, 568, 527, 1388, 618, 1304, 1451, 236764, 573, 506, 3425, 1719, 1603, 1116, 2597,
    1401, 105662, 532, 29123, 779, 3363, 506, 17132, 529, 3043, 496, 99414, 236772, 10864, 1093, 577, 5367,
    506, 13007, 529, 3978, 872, 532, 24374, 506, 150497, 236764, 1056, 15937, 496, 7286, 62524, 607, 9514,
    6114, 11536, 3107, 684, 1116, 236761,
)  # fmt: skip
# Two short Python functions, given twice.
CODE = (
    2063, 2433, 236769, 2690, 236764, 3558, 1473, 107, 140, 2060, 2962, 808, 3558, 109, 2063, 44803, 236769,
    2690, 236764, 3558, 1473, 107, 140, 2060, 236743, 236778, 808, 568, 2690, 900, 3558, 236768, 109, 2063,
    2433, 236769, 2690, 236764, 3558, 1473, 107, 140, 2060, 2962, 808, 3558, 109, 2063, 44803, 236769,
)  # fmt: skip
# Records in JSON, the first of them given twice.
RECORDS = (
    14937, 1201, 1083, 623, 55169, 827, 623, 9707, 1083, 236743, 236800, 236812, 236764, 623, 14973, 1083,
    236743, 236778, 236783, 107, 14937, 1201, 1083, 623, 24438, 827, 623, 9707, 1083, 236743, 236778, 236770,
    236764, 623, 14973, 1083, 236743, 236825, 236783, 107, 14937, 1201, 1083, 623, 5127, 827, 623, 9707, 1083,
    236743, 236825, 236810, 236764, 623, 14973, 1083, 236743, 236778, 236783, 107, 14937, 1201, 1083, 623,
    55169, 827, 623, 9707, 1083, 236743, 236800, 236812, 236764, 623, 14973, 1083, 236743, 236778, 236783,
    107, 14937, 1201, 1083, 623, 24438, 827, 623, 9707, 1083, 236743, 236778, 236770, 236764,
)  # fmt: skip


def prompts(vocabulary_size: int, bos_id: int) -> dict[str, tuple[int, ...]]:
    """Short prompts by name, `<bos>` first. Ids beyond a smaller vocabulary are folded into it."""
    texts = {"prose": PROSE, "code": CODE, "records": RECORDS}
    return {name: (bos_id, *(token % vocabulary_size for token in text)) for name, text in texts.items()}


def long_prompt(length: int, vocabulary_size: int, bos_id: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of `length` tokens: pieces of the texts in random order, ending in the prose."""
    chance = random.Random(seed)
    tokens = [bos_id]
    while len(tokens) < length:
        text = chance.choice((PROSE, CODE, RECORDS))
        start = chance.randrange(len(text) - 8)
        tokens += text[start : start + chance.randrange(8, 48)]
    tail = PROSE[: min(len(PROSE), length // 2)]
    tokens[length - len(tail) : length] = tail
    return tuple(token % vocabulary_size for token in tokens[:length])
