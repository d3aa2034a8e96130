"""JADE on planted operands."""

from __future__ import annotations

import numpy as np
import pytest

from evals.attacks.drivers.jade import Jade

from .planted_mixtures import gaussian, laplacian, plain, planted_view, ring, shielded


def attacked(sources, mask, n=(4, 5, 6), d=1500, **kwargs):
    rng = np.random.default_rng(1)
    view, truth = planted_view([sources(k, d, rng) for k in n], mask, rng, **kwargs)
    return Jade().run(view, truth, np.random.default_rng(2))


def test_plain_rows_are_seen():
    outcome = attacked(gaussian, plain)
    assert outcome.value > 0.999
    assert outcome.details["recovered"] == 1.0
    assert outcome.chance < 0.95


@pytest.mark.parametrize("corpus", ["short", "decode"])
def test_non_gaussian_rows_are_separated_from_their_shield(corpus):
    outcome = attacked(laplacian, shielded, corpus=corpus)
    assert outcome.applicable
    assert outcome.interpretable
    assert outcome.value >= 0.95
    assert outcome.details["layer0.qkv, blind: recovered"] >= 0.9
    assert outcome.details["layer0.qkv, as seen: recovered"] == 0.0


def test_gaussian_rows_are_not():
    outcome = attacked(gaussian, shielded, n=(10,) * 12)
    assert outcome.details["layer0.qkv, planted Laplacian sources: p95"] >= 0.95
    assert outcome.details["recovered"] <= 0.02
    assert abs(outcome.value - outcome.chance) < 0.1


def test_ring_elements_are_accepted_and_give_nothing():
    outcome = attacked(laplacian, ring)
    assert outcome.value < 0.3
    assert outcome.details["recovered"] == 0.0


def test_too_few_columns_are_not_applicable_for_that_reason():
    outcome = attacked(laplacian, shielded, d=10)
    assert not outcome.applicable
    assert "(shapes: 6x10, 7x10, 8x10)" in outcome.reason


def test_reruns_give_the_same_numbers():
    assert attacked(laplacian, shielded, n=(4,)) == attacked(laplacian, shielded, n=(4,))
