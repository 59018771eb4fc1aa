"""What others measured, beside what our model of a step says of the same: is the model worth anything?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from llm_gemma_coreml.planning.devices import find_device
from llm_gemma_coreml.planning.shapes import PUBLISHED, CacheKind, ModelShape
from llm_gemma_coreml.planning.speculation import speedup
from llm_gemma_coreml.planning.step import call_milliseconds

TOLERANCE = 0.2
"""A figure counts as reproduced if ours is within that share of it."""
_OKA = "oka-yuji/coreml-llm-samples, Gemma 4 12B on an M4 Max"
_LUBE = "lube8163, Gemma 4 12B on an iPhone 14"
DRAFTER_MILLISECONDS = {32768: 18.0, 131072: 62.0}
"""One call of the published drafter on the GPU, by its width (published)."""
_DRAFTER_CALLS = 4
_VERIFY_ROWS = 4

PHONE_RUN = ModelShape(
    name="gemma-4-12b, one package a layer",
    origin=_LUBE,
    weights_basis="published",
    body_bytes=4_700_000_000,
    head_bytes=600_000_000,
    packages=49,
    sliding=CacheKind(layers=40, kv_heads=8, head_dim=256, query_heads=16),
    full=CacheKind(layers=8, kv_heads=1, head_dim=512, query_heads=16),
    ring=512,
    rungs=(512,),
)
"""48 packages of one layer, 5.3 GB read again for each token, 512 slots."""
_FEWEST_CALLS_FOR_8_TOKENS = 3
"""A first call without drafts, then two of at most 4 tokens each."""


@dataclass(frozen=True)
class Comparison:
    """One published figure and ours. error: (ours - theirs) / theirs."""

    what: str
    unit: str
    theirs: float
    ours: float
    source: str
    remark: str = ""

    @property
    def error(self) -> float:
        return self.ours / self.theirs - 1

    @property
    def reproduced(self) -> bool:
        return abs(self.error) <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "error": round(self.error, 3), "reproduced": self.reproduced}


def comparisons() -> list[Comparison]:
    """All published figures that are compared."""
    mac, phone = find_device("M4 Max"), find_device("iPhone 14")
    short, long = (call_milliseconds(PUBLISHED, mac, rung) for rung in PUBLISHED.rungs)
    verify = call_milliseconds(PUBLISHED, mac, PUBLISHED.rungs[0], _VERIFY_ROWS)
    drafting = _DRAFTER_CALLS * DRAFTER_MILLISECONDS[32768]
    token = call_milliseconds(PHONE_RUN, phone, 512) / 1000
    sweep = call_milliseconds(PHONE_RUN, phone, 512, _VERIFY_ROWS) / 1000
    return [
        Comparison("decoding at 32K", "ms/token", 90.51, short, _OKA),
        Comparison("decoding at 128K", "ms/token", 300.96, long, _OKA),
        Comparison("128K against 32K", "x", 300.96 / 90.51, long / short, _OKA),
        Comparison(
            "speculation, counting: 2.56 tokens a round",
            "x",
            1.47,
            speedup(2.56, short, verify, drafting),
            _OKA,
            "with the 18 ms that its drafter takes a call (published): the model says less, see below",
        ),
        Comparison("one token, packages read again", "s", 4.2, token, _LUBE, "they give 4.20 to 5.19 s"),
        Comparison(
            "speculation, all of 8 tokens in the fewest calls",
            "x",
            2.40,
            speedup(8 / _FEWEST_CALLS_FOR_8_TOKENS, token, sweep, 0),
            _LUBE,
            "loading takes most of a call, so that a call of 4 rows costs hardly more than one of 1",
        ),
        Comparison("speculation, 2.33 tokens a round", "x", 2.08, speedup(2.33, token, sweep, 0), _LUBE),
        Comparison(
            "one drafter call at 32K",
            "ms",
            DRAFTER_MILLISECONDS[32768],
            _drafter(32768),
            _OKA,
            "not reproduced: how its package computes is not known; it takes the target's K/V as inputs, which are copied",
        ),
    ]


def _drafter(width: int) -> float:
    """The published drafter: no row is written, K/V of two layers is repeated for each query head."""
    mac = find_device("M4 Max")
    reads = replace(
        PUBLISHED,
        body_bytes=PUBLISHED.drafter_bytes or 0,
        head_bytes=0,
        packages=1,
        sliding=replace(PUBLISHED.sliding, layers=3),
        full=replace(PUBLISHED.full, layers=1),
    )
    return call_milliseconds(reads, mac, width)
