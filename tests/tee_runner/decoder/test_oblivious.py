"""Lookups that read the whole table against plain indexing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.decoder.oblivious import GROUP, gather, take_rows


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 700), st.sampled_from([1, 2, 63, 64, 65, 100, 128, 192, 257]),
    st.integers(0, 3 * GROUP + 1), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_equals_indexing(rows: int, size: int, count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 256, (rows, size), dtype=np.uint8)
    ids = generator.integers(0, rows, count)
    np.testing.assert_array_equal(take_rows(table, ids), table[ids])


def test_first_and_last_rows_and_repeats() -> None:
    table = np.arange(1000 * 128, dtype=np.uint32).view(np.uint8).reshape(1000, -1)
    ids = np.array([0, 999, 0, 999, 999, 64, 63, 65, 0, 1])
    np.testing.assert_array_equal(take_rows(table, ids), table[ids])


def test_reads_nothing_behind_an_unaligned_table() -> None:
    memory = np.full(7 + 65 * 300, 255, dtype=np.uint8)
    table = memory[7:].reshape(300, 65)
    table[...] = np.random.default_rng(1).integers(0, 256, table.shape)
    ids = np.array([299, 5, 299])
    np.testing.assert_array_equal(take_rows(table, ids), table[ids])


def test_an_index_outside_gives_zeros() -> None:
    table = np.full((10, 64), 7, dtype=np.uint8)
    assert not take_rows(table, np.array([10, -1])).any()


@pytest.mark.parametrize(
    "table", [np.zeros((4, 4), np.int8), np.zeros(4, np.uint8), np.zeros((4, 8), np.uint8)[:, ::2]]
)
def test_refuses_other_tables(table: np.ndarray) -> None:
    with pytest.raises(ValueError, match="matrix of bytes"):
        take_rows(table, np.array([0]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, ml_dtypes.bfloat16])
def test_gather_keeps_the_element_type(dtype: type) -> None:
    table = np.random.default_rng(3).integers(-100, 100, (70, 48)).astype(dtype)
    ids = np.array([69, 0, 3, 3])
    for oblivious in (False, True):
        rows = gather(table, ids, oblivious=oblivious)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(rows, table[ids])
