"""The gate of the sampler: its draws against the exact distribution, by chi-squared."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llm_gemma_coreml.engine.gate_checks import Subject
from llm_gemma_coreml.engine.gate_results import GateResult, Tally
from llm_gemma_coreml.engine.gate_runs import filled
from llm_gemma_coreml.engine.request import SamplingParameters
from llm_gemma_coreml.engine.sampling import Sampler

_SETTINGS = (
    SamplingParameters(1.0),
    SamplingParameters(0.7, top_k=5),
    SamplingParameters(1.5, top_p=0.8),
    SamplingParameters(1.0, top_k=6, top_p=0.9, min_p=0.05),
)
_RARE = 5.0
"""Outcomes that are expected less often than this are counted together."""


def sampler_follows_distribution(subject: Subject) -> GateResult:
    """Draws over small vocabularies that are enumerated here, and over the model's own logits."""
    tally = Tally(subject.margin_bound)
    draws = subject.tokens(1500, 20000)
    noise = np.random.default_rng(0)
    session = filled(subject.runner, subject.prompt(64)[:-1])
    real = session.step(subject.prompt(64)[-1:])[0]
    sources = {"tiny": noise.standard_normal(8).astype(np.float32), "model": real}
    for name, logits in sources.items():
        for settings in _SETTINGS:
            if name == "model" and settings.top_k is None:
                settings = replace(settings, top_k=50)
            exact = exact_distribution(logits, settings)
            counts = np.zeros(len(logits))
            for position in range(draws):
                counts[Sampler(replace(settings, seed=7)).token(logits, position)] += 1
            statistic, limit = chi_squared(counts, exact * draws)
            tally.compared += draws
            tally.require(statistic <= limit, f"{name}, {settings}: chi-squared {statistic:.1f} > {limit:.1f}")
            tally.require(counts[exact == 0].sum() == 0, f"{name}, {settings}: a token of probability zero")
    return tally.result("sampler = exact distribution")


def exact_distribution(logits: NDArray[np.float32], settings: SamplingParameters) -> NDArray[np.float64]:
    """The processed distribution by its definition, in float64, all tokens sorted."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    scores = logits.astype(np.float64)[order] / settings.temperature
    shares = np.exp(scores - scores[0])
    if settings.top_k is not None:
        shares[settings.top_k :][shares[settings.top_k :] < shares[settings.top_k - 1]] = 0
    shares /= shares.sum()
    if settings.top_p is not None:
        shares[np.cumsum(shares) - shares >= settings.top_p] = 0
    if settings.min_p is not None:
        shares[shares < settings.min_p * shares[0]] = 0
    found = np.zeros(len(logits))
    found[order] = shares / shares.sum()
    return found


def chi_squared(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """(statistic, a limit that chance exceeds once in about 100,000 times; Wilson and Hilferty)."""
    common = expected >= _RARE
    seen, due = counts[common], expected[common]
    rest = expected[~common].sum()
    if rest >= _RARE:
        seen, due = np.append(seen, counts[~common].sum()), np.append(due, rest)
    freedom = len(due) - 1
    if freedom < 1:
        return 0.0, 0.0
    limit = freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((seen - due) ** 2 / due).sum()), limit
