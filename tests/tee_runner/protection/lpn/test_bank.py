"""Ready rows: in order, once, and overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from tee_runner.protection.lpn.bank import Bank, Banks, Blinding
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
        seen += rows_of(taken, W)
        if step % 5 == 0:
            bank.advance(1)
        if step % 7 == 0:
            bank.fill()
    assert len(seen) == len(set(seen)) > 1000
    assert bytes(4 * D_IN) not in seen


@pytest.mark.parametrize("n", [1, 40, 64, 65, 127, 128, 150, 192])
def test_rows_in_use_are_not_overwritten_by_sweeps(n: int) -> None:
    bank, W = bank_of(192)
    bank.fill()
    bank.take(63)
    taken = bank.take(n)
    before = [part.R[part.first : part.first + part.count].copy() for part in taken]
    while bank.advance(1):
        pass
    for part, expected in zip(taken, before, strict=True):
        np.testing.assert_array_equal(part.R[part.first : part.first + part.count], expected)
    assert len(set(rows_of(taken, W))) == n
    bank.release()
    while bank.advance(1):
        pass
    assert bank.ready > 192 - TILE_ROWS


def test_filling_goes_on_to_the_brim() -> None:
    bank, _ = bank_of(192)
    steps = []
    while done := bank.advance(3):
        steps.append(done)
    assert bank.ready == 192
    assert steps == [3, 1] * 3  # two panels of r and two of R for each 64 rows
    assert bank.advance(1) == 0


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
    assert bank._source.tools.slots(1, bank._source.f.plan, bank._source.e.plan) is slots


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


def banks_of(count: int) -> tuple[Banks, list[np.ndarray]]:
    banks, weights = Banks(), []
    for index in range(count):
        bank, W = bank_of()
        banks.add(index, bank)
        weights.append(W)
    return banks, weights


def decode(banks: Banks, weights: list[np.ndarray], rows: int = 1) -> None:
    for index, W in enumerate(weights):
        rows_of(banks.take(index, rows), W)
    banks.end_pass()


def sweeps(banks: Banks) -> int:
    return sum(bank._source.tools.sweeps for bank in banks._banks.values())


def test_low_banks_are_refilled_by_what_is_used_and_never_run_dry() -> None:
    banks, weights = banks_of(5)
    while banks.idle(1):
        pass
    assert all(bank.ready == 128 for bank in banks._banks.values())
    begun, lowest = sweeps(banks), 128
    for _ in range(300):
        before = sweeps(banks)
        decode(banks, weights)
        assert sweeps(banks) - before <= 1  # spread over the passes
        lowest = min(lowest, *(bank.ready for bank in banks._banks.values()))
    assert 0 < lowest < TILE_ROWS
    assert sweeps(banks) - begun == pytest.approx(5 * (300 - 64) / 64, abs=3)


def test_what_is_owed_can_be_paid_during_the_next_pass() -> None:
    banks, weights = banks_of(3)
    while banks.idle(1):
        pass
    paid = 0
    for _ in range(300):
        for index, W in enumerate(weights):
            taken = banks.take(index, 1)
            paid += banks.work(1)
            rows_of(taken, W)
        while banks.work(1):
            paid += 1
        begun = [bank.panels_due for bank in banks]
        banks.end_pass()
        # Nothing is left to do at the end of a pass.
        assert [bank.panels_due for bank in banks] == begun
        assert all(bank.ready > 0 for bank in banks)
    assert paid == pytest.approx(3 * 4 * (300 - 64) / 64, abs=12)


def test_rows_in_use_that_leave_no_room_end_the_work() -> None:
    banks, weights = banks_of(1)
    while banks.idle(1):
        pass
    for _ in range(66):  # 62 rows are left, and a sweep is owed
        decode(banks, weights)
    taken = banks.take(0, 63)  # finishes it and is low again
    held = [part.R[part.first : part.first + part.count].copy() for part in taken]
    pieces = 0
    while banks.work(1):
        pieces += 1
        assert pieces < 100
    for part, before in zip(taken, held, strict=True):
        np.testing.assert_array_equal(part.R[part.first : part.first + part.count], before)


def test_nothing_is_paid_while_the_banks_are_full_enough() -> None:
    banks, weights = banks_of(2)
    while banks.idle(1):
        pass
    begun = sweeps(banks)
    for _ in range(64):
        decode(banks, weights)
    assert sweeps(banks) == begun


def test_what_a_prompt_takes_is_left_to_the_tokens() -> None:
    banks, weights = banks_of(3)
    while banks.idle(1):
        pass
    begun = sweeps(banks)
    decode(banks, weights, 100)
    assert sweeps(banks) == begun  # nothing before the first token
    for _ in range(27):
        decode(banks, weights)
        assert all(bank.ready > 0 for bank in banks._banks.values())
    assert sweeps(banks) == begun + 3


def test_empty_banks_sweep_at_once_and_then_by_and_by() -> None:
    banks, weights = banks_of(4)
    for _ in range(64):
        decode(banks, weights)
        assert all(bank.ready > 0 for bank in banks._banks.values())
    assert sweeps(banks) == 8  # one each at first, and one more each until those are used up


def test_idle_work_comes_in_small_pieces_and_ends() -> None:
    banks, _ = banks_of(3)
    pieces = 0
    while banks.idle(2):
        pieces += 1
    assert pieces == 3 * 2 * 2  # three banks, two sweeps, four panels each
    assert not banks.idle(2)


@pytest.mark.parametrize("capacity", [0, 64, 100, 129])
def test_a_bank_holds_whole_tiles(capacity: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        bank_of(capacity)


def test_idle_work_begins_with_the_emptiest_bank() -> None:
    banks, weights = banks_of(3)
    for n in (64, 128):  # none gets more before all have as much
        while min(bank.ready for bank in banks) < n:
            assert banks.idle(3)
            assert max(bank.ready for bank in banks) <= n
    rows_of(banks.take(1, 100), weights[1])
    banks.end_pass()
    while banks._banks[1].ready < 64:
        assert banks.idle(1)
    assert [bank.ready for bank in banks] == [128, 92, 128]
