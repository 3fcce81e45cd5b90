"""The sampler: the effect of each parameter on the scores, and its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outrider.kernels import arithmetic
from outrider.workers.engines.sampling import choose, log_probabilities, process
from outrider.workers.messages import Sampling

logits_of_any_kind = hnp.arrays(np.float32, st.integers(2, 40), elements=st.floats(-30, 30, width=32))


def kept(scores: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.isfinite(scores)).tolist())


def random_logits(size: int = 50, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


@given(logits_of_any_kind)
def test_greedy_is_the_first_of_the_largest(logits: np.ndarray) -> None:
    token, margin = choose(logits, Sampling(), 5)
    assert token == int(logits.argmax())
    assert margin == pytest.approx(float(np.sort(logits)[-1]) - float(np.sort(logits)[-2]))


@given(logits_of_any_kind, st.integers(1, 45))
def test_top_k_keeps_the_k_best(logits: np.ndarray, top_k: int) -> None:
    scores = process(logits, Sampling(temperature=1.0, top_k=top_k))
    ranked = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    assert kept(scores) == set(ranked[:top_k])


@given(logits_of_any_kind, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: np.ndarray, top_p: float) -> None:
    scores = process(logits, Sampling(temperature=1.0, top_p=top_p))
    weights = [math.exp(float(value) - float(logits.max())) for value in logits]
    ranked = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    size = len(kept(scores))
    assert kept(scores) == set(ranked[:size])
    total = math.fsum(weights)
    assert math.fsum(weights[token] for token in ranked[:size]) >= (top_p - 1e-12) * total
    assert math.fsum(weights[token] for token in ranked[: size - 1]) < (top_p + 1e-12) * total


@given(logits_of_any_kind, st.floats(0.0, 1.0))
def test_min_p_rules_out_what_is_unlikely_beside_the_best(logits: np.ndarray, min_p: float) -> None:
    scores = process(logits, Sampling(temperature=1.0, min_p=min_p))
    for token, value in enumerate(logits):
        share = math.exp(float(value) - float(logits.max()))
        if abs(share - min_p) > 1e-12:
            assert (token in kept(scores)) == (share > min_p)
    assert int(logits.argmax()) in kept(scores)


@given(logits_of_any_kind, st.integers(0, 50), st.floats(0.001, 1.0), st.floats(0.0, 1.0), st.floats(0.01, 5.0))
def test_something_always_stays(logits: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=9)
    scores = process(logits, sampling)
    assert int(logits.argmax()) in kept(scores)
    token, margin = choose(logits, sampling, 3)
    assert token in kept(scores)
    assert margin >= 0


def test_temperature_divides() -> None:
    logits = random_logits()
    assert np.array_equal(process(logits, Sampling(temperature=0.5)), logits.astype(np.float64) / 0.5)


def test_process_leaves_its_argument_alone() -> None:
    logits = random_logits()
    before = logits.copy()
    process(logits, Sampling(temperature=0.7, top_k=2, top_p=0.5, min_p=0.1, logit_bias=((1, 4.0),)), {3: 1}, {4: 2})
    assert np.array_equal(logits, before)


def test_repetition_penalty_pushes_what_was_seen_down_once() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    scores = process(logits, Sampling(repetition_penalty=2.0), {0: 5}, {1: 3, 0: 1})
    assert scores.tolist() == [1.0, -4.0, 1.0, 0.5]


def test_presence_and_frequency_look_only_at_what_was_written() -> None:
    logits = np.zeros(4, dtype=np.float32)
    scores = process(logits, Sampling(presence_penalty=1.0, frequency_penalty=0.25), {0: 7}, {1: 1, 2: 4})
    assert scores.tolist() == [0.0, -1.25, -2.0, 0.0]


def test_bias_is_added_after_penalties_and_before_temperature() -> None:
    logits = np.array([1.0, 1.0, 1.0], dtype=np.float32)
    sampling = Sampling(temperature=2.0, repetition_penalty=2.0, logit_bias=((0, 3.0), (2, -100.0)))
    assert process(logits, sampling, {0: 1}).tolist() == [(0.5 + 3.0) / 2, 0.5, -49.5]


def test_end_tokens_wait_for_min_tokens_whatever_their_bias() -> None:
    logits = np.zeros(4, dtype=np.float32)
    sampling = Sampling(min_tokens=3, end_tokens=(1, 3, 9), logit_bias=((1, 100.0),))
    early = process(logits, sampling, {1: 50}, {0: 1, 2: 1})
    assert early.tolist() == [0.0, -np.inf, 0.0, -np.inf]
    assert process(logits, sampling, {}, {0: 2, 2: 1}).tolist() == [0.0, 100.0, 0.0, 0.0]


@given(logits_of_any_kind, st.integers(0, 45))
def test_log_probabilities_are_those_of_the_softmax(logits: np.ndarray, count: int) -> None:
    chosen = logits.size // 2
    found = log_probabilities(logits, chosen, count)
    weights = [math.exp(float(value) - float(logits.max())) for value in logits]
    ranked = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    assert [token for token, _ in found] == [chosen, *ranked[:count]]
    for token, value in found:
        wanted = float(logits[token]) - float(logits.max()) - math.log(math.fsum(weights))
        assert value == pytest.approx(wanted, rel=1e-14, abs=1e-14)


def test_no_probability_at_all_is_a_number_that_json_knows() -> None:
    found = log_probabilities(np.array([0.0, -np.inf], np.float32), 0, 2)
    assert found == [(0, 0.0), (0, 0.0), (1, -9999.0)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=1, top_k=1)])
@pytest.mark.parametrize("logit", [np.nan, np.inf])
def test_a_choice_among_scores_that_are_not_numbers_has_no_margin(sampling: Sampling, logit: float) -> None:
    assert np.isnan(choose(np.array([1.0, 3.0, logit], np.float32), sampling, 5)[1])
    assert choose(np.array([1.0, -np.inf, 3.0], np.float32), Sampling(), 5) == (2, 2.0)


def test_a_bias_for_a_token_that_a_smaller_draft_lacks_is_passed_over() -> None:
    """The target's vocabulary may be the larger one, and the draft is handed the same sampling."""
    sampling = Sampling(logit_bias=((2, 50.0), (9, 100.0)))
    assert choose(np.zeros(5, dtype=np.float32), sampling, 0)[0] == 2


