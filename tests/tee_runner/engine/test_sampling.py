"""The sampler's distribution against a float64 reference, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tee_runner.engine.sampling import MAX_TOP_K, Sampler, SamplingParams
from tee_runner.errors import InvalidRequestError

DRAWS = 20_000
LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 3.0, 1.5, -40.0, 2.0, 0.5], np.float32)


def reference(logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Probabilities ``(vocab,)``: the k likeliest, then the fewest whose share reaches p."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    scaled = (logits[order].astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    if top_k:
        weights[top_k:] = 0.0
    before = np.cumsum(weights) - weights
    weights[before >= top_p * weights.sum()] = 0.0
    probabilities = np.zeros(len(logits))
    probabilities[order] = weights / weights.sum()
    return probabilities


def draw(params: SamplingParams, logits: np.ndarray, count: int = DRAWS) -> np.ndarray:
    sampler = Sampler(params)
    return np.bincount([sampler.sample(logits) for _ in range(count)], minlength=len(logits))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.8), (0, 0.3), (6, 0.7), (50, 0.95), (3, 0.999)]
)
def test_draws_follow_the_reference(temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=42)
    counts = draw(params, LOGITS)
    probabilities = reference(LOGITS, temperature=temperature, top_k=top_k, top_p=top_p)
    assert not counts[probabilities == 0.0].any()
    # Cells with an expectation of at least five, as the test asks for; the seed is fixed.
    large = probabilities * DRAWS >= 5
    if large.sum() > 1:
        expected = probabilities[large] / probabilities[large].sum() * counts[large].sum()
        assert stats.chisquare(counts[large], expected).pvalue > 1e-3
    assert counts[~large].sum() <= 5 * (~large).sum() + 5 * np.sqrt(5 * (~large).sum())


def test_draws_of_a_large_vocabulary_follow_the_reference() -> None:
    logits = (np.random.default_rng(1).standard_normal(500) * 2).astype(np.float32)
    counts = draw(SamplingParams(temperature=0.9, top_p=0.9, seed=7), logits)
    probabilities = reference(logits, temperature=0.9, top_p=0.9)
    assert not counts[probabilities == 0.0].any()
    large = probabilities * DRAWS >= 5
    expected = probabilities[large] / probabilities[large].sum() * counts[large].sum()
    assert stats.chisquare(counts[large], expected).pvalue > 1e-3


def test_successive_draws_are_independent() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3))
    drawn = np.array([sampler.sample(np.zeros(8, np.float32)) for _ in range(DRAWS)])
    pairs = np.bincount(drawn[:-1] * 8 + drawn[1:], minlength=64)
    assert stats.chisquare(pairs).pvalue > 1e-3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_p=0.1, top_k=5),
        SamplingParams(temperature=2.0, top_k=1),
    ],
)
def test_greedy(params: SamplingParams) -> None:
    logits = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    sampler = Sampler(params)
    assert {sampler.sample(logits) for _ in range(20)} == {int(np.argmax(logits))}
    assert Sampler(SamplingParams()).sample(LOGITS) == 1  # the first of two equals


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = np.array([2.0, 1e4, -1e4, 9e3, 0.0], np.float32)
    counts = draw(SamplingParams(temperature=temperature, seed=1), logits, 50)
    assert counts[1] == 50


def test_tiny_top_p_is_greedy() -> None:
    assert (
        draw(SamplingParams(temperature=50.0, top_p=1e-12, seed=1), np.arange(9, dtype=np.float32), 50)[8]
        == 50
    )


def test_equal_logits_are_drawn_equally_within_top_k() -> None:
    counts = draw(SamplingParams(temperature=1.0, top_k=3, seed=5), np.zeros(7, np.float32), 3000)
    kept = counts[counts > 0]
    assert len(kept) == 3
    assert stats.chisquare(kept).pvalue > 1e-3


def test_extreme_logits_give_a_token() -> None:
    for logits in ([3e38, -3e38, 0.0], [-3e38] * 3, [-np.inf, 0.0, -np.inf], [0.0]):
        array = np.array(logits, np.float32)
        for params in (
            SamplingParams(temperature=1.0, seed=1),
            SamplingParams(temperature=0.01, top_p=0.5, seed=1),
        ):
            token = Sampler(params).sample(array)
            assert reference(array, temperature=1.0)[token] > 0


def test_a_seed_reproduces_and_another_does_not() -> None:
    logits = np.random.default_rng(4).standard_normal(100).astype(np.float32)

    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed))
        return [sampler.sample(logits) for _ in range(40)]

    assert tokens(0) == tokens(0)
    assert tokens(2**64 - 1) == tokens(2**64 - 1)
    assert tokens(0) != tokens(1)
    assert tokens(None) != tokens(None)


def test_noise_in_the_logits_hardly_ever_changes_a_seeded_draw() -> None:
    generator = np.random.default_rng(6)
    logits = generator.standard_normal(500).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=9)
    clean, noisy = Sampler(params), Sampler(params)
    count, size = 3000, 1e-5
    changed = 0
    for _ in range(count):
        noise = generator.uniform(-size, size, 500).astype(np.float32)
        changed += clean.sample(logits) != noisy.sample(logits + noise)
    # The gap between the two largest of logits plus Gumbel noise is exponential with mean 1 (it is
    # memoryless), and must be below the noise's difference, at most 2·size: 0.06 are expected.
    assert changed <= 3


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-60.0, 60.0, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 100.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_token_is_one_that_was_kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    array = np.array(logits, np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed))
    # Ties and a cumulative share next to top_p are decided by rounding: a hair of room.
    kept = reference(array, temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-9))
    least = array[kept > 0].min()
    for _ in range(5):
        assert array[sampler.sample(array)] >= least


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 100.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": -1.0},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"top_k": MAX_TOP_K + 1},
        {"seed": -1},
        {"seed": 1 << 64},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    (name,) = values
    with pytest.raises(InvalidRequestError, match=name):
        SamplingParams(**values)  # type: ignore[arg-type]
