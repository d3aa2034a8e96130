"""Sparse secrets: distribution, layout, and steps that do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.memory import PAGE
from tee_runner.protection.lpn import slots as module
from tee_runner.protection.lpn.layout import LANES, TILE_ROWS
from tee_runner.protection.lpn.slots import MAX_QUOTA, SlotDraw, SlotPlan

from .words_worker import key_of


def drawn(plan: SlotPlan, key: int = 1) -> SlotDraw:
    draw = SlotDraw(plan)
    draw.draw(key_of(key).stream("slots"))
    return draw


def laid_out(draw: SlotDraw) -> list[tuple[np.ndarray, np.ndarray]]:
    """The slots of all sweeps of a batch."""
    sweeps, needed = [], 1
    while len(sweeps) < needed:
        places = np.full((draw.plan.groups, draw.plan.quota), 0xFFFFFFFF, np.uint32)
        values = np.full_like(places, 0xFFFFFFFF)
        needed = draw.lay_out(len(sweeps), places, values)
        sweeps.append((places, values))
    return sweeps


def entries_of(plan: SlotPlan, sweeps: list[tuple[np.ndarray, np.ndarray]]) -> set[tuple[int, int, int]]:
    """(row, position, value) of every slot that counts."""
    found = set()
    for places, values in sweeps:
        for group in range(plan.groups):
            for place, value in zip(places[group].tolist(), values[group].tolist(), strict=True):
                row_offset, tile_offset = place & 0xFFFF, place >> 16
                assert row_offset % (1 << plan.row_shift) == 0
                assert row_offset >> plan.row_shift < plan.group
                assert tile_offset % (LANES * 4) == 0
                assert tile_offset < PAGE
                if value:
                    entry = (tile_offset // 64, group * plan.group + (row_offset >> plan.row_shift), value)
                    assert entry not in found
                    found.add(entry)
    return found


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 700), st.floats(0.01, 1.0), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_the_slots_are_the_secret(bound: int, part: float, item_bytes: int, key: int) -> None:
    plan = SlotPlan.of(bound, max(1, int(bound * part)), item_bytes)
    assert plan.quota <= MAX_QUOTA
    assert plan.group << plan.row_shift <= PAGE
    draw = drawn(plan, key)
    wanted = {
        (row, int(position), int(value))
        for row in range(TILE_ROWS)
        for position, value in zip(draw.positions[row], draw.values[row], strict=True)
    }
    assert len(wanted) == TILE_ROWS * plan.w
    assert all(value % 2 for _, _, value in wanted)
    assert all(len(set(row.tolist())) == plan.w and row.max() < bound for row in draw.positions)
    assert entries_of(plan, laid_out(draw)) == wanted


def test_a_full_group_spills_into_another_sweep() -> None:
    plan = SlotPlan.of(256, 20, 4)
    draw = drawn(plan)
    # All rows use the same positions: far more entries in the first group than its quota.
    draw.positions[...] = np.arange(20, dtype=np.uint32)
    module._describe(draw.positions, plan.group, plan.row_shift, draw._groups, draw._places)
    sweeps = laid_out(draw)
    assert len(sweeps) == -(-TILE_ROWS * 20 // plan.quota) > 1
    assert len(entries_of(plan, sweeps)) == TILE_ROWS * 20


def test_quotas_are_hardly_ever_exceeded_and_not_much_too_large() -> None:
    plan = SlotPlan.of(1024, 60, 4)
    draw = SlotDraw(plan)
    stream = key_of(2).stream("slots")
    places = np.empty((plan.groups, plan.quota), np.uint32)
    repeats = 0
    for _ in range(300):
        draw.draw(stream)
        repeats += draw.lay_out(0, places, np.empty_like(places)) > 1
    assert repeats <= 8  # the bound gives 2.3 on average
    assert plan.slots < 1.5 * TILE_ROWS * plan.w


def test_positions_and_values_are_uniform() -> None:
    plan = SlotPlan.of(48, 5, 4)
    draw = SlotDraw(plan)
    stream = key_of(3).stream("slots")
    counts = np.zeros(48)
    ones = np.zeros(32)
    batches = 60
    for _ in range(batches):
        draw.draw(stream)
        counts += np.bincount(draw.positions.reshape(-1), minlength=48)
        ones += np.unpackbits(draw.values.view(np.uint8), bitorder="little").reshape(-1, 32).sum(axis=0)
    rows = batches * TILE_ROWS
    p = 5 / 48
    deviations = (counts - rows * p) / np.sqrt(rows * p * (1 - p))
    assert np.abs(deviations).max() < 4.5
    assert 0.4 < (deviations**2).mean() < 2.0
    total = rows * 5
    assert ones[0] == total
    assert np.abs((ones[1:] - total / 2) / np.sqrt(total / 4)).max() < 4.5


def test_pairs_of_positions_are_independent() -> None:
    plan = SlotPlan.of(12, 2, 4)
    draw = SlotDraw(plan)
    stream = key_of(4).stream("slots")
    pairs = np.zeros((12, 12))
    for _ in range(120):
        draw.draw(stream)
        low, high = draw.positions.min(axis=1), draw.positions.max(axis=1)
        np.add.at(pairs, (low, high), 1)
    counts = pairs[np.triu_indices(12, 1)]
    mean = counts.mean()
    chi2 = ((counts - mean) ** 2 / mean).sum()
    assert not np.tril(pairs).any()
    assert chi2 < 65 + 4.5 * np.sqrt(2 * 65)


def test_a_biased_word_is_rejected() -> None:
    positions = np.zeros((1, 1), np.uint32)
    # For bound 3, 2^32 mod 3 = 1 product in low words must go: that of word 0.
    known = np.zeros((1, 512), np.uint64)
    assert module._draw_positions(np.array([0], np.uint32), 3, positions, known, 0) == 0
    assert module._draw_positions(np.array([0, 0xFFFFFFFF], np.uint32), 3, positions, known, 0) == 1
    assert positions[0, 0] == 2


def test_a_drawer_runs_on_when_words_run_out() -> None:
    draw = SlotDraw(SlotPlan.of(40, 39, 4))
    draw._words = np.zeros(500, np.uint32)  # far too few for 64 rows
    draw.draw(key_of(5).stream("slots"))
    assert all(len(set(row.tolist())) == 39 for row in draw.positions)


def test_positions_of_very_long_rows() -> None:
    plan = SlotPlan.of(70000, 300, 1)
    draw = drawn(plan)
    assert draw._known.shape == (3, 512)
    assert all(len(set(row.tolist())) == 300 for row in draw.positions)
    assert draw.positions.max() > 69900
    assert draw.positions.min() < 100


def test_wiping_leaves_nothing() -> None:
    draw = drawn(SlotPlan.of(100, 10, 4))
    laid_out(draw)
    draw.wipe()
    for array in (draw.positions, draw.values, draw._words, draw._known, draw._page):
        assert not array.any()


def trace_of_layout(key: int) -> list[tuple[str, int]]:
    """What the source of :func:`_lay_out` reads and writes through addresses: array, and place or page."""
    plan = SlotPlan.of(300, 12, 4)
    draw = drawn(plan, key)
    bases = {"groups": draw._groups, "places": draw._places, "values": draw.values, "page": draw._page}
    trace = []

    def where(address: int) -> tuple[str, int]:
        for name, array in bases.items():
            offset = address - array.ctypes.data
            if 0 <= offset < array.nbytes:
                return name, offset // PAGE if name == "page" else offset
        raise AssertionError("an access outside all arrays")

    def members(groups: int, group: int) -> int:
        trace.append(where(groups))
        first = where(groups)[1] // 4
        return sum(int(draw._groups[first + lane] == group) << lane for lane in range(LANES))

    def gather(source: int, members: int, target: int) -> None:
        trace.extend((where(source), where(target)))

    slots = np.empty((plan.groups, plan.quota), np.uint32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_members", members)
        patch.setattr(module, "_gather_members", gather)
        patch.setattr(module, "_count", module._count.py_func)
        module._lay_out.py_func(
            draw._groups, draw._places, draw.values.reshape(-1), 0, draw._page, slots, np.empty_like(slots)
        )
    assert draw._page.ctypes.data % PAGE == 0
    assert draw._page[0].nbytes == PAGE
    return trace


def test_laying_out_takes_the_same_steps_for_every_secret() -> None:
    one, two = trace_of_layout(1), trace_of_layout(2)
    assert one == two
    plan = SlotPlan.of(300, 12, 4)
    assert len(one) == 5 * plan.groups * TILE_ROWS * plan.w // LANES


def test_bits_are_counted() -> None:
    assert all(module._count(bits) == bits.bit_count() for bits in [*range(300), *range(65000, 65536)])


def test_a_dense_secret_needs_no_spare_slots() -> None:
    plan = SlotPlan.of(80, 80, 4)
    assert plan.slots >= TILE_ROWS * 80
    assert plan.quota == TILE_ROWS * plan.group
    assert len(entries_of(plan, laid_out(drawn(plan)))) == TILE_ROWS * 80


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_groups_fill_at_most_a_page(item_bytes: int) -> None:
    for bound, w in ((576, 64), (1536, 90), (4096, 200), (16, 3)):
        plan = SlotPlan.of(bound, w, item_bytes)
        assert plan.group << plan.row_shift <= PAGE
        assert plan.groups * plan.group >= bound
