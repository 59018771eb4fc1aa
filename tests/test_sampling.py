"""The sampler against transformers' processors, the exact distribution, its promises on seeds and errors."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_gemma_coreml.engine.request import SamplingParameters
from llm_gemma_coreml.engine.sampling import Sampler, TokenHistory, uniform
from llm_gemma_coreml.errors import GemmaCoreMLError, RequestError

PARAMETERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.07},
    {"temperature": 1.2, "top_k": 64, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.999, "repetition_penalty": 0.7},
]


def random_logits(seed: int, size: int, spread: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def transformers_distribution(
    logits: NDArray[np.float32], history: list[int], settings: dict[str, float]
) -> NDArray[np.float64]:
    """What transformers' own processors make of the logits, computed in float64."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    processors = []
    if "repetition_penalty" in settings:
        processors.append(process.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    processors.append(process.TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(process.TopKLogitsWarper(int(settings["top_k"])))
    if "top_p" in settings:
        processors.append(process.TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        processors.append(process.MinPLogitsWarper(settings["min_p"]))
    ids = torch.tensor([history], dtype=torch.long)
    scores = torch.tensor(logits[None], dtype=torch.float64)
    for processor in processors:
        scores = processor(ids, scores)
    return np.asarray(torch.softmax(scores, dim=-1)[0])


@pytest.mark.parametrize("settings", PARAMETERS, ids=str)
@pytest.mark.parametrize(("size", "spread"), [(11, 2.0), (500, 3.0), (20_000, 1.0), (20_000, 4.0)])
def test_distribution_is_that_of_transformers(settings: dict[str, float], size: int, spread: float) -> None:
    for seed in range(4):
        logits = random_logits(seed, size, spread)
        history = [random.Random(seed).randrange(size) for _ in range(50)]
        sampler = Sampler(SamplingParameters(seed=0, **settings))  # type: ignore[arg-type]
        expected = transformers_distribution(logits, history, settings)
        found = sampler.distribution(logits, TokenHistory(history))
        assert np.array_equal(found > 1e-30, expected > 1e-30)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-15)


def chi_squared_limit(freedom: int) -> float:
    """A value that chi-squared exceeds with a chance of about 1e-5 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.26 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("keyed_by", ["position", "seed"])
@pytest.mark.parametrize("settings", [PARAMETERS[0], {"temperature": 0.7, "top_k": 6}], ids=str)
def test_draws_follow_the_distribution(settings: dict[str, float], keyed_by: str) -> None:
    logits = random_logits(5, 9, 1.0)
    draws = 6000
    parameters = SamplingParameters(**settings)  # type: ignore[arg-type]
    counts = np.zeros(9)
    for number in range(draws):
        seed, position = (7, number) if keyed_by == "position" else (number, 7)
        counts[Sampler(replace(parameters, seed=seed)).token(logits, position)] += 1
    expected = Sampler(parameters).distribution(logits) * draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    assert statistic < chi_squared_limit(int(possible.sum()) - 1)


def test_draw_over_a_large_vocabulary_is_the_inverse_of_the_cumulative_distribution() -> None:
    logits = random_logits(1, 5000, 2.0)
    sampler = Sampler(SamplingParameters(temperature=1.0, seed=11))
    ends = np.cumsum(sampler.distribution(logits))
    for position in range(200):
        share = uniform(11, position) * ends[-1]
        token = sampler.token(logits, position)
        assert ends[token] >= share - 1e-9
        assert token == 0 or ends[token - 1] <= share + 1e-9


def test_same_seed_and_position_give_the_same_token_whatever_was_drawn_before() -> None:
    logits = random_logits(2, 300)
    one, other = (Sampler(SamplingParameters(temperature=1.0, seed=42)) for _ in range(2))
    forward = [one.token(logits, position) for position in range(64)]
    backward = [other.token(logits, position) for position in reversed(range(64))]
    assert forward == backward[::-1]
    assert len(set(forward)) > 10


def test_the_stream_of_randomness_never_changes() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(123, 45678), uniform(-1, 3)] == [
        0.011546754286331562,
        0.5023796042735054,
        0.24684753418925898,
        0.8918334340153565,
    ]


def test_without_a_seed_one_is_chosen_and_reported() -> None:
    logits = random_logits(3, 300)
    sampler = Sampler(SamplingParameters(temperature=1.0))
    assert sampler.seed != Sampler(SamplingParameters(temperature=1.0)).seed
    again = Sampler(SamplingParameters(temperature=1.0, seed=sampler.seed))
    assert [sampler.token(logits, p) for p in range(20)] == [again.token(logits, p) for p in range(20)]


def test_greedy_takes_the_first_maximum_and_reads_no_seed() -> None:
    logits = np.array([0, 3, 1, 3], np.float32)
    assert {Sampler(SamplingParameters(seed=s)).token(logits, s) for s in range(5)} == {1}


def test_ties_at_the_edge_of_top_k_are_all_kept() -> None:
    logits = np.zeros(6000, np.float32)
    logits[[5, 4000]] = 2
    logits[[7, 8, 5999]] = 1
    distribution = Sampler(SamplingParameters(temperature=1.0, top_k=3)).distribution(logits)
    assert np.flatnonzero(distribution).tolist() == [5, 7, 8, 4000, 5999]


def test_mask_comes_before_everything_and_suppressed_ids_never_appear() -> None:
    logits = random_logits(4, 50)
    order = np.argsort(-logits)
    allowed = np.ones(50, bool)
    allowed[order[0]] = False
    greedy = Sampler(SamplingParameters(), suppressed_ids=[int(order[1])])
    assert greedy.token(logits, 0, allowed=allowed) == order[2]
    top2 = Sampler(SamplingParameters(temperature=1.0, top_k=2), suppressed_ids=[int(order[1])])
    assert set(np.flatnonzero(top2.distribution(logits, allowed=allowed))) == {order[2], order[3]}


def test_logits_are_not_changed() -> None:
    logits = random_logits(6, 100)
    before = logits.copy()
    parameters = SamplingParameters(temperature=0.5, top_p=0.9, repetition_penalty=2.0)
    sampler = Sampler(parameters, suppressed_ids=[3])
    sampler.token(logits, 0, TokenHistory([1, 2, 2]), np.ones(100, bool))
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(value: float, temperature: float) -> None:
    logits = random_logits(7, 100)
    logits[63] = value
    with pytest.raises(GemmaCoreMLError, match="token 63"):
        Sampler(SamplingParameters(temperature=temperature)).token(logits, 0)


def test_nothing_left_to_choose_is_an_error() -> None:
    with pytest.raises(GemmaCoreMLError, match="No token may follow"):
        Sampler(SamplingParameters()).token(random_logits(8, 10), 0, allowed=np.zeros(10, bool))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = random_logits(9, 1000, 20.0)
    sampler = Sampler(SamplingParameters(temperature=temperature, top_p=0.95, seed=1))
    distribution = sampler.distribution(logits)
    assert np.isfinite(distribution).all()
    assert distribution.sum() == pytest.approx(1.0)
    if temperature < 1:
        assert sampler.token(logits, 0) == np.argmax(logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_named(settings: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        Sampler(SamplingParameters(**settings))  # type: ignore[arg-type]