def test_the_choice_is_a_function_of_its_arguments() -> None:
    logits = random_logits(300)
    sampling = Sampling(temperature=1.0, seed=11, sample=2)
    assert choose(logits, sampling, 6) == choose(logits, sampling, 6)
    tokens = {choose(logits * 0, sampling, position)[0] for position in range(50)}
    assert len(tokens) > 30, "positions must draw different noise"


def test_draft_and_target_agree_where_their_logits_nearly_do() -> None:
    """The same noise on both sides is what makes sampled candidates acceptable at all."""
    random = np.random.default_rng(1)
    agreed = 0
    for position in range(200):
        logits = (random.standard_normal(1000) * 2).astype(np.float32)
        near = logits + (random.standard_normal(1000) * 0.1).astype(np.float32)
        sampling = Sampling(temperature=1.0, seed=4)
        agreed += choose(logits, sampling, position)[0] == choose(near, sampling, position)[0]
    assert agreed > 150


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
def test_100_000_draws_follow_the_softmax(temperature: float) -> None:
    """One draw for each of 100,000 seeds, by the definition of ``choose``, blockwise."""
    draws, vocabulary = 100_000, 24
    logits = (random_logits(vocabulary, seed=3) / 2).astype(np.float32)
    sampling = Sampling(temperature=temperature)
    scores = process(logits, sampling)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = draws * weights / weights.sum()
    # Philox takes a vector of first counter words; a position's first counter is the token's block, so blocks are drawn
    # for all rows by running over positions, which are as independent of one another as seeds are.
    counts = np.zeros(vocabulary)
    for position, noise in enumerate(_noise(draws, vocabulary)):
        if position < 50:
            assert np.array_equal(noise, arithmetic.gumbel(0, 0, position, vocabulary))
        counts[int((scores + noise).argmax())] += 1
    # 23 degrees of freedom: beyond 49.7 lies one in a thousand.
    assert chi_square(counts, expected) < 49.7
    assert chi_square(counts, np.full(vocabulary, draws / vocabulary)) > 1000, "the test could not tell them apart"


def _noise(draws: int, vocabulary: int) -> np.ndarray:
    """``gumbel(0, 0, position, vocabulary)`` for every position below ``draws``: Philox is symmetric in what varies."""
    blocks = np.arange(vocabulary // 4, dtype=np.uint32)
    words = np.empty((draws, vocabulary // 4, 4), dtype=np.uint32)
    for block in blocks:
        words[:, block] = _philox_over_positions(int(block), draws)
    uniform = 1.0 - (words.reshape(draws, vocabulary).astype(np.float64) + 0.5) * 2.0**-32
    noise: np.ndarray = -arithmetic.log(-arithmetic.log(uniform))
    return noise


def _philox_over_positions(block: int, draws: int) -> np.ndarray:
    first = np.full(draws, block, dtype=np.uint32)
    positions = np.arange(draws, dtype=np.uint64)
    found: np.ndarray = arithmetic.philox(0, (first, positions, 0, arithmetic.NOISE_STREAM))  # type: ignore[arg-type]
    return found
