"""Sampling: exact distribution, reproducible by seed and position, filters as defined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.client.sampling import SamplingParams, choose_token, gumbel_noise
from fusion_node.errors import ConfigError

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], dtype=np.float32))


def draw(params: SamplingParams, n: int = 4000, seed: int = 5) -> np.ndarray:
    tokens = [choose_token(LOGITS, params, seed=seed, position=p, seen=()) for p in range(n)]
    return np.bincount(tokens, minlength=5) / n


def test_greedy_takes_the_most_probable_whatever_the_seed() -> None:
    params = SamplingParams()
    assert {choose_token(LOGITS, params, seed=s, position=s, seen=()) for s in range(50)} == {0}


def test_gumbel_max_draws_from_the_softmax_distribution() -> None:
    observed = draw(SamplingParams(temperature=1.0)) * 4000
    expected = np.array([0.4, 0.3, 0.2, 0.06, 0.04]) * 4000
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 18.47  # 4 degrees of freedom, p = 0.001, for this fixed seed


def test_temperature_sharpens_the_distribution() -> None:
    sharp = np.array([0.4, 0.3, 0.2, 0.06, 0.04]) ** 2
    assert np.abs(draw(SamplingParams(temperature=0.5)) - sharp / sharp.sum()).max() < 0.03


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-10])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}])
def test_temperature_of_almost_nothing_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    logits = np.array([5.0, -3.0, 9.0, 100.0, -1e4], dtype=np.float32)
    assert choose_token(logits, params, seed=1, position=5, seen=()) == 3


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.5), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.71), {0, 1, 2}),
        (SamplingParams(temperature=1.0, min_p=0.6), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.001), {0}),
    ],
)
def test_filters_keep_exactly_the_probable_tokens(params: SamplingParams, allowed: set[int]) -> None:
    assert set(np.nonzero(draw(params, n=800))[0]) == allowed


def test_repetition_penalty_moves_the_choice_away_from_seen_tokens() -> None:
    params = SamplingParams(repetition_penalty=3.0)
    assert choose_token(LOGITS, params, seed=0, position=0, seen=[0]) == 1
    assert choose_token(-LOGITS, params, seed=0, position=0, seen=[4]) == 3


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_noise_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    first = gumbel_noise(seed, position, 16)
    assert np.array_equal(first, gumbel_noise(seed, position, 16))
    assert not np.array_equal(first, gumbel_noise(seed, position + 1, 16))
    assert np.isfinite(first).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 0},
        {"min_p": 2},
        {"seed": -1},
        {"repetition_penalty": 1e-9},
        {"stop": ("",)},
    ],
)
def test_parameters_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**bad)  # type: ignore[arg-type]
