"""The stock of shield normals: every one used once, and none left behind."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tee_runner.protection.gelo.shield import _MAX_STOCK, ShieldStock

from .doubles import Float32, key_of


def stock_of(key: int = 1) -> ShieldStock:
    return ShieldStock(key_of(key).stream("shield"))


def repeats(parts: list[Float32]) -> int:
    """Runs of three normals that occur more than once, at any place."""
    joined = np.concatenate([part for part in parts if len(part) >= 3])
    runs = np.lib.stride_tricks.sliding_window_view(joined, 3)
    return len(runs) - len(np.unique(np.ascontiguousarray(runs).view("V12")))


STEPS = st.one_of(st.integers(1, 700), st.sampled_from(["refill", "top up", "wipe"]))


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=40))
def test_no_normal_is_given_out_twice(steps: list[int | str]) -> None:
    stock = stock_of()
    given_out = [np.empty(3, np.float32)]
    given_out[0][:] = np.nan
    for step in steps:
        if isinstance(step, int):
            part = stock.take(step)
            assert part.shape == (step,)
            assert part.dtype == np.float32
            assert part.all()  # not what was overwritten
            given_out.append(part.copy())
        elif step == "refill":
            stock.refill()
        elif step == "top up":
            stock.top_up()
        else:
            stock.wipe()
    assert repeats(given_out) == 0


def test_what_was_taken_together_is_intact_until_the_refill() -> None:
    stock = stock_of()
    stock.take(1000)
    stock.refill()
    parts = [stock.take(count) for count in (900, 800, 400, 1, 100)]  # the third exceeds the rest
    copies = [part.copy() for part in parts]
    assert repeats(copies) == 0
    for part, copied in zip(parts, copies, strict=True):
        np.testing.assert_array_equal(part, copied)
    stock.refill()
    for part, copied in zip(parts, copies, strict=True):
        assert not np.array_equal(part, copied)


def test_the_stock_grows_to_the_demand_and_no_further() -> None:
    """And once what is taken at most beyond it, so that it is not low when the next refill is due."""
    stock = stock_of()
    assert stock.refill() is False
    stock.take(100)
    stock.take(150)
    assert stock.refill() is True
    assert stock._stock.size == 250 + 150
    assert stock.refill() is False  # all of it is unused
    stock.take(50)
    assert stock.refill() is True
    assert stock._stock.size == 250 + 150
    large = stock.take(_MAX_STOCK + 5)
    assert len(large) == _MAX_STOCK + 5
    stock.refill()
    assert stock._stock.size == _MAX_STOCK
    assert not large.any()


@settings(max_examples=40, deadline=None)
@given(demands=st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_between_refills_the_stock_is_not_low(demands: list[int]) -> None:
    """From the second round of the same demands on, topping up is never called for."""
    stock = stock_of()
    for turn in range(3):
        for place, count in enumerate(demands, 1):
            stock.take(count)
            if turn and place < len(demands):
                assert not stock.low
        stock.refill()
    assert stock._stock.size == sum(demands) + max(demands)


def test_topping_up_does_not_grow_the_stock_nor_forget_the_demand() -> None:
    stock = stock_of()
    stock.take(100)
    stock.refill()
    size = stock._stock.size
    for _ in range(5):
        stock.take(100)
        assert stock.top_up() is True
        assert stock.top_up() is False
    assert stock._stock.size == size
    stock.refill()
    assert stock._stock.size == 500 + 100


def test_topping_up_alone_makes_a_stock() -> None:
    """Of models without a long product: theirs are made while the worker computes, too."""
    stock = stock_of()
    for _ in range(3):
        stock.take(100)
        stock.take(60)
        assert stock.low
        assert stock.top_up() is True
        assert not stock.low
    assert stock._stock.size == 100


def test_a_prompt_does_not_leave_the_stock_low_for_decode_steps() -> None:
    stock = stock_of()
    stock.take(2 * _MAX_STOCK)
    stock.wipe()
    for _ in range(2):
        assert stock.take(100).any()
        stock.refill()
        stock.wipe()
    assert not stock.low


def test_wipe_overwrites_what_was_used_and_keeps_the_rest() -> None:
    stock = stock_of()
    stock.take(1000)
    stock.refill()
    stock.take(900)
    used, extra = stock.take(700), stock.take(800)
    kept = stock._stock[1600:].copy()
    before = stock._stream._cipher
    stock.wipe()
    assert not used.any()
    assert not extra.any()
    assert stock._stream._cipher is not before
    np.testing.assert_array_equal(stock.take(400), kept)


def test_stocked_normals_are_normal() -> None:
    stock = stock_of(9)
    parts = []
    for count in [4096, 15_000, 1, 77, 8192] * 20:
        parts.append(stock.take(count).copy())
        stock.refill()
    joined = np.concatenate(parts).astype(np.float64)
    assert stats.kstest(joined, "norm").pvalue > 1e-3
    assert abs(joined.mean()) < 5 / np.sqrt(len(joined))
    assert abs(joined.var() - 1) < 5 * np.sqrt(2 / len(joined))


def test_two_sessions_have_different_normals() -> None:
    assert repeats([stock_of(1).take(500), stock_of(2).take(500)]) == 0
