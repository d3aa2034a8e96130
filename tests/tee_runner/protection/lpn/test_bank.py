"""Ready rows: in order, once, and overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from tee_runner.protection.lpn.bank import Bank, Blinding
from tee_runner.protection.lpn.layout import TILE_ROWS

from .test_sweep import source_of
from .words_worker import small_parameters

D_IN, D_OUT = 20, 24


def bank_of(capacity: int = 128) -> tuple[Bank, np.ndarray]:
    source, _, W = source_of(D_IN, D_OUT, small_parameters(D_IN, 40))
    return Bank(source, capacity), W


def rows_of(taken: list[Blinding], W: np.ndarray) -> list[bytes]:
    """The rows of r, checked against R and overwritten, as an offload does."""
    found = []
    for part in taken:
        span = slice(part.first, part.first + part.count)
        r, R = part.r[span, :D_IN], part.R[span, :D_OUT]
        np.testing.assert_array_equal(R, r @ W.T)
        found += [row.tobytes() for row in r]
        part.r[span] = 0
        part.R[span] = 0
    return found


def test_no_row_is_given_twice() -> None:
    bank, W = bank_of()
    seen: list[bytes] = []
    generator = np.random.default_rng(0)
    for step in range(60):
        n = int(generator.choice([1, 1, 1, 3, 17, 63, 64, 65, 100, 128, 130, 200]))
        taken = bank.take(n)
        assert sum(part.count for part in taken) == n
        if step % 3 == 0:
            bank.pay()
        seen += rows_of(taken, W)
        bank.release()
        if step % 5 == 0:
            bank.advance(1)
        if step % 7 == 0:
            bank.fill()
    assert len(seen) == len(set(seen)) > 1000
    assert bytes(4 * D_IN) not in seen


def test_paying_never_touches_rows_in_use() -> None:
    bank, W = bank_of()
    bank.fill()
    for n in (65, 62, 63, 2, 63, 63, 1):
        taken = bank.take(n)
        copies = [(part.r.copy(), part.R.copy()) for part in taken]
        for _ in range(80):
            bank.pay()
        for part, (r, R) in zip(taken, copies, strict=True):
            span = slice(part.first, part.first + part.count)
            np.testing.assert_array_equal(part.r[span], r[span])
            np.testing.assert_array_equal(part.R[span], R[span])
        rows_of(taken, W)
        bank.release()


def test_a_low_bank_is_refilled_by_what_is_used() -> None:
    bank, W = bank_of()
    sweeps = bank._source.tools
    bank.fill()
    assert (bank.ready, bank.room) == (128, 0)
    begun = sweeps.sweeps
    lowest = 128
    for _ in range(500):
        taken = bank.take(1)
        bank.pay()
        rows_of(taken, W)
        bank.release()
        lowest = min(lowest, bank.ready)
    # It never ran dry, and made no more than it used.
    assert 0 < lowest < TILE_ROWS
    assert sweeps.sweeps - begun == pytest.approx((500 - 64) / 64, abs=1)


def test_paying_waits_until_the_bank_is_low() -> None:
    bank, W = bank_of()
    bank.fill()
    for _ in range(64):
        rows_of(bank.take(1), W)
        bank.pay()
        bank.release()
    assert bank._source.tools.sweeps == 1


def test_filling_goes_on_to_the_brim() -> None:
    bank, _ = bank_of(192)
    steps = 0
    while bank.advance(1):
        steps += 1
    assert bank.ready == 192
    assert steps == 3 * (2 + 2)  # two panels of r and two of R for each 64 rows
    assert not bank.advance(1)


def test_a_dry_bank_sweeps_there_and_then() -> None:
    bank, W = bank_of()
    assert bank.ready == 0
    assert len(rows_of(bank.take(5), W)) == 5
    assert bank.ready == TILE_ROWS - 5


def test_a_long_prompt_leaves_the_bank_alone() -> None:
    bank, W = bank_of()
    bank.fill()
    taken = bank.take(300)
    assert [part.count for part in taken] == [256, 44]
    assert len(set(rows_of(taken, W))) == 300
    assert bank.ready == 128 - 44


def test_secrets_of_a_finished_sweep_are_overwritten() -> None:
    bank, _ = bank_of()
    bank.advance(1)
    sweep = bank._sweep
    assert sweep is not None
    slots = sweep._slots
    assert slots.f_values.any()
    assert slots.e_values.any()
    # Those of the draw go as soon as they are laid out.
    for draw in (bank._source.f, bank._source.e):
        assert not draw.positions.any()
        assert not draw.values.any()
    bank.fill()
    for array in (slots.f_places, slots.f_values, slots.e_places, slots.e_values):
        assert not array.any()


def test_wiping_leaves_nothing() -> None:
    bank, W = bank_of()
    rows_of(bank.take(3), W)
    bank.advance(1)
    assert bank._sweep is not None
    slots = bank._sweep._slots
    bank.wipe()
    assert not slots.f_values.any()
    assert not bank._r.any()
    assert not bank._R.any()
    assert bank.ready == 0
    assert len(set(rows_of(bank.take(4), W))) == 4


@pytest.mark.parametrize("capacity", [0, 64, 100, 129])
def test_a_bank_holds_whole_tiles(capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        bank_of(capacity)
