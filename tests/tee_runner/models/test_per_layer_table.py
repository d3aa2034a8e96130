"""The int8 table of per-layer embeddings: its error, its memory, and what it refuses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import InvalidRequestError, ModelError
from tee_runner.models import per_layer_table
from tee_runner.models.per_layer_table import PerLayerTable

VOCAB, LAYERS, WIDTH = 37, 3, 8


def source(seed: int, spread: float = 3.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows whose parts have very different magnitudes, one of them zero."""
    generator = np.random.default_rng(seed)
    scales = np.exp(spread * generator.standard_normal((VOCAB, LAYERS, 1)))
    rows = generator.standard_normal((VOCAB, LAYERS, WIDTH)) * scales
    rows[5, 1] = 0.0
    return rows.reshape(VOCAB, LAYERS * WIDTH).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
def test_each_part_is_off_by_half_a_step_at_most(seed: int, dtype: Any) -> None:
    rows = source(seed, spread=1.0).astype(dtype)
    table = PerLayerTable(rows, layers=LAYERS, name="table")
    ids = np.random.default_rng(seed).integers(0, VOCAB, 50)
    wanted = rows[ids].astype(np.float64).reshape(50, LAYERS, WIDTH) * np.sqrt(WIDTH)
    got = table.gather(ids)
    assert (got.dtype, got.shape) == (np.float32, (50, LAYERS, WIDTH))
    steps = np.abs(wanted).max(axis=2, keepdims=True) / 127
    # Half a step, and three float32 roundings of a value of up to 127 steps.
    assert (np.abs(got - wanted) <= steps * (0.5 + 3 * 127 * 2.0**-24)).all()


def test_the_error_of_normal_rows_is_the_documented_one() -> None:
    rows = np.random.default_rng(8).standard_normal((200, 256)).astype(np.float32)
    table = PerLayerTable(rows, layers=1, name="table")
    error = table.gather(np.arange(200))[:, 0] / 16 - rows
    assert 0.0055 < np.linalg.norm(error) / np.linalg.norm(rows) < 0.0075


def test_what_int8_holds_exactly_comes_back() -> None:
    generator = np.random.default_rng(1)
    levels = generator.integers(-127, 128, (VOCAB, LAYERS, WIDTH))
    levels[..., 0] = 127
    rows = (levels * 2.0 ** generator.integers(-9, 3, (VOCAB, LAYERS, 1))).astype(np.float32)
    table = PerLayerTable(rows.reshape(VOCAB, -1), layers=LAYERS, name="table")
    np.testing.assert_array_equal(table.gather(np.arange(VOCAB)), rows * np.float32(np.sqrt(WIDTH)))


def test_values_too_small_for_a_scale_are_zero() -> None:
    rows = np.full((2, WIDTH), 1e-40, np.float32)
    rows[1] = 1e-30
    table = PerLayerTable(rows, layers=1, name="table")
    assert not table.gather(np.array([0])).any()
    np.testing.assert_allclose(table.gather(np.array([1])), 1e-30 * np.sqrt(WIDTH), rtol=1e-6)


def test_blocks_are_joined_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = source(2)
    whole = PerLayerTable(rows, layers=LAYERS, name="table").gather(np.arange(VOCAB))
    monkeypatch.setattr(per_layer_table, "_BLOCK", 5 * LAYERS * WIDTH)
    told: list[tuple[int, int]] = []
    table = PerLayerTable(rows, layers=LAYERS, name="table", progress=lambda *at: told.append(at))
    np.testing.assert_array_equal(table.gather(np.arange(VOCAB)), whole)
    assert len(told) == 8
    assert told[-1] == (rows.size, rows.size)


def test_memory_is_a_byte_per_element_and_a_scale_per_part() -> None:
    table = PerLayerTable(source(3), layers=LAYERS, name="table")
    assert table.nbytes == VOCAB * LAYERS * (WIDTH + 4)


def test_the_table_cannot_be_written_to() -> None:
    table = PerLayerTable(source(4), layers=LAYERS, name="table")
    for held in (table._values, table._scales):
        with pytest.raises(ValueError, match="read-only"):
            held[0, 0] = 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    rows = source(5)
    rows[20, 9] = value
    with pytest.raises(ModelError, match=r"'the table'.*not finite"):
        PerLayerTable(rows, layers=LAYERS, name="the table")


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_tokens_outside_the_table_are_refused(token: int) -> None:
    table = PerLayerTable(source(6), layers=LAYERS, name="table")
    with pytest.raises(InvalidRequestError) as caught:
        table.gather(np.array([1, token]))
    assert str(token) not in str(caught.value).replace(str(VOCAB), "")


def test_oblivious_lookups_give_the_same_rows() -> None:
    rows = source(3)
    ids = np.array([5, 0, 36, 36, 7])
    plain, oblivious = (
        PerLayerTable(rows, layers=LAYERS, name="table", oblivious=on) for on in (False, True)
    )
    np.testing.assert_array_equal(oblivious.gather(ids), plain.gather(ids))


def test_no_tokens_give_no_rows() -> None:
    table = PerLayerTable(source(7), layers=LAYERS, name="table")
    assert table.gather(np.zeros(0, np.int64)).shape == (0, LAYERS, WIDTH)
