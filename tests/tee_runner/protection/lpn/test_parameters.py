"""The choice of LPN parameters: the level, the budget, the table."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tee_runner.protection.lpn.options import DEFAULT_MEMORY, DEFAULT_MIN_BITS
from tee_runner.protection.lpn.parameters import (
    OUTPUT_RATIO,
    LpnParameters,
    LpnParametersError,
    choose,
    compute,
    row_cost,
)
from tee_runner.protection.lpn.security import MARGIN, security_bits
from tee_runner.protection.lpn.table import CHOSEN

WANTED = DEFAULT_MIN_BITS + MARGIN


def cost(p: LpnParameters) -> float:
    return row_cost(p.d, p.k, p.w_f, p.w_e, OUTPUT_RATIO * p.d)


@pytest.mark.parametrize("d", [64, 576, 1536, 2560, 9728])
def test_the_table_states_the_level(d: int) -> None:
    p = choose(d)
    assert (p.k, p.w_f, p.w_e, p.bits) == CHOSEN[d]
    assert p.bits == pytest.approx(security_bits(p.d, p.k, p.w_f, p.w_e), abs=1e-3)
    assert p.bits >= WANTED


@pytest.mark.parametrize("d", [96, 2304])
def test_the_table_is_what_the_search_finds(d: int) -> None:
    found = compute(d, min_bits=DEFAULT_MIN_BITS, bytes_per_parameter=DEFAULT_MEMORY)
    assert (found.k, found.w_f, found.w_e) == CHOSEN[d][:3]


def test_every_entry_of_the_table_is_in_order() -> None:
    for d, (k, w_f, w_e, bits) in CHOSEN.items():
        p = LpnParameters(d=d, k=k, w_f=w_f, w_e=w_e, bits=bits)
        assert WANTED <= bits < WANTED + 3
        assert k % 64 == 0
        assert p.bytes_per_parameter() <= DEFAULT_MEMORY or k <= 1024
    assert all(cost(choose(a)) < cost(choose(b)) for a, b in pairwise(sorted(d for d in CHOSEN if d >= 512)))


@pytest.mark.parametrize("d", [2560, 9728])
def test_no_term_of_either_kind_can_be_left_out(d: int) -> None:
    p = choose(d)
    assert security_bits(d, p.k, p.w_f - 1, p.w_e - 1) < WANTED
    assert security_bits(d, p.k, p.w_f - 2, p.w_e) < WANTED
    assert security_bits(d, p.k, p.w_f, p.w_e - 2) < WANTED


@pytest.mark.parametrize("move", [(6, -14), (-6, 14)])
def test_trading_terms_for_others_does_not_pay(move: tuple[int, int]) -> None:
    p = choose(2560)
    w_f, w_e = p.w_f + move[0], p.w_e + move[1]
    cheaper = row_cost(p.d, p.k, w_f, w_e, OUTPUT_RATIO * p.d) < cost(p)
    assert not cheaper or security_bits(p.d, p.k, w_f, w_e) < WANTED


def test_a_smaller_budget_is_kept_and_costs_more_terms() -> None:
    small = choose(1024, bytes_per_parameter=2.5)
    assert small.bytes_per_parameter() <= 2.5
    assert small.bits >= WANTED
    assert cost(small) > cost(choose(1024))
    assert choose(2560, bytes_per_parameter=9.0) == choose(2560)


@pytest.mark.parametrize("budget", [2.0, 2.5, 3.0, 4.0])
def test_what_is_chosen_stands_on_no_cliff(budget: float) -> None:
    p = choose(576, bytes_per_parameter=budget)
    assert p.bytes_per_parameter() <= budget or p.k == 512  # a small width's least pool
    for w_f, w_e in ((p.w_f - 1, p.w_e), (p.w_f, p.w_e - 1), (p.w_f - 1, p.w_e - 1)):
        assert p.bits - 4 < security_bits(p.d, p.k, w_f, w_e) <= p.bits


def test_a_width_that_is_not_in_the_table() -> None:
    p = choose(700)
    assert 700 not in CHOSEN
    assert p.bits == pytest.approx(security_bits(700, p.k, p.w_f, p.w_e), abs=1e-6)
    assert p.bits >= WANTED
    assert cost(choose(640)) < cost(p) < cost(choose(896))


def test_a_lower_level_costs_less() -> None:
    p = choose(128, min_bits=90.0)
    assert 96 <= p.bits < 98
    assert cost(p) < cost(choose(128))


@pytest.mark.parametrize(
    ("d", "bits", "memory", "message"),
    [
        (4, 128.0, 6.0, "too short"),
        (0, 128.0, 6.0, "too short"),
        (16, 2000.0, 6.0, "out of reach for rows of 16"),
        (16384, 128.0, 1.01, r"with 1\.01 bytes per parameter; 1\.9 are enough"),
    ],
)
def test_what_is_out_of_reach_says_what_would_do(d: int, bits: float, memory: float, message: str) -> None:
    with pytest.raises(LpnParametersError, match=message):
        choose(d, min_bits=bits, bytes_per_parameter=memory)


@pytest.mark.parametrize(("w_f", "w_e"), [(0, 4), (4, 0), (65, 4), (4, 33)])
def test_weights_fit(w_f: int, w_e: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        LpnParameters(d=32, k=64, w_f=w_f, w_e=w_e, bits=128.0)


def test_costs_and_memory_of_a_set() -> None:
    p = LpnParameters(d=1000, k=500, w_f=10, w_e=20, bits=128.0)
    assert p.bytes_per_parameter() == 3.0
    assert p.bytes_per_parameter(weight_bytes=2) == 4.0
    assert p.multiply_adds(300) == 10 * 1300 + 20 * 300
