"""HD3: draws that would show a data row are refused; every way through the kernels agrees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy.linalg import hadamard

from tee_runner.memory import on_lines
from tee_runner.protection.gelo import hd3
from tee_runner.protection.gelo.hd3 import LARGEST_ENTRY, Hd3, Hd3Mask, draw_signs
from tee_runner.protection.gelo.hd3_kernels import (
    hd3_apply,
    hd3_apply_parallel,
    hd3_unapply,
    hd3_unapply_parallel,
)
from tee_runner.protection.gelo.hd3_plan import tile_floats
from tee_runner.protection.gelo.tiles import PAST_BYTES, goes_past, shield_size, tile_width
from tee_runner.protection.rng import SecretStream

from .doubles import ExactTransport, Float32, key_of, matrix_of

S = 16
H = hadamard(S, dtype=np.int16)
PATTERNS = ((np.arange(1 << S)[:, None] >> np.arange(S)) & 1).astype(np.int16) * 2 - 1


def bad_signs() -> Float32:
    """D₁ bent, D₂ matching its transform: the first column of A is a unit vector."""
    spectra = PATTERNS @ H
    bent = PATTERNS[np.argmax((np.abs(spectra) == 4).all(axis=1))]
    matching = np.sign(bent @ H) * H[5]
    return np.stack([bent, matching, H[3]]).astype(np.float32)


def column_of(signs: Float32) -> np.ndarray:
    first, second, third = signs.astype(np.float64)
    return np.asarray(third * (H @ (second * (H @ (first * H[:, 0])))) / 64)


def test_probability_of_a_refused_draw_is_as_documented() -> None:
    """Counted over all 2³² pairs D₁, D₂.

    An entry of the column is a signed sum of |H·D₁·1|/64. No two entries of a unit vector exceed
    1/√2, so the 16 entries and both signs are 32 disjoint events of equal probability.
    """
    kinds = Counter(map(tuple, np.sort(np.abs(PATTERNS @ H), axis=1).tolist()))
    counts = {}
    for limit in (LARGEST_ENTRY * 64, 63):
        counts[limit] = 32 * sum(
            number * int((PATTERNS @ np.array(kind, np.int16) > limit).sum())
            for kind, number in kinds.items()
        )
    assert counts[63] == 896 * 32  # unit vectors: 896 bent patterns, 32 that match
    assert counts[LARGEST_ENTRY * 64] / 2**32 == hd3.REJECTED


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_a_draw_that_would_show_a_row_is_refused(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = bad_signs()
    assert np.max(np.abs(column_of(bad))) == 1.0
    drawn: list[Float32] = []

    def draw(stream: SecretStream, s: int) -> Float32:
        signs = bad.copy() if len(drawn) < 3 else draw_signs(stream, s)
        drawn.append(signs)
        return signs

    monkeypatch.setattr(hd3, "draw_signs", draw)
    mask = Hd3(ExactTransport(), key=key_of(2)).new_mask(n)
    assert isinstance(mask, Hd3Mask)
    assert len(drawn) >= 4
    assert np.max(np.abs(matrix_of(mask)[:, :n])) <= LARGEST_ENTRY
    assert not any(signs.any() for signs in drawn[:3])  # what was refused is overwritten


def test_masks_that_are_kept_have_no_large_entry() -> None:
    protection = Hd3(ExactTransport(), key=key_of(21))
    refused = 0
    stream = key_of(22).stream("signs")
    draws = 4000
    for _ in range(draws):
        assert np.max(np.abs(matrix_of(protection.new_mask(2))[:, :2])) <= LARGEST_ENTRY
        refused += np.max(np.abs(column_of(draw_signs(stream, S)))) > LARGEST_ENTRY
    # Binomial: five deviations around draws · REJECTED.
    expected = draws * hd3.REJECTED
    assert abs(refused - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("s", [1 << i for i in range(4, 15)])
def test_serial_and_parallel_kernels_agree_bit_by_bit(s: int) -> None:
    generator = np.random.default_rng(s)
    n, d = s // 2 - 3, 2 * tile_width(s) + 21
    rows = generator.standard_normal((n, d)).astype(np.float32)
    scales, one = np.ones(n, np.float32), np.float32(s**-1.5)
    normals = generator.standard_normal(shield_size(n, s, d)).astype(np.float32)
    signs = draw_signs(key_of(s).stream("signs"), s)
    floats = tile_floats(s, tile_width(s))
    scratches = [np.full(shape, np.nan, np.float32) for shape in (floats, (2, floats))]
    operands = [np.full((s, d), 0x7E00, np.uint16) for _ in range(2)]
    for kernel, operand, scratch in zip((hd3_apply, hd3_apply_parallel), operands, scratches, strict=True):
        kernel(rows, scales, normals, np.float32(0.5), signs, one, operand, scratch)
    np.testing.assert_array_equal(*operands)
    result = operands[0].view(np.float16).astype(np.float32)
    backs = [np.full((n, d), np.nan, np.float32) for _ in range(2)]
    for kernel, back, scratch in zip((hd3_unapply, hd3_unapply_parallel), backs, scratches, strict=True):
        assert kernel(result, signs, scales, one, back, scratch) is False
    np.testing.assert_array_equal(*backs)
    # The operand's float16 rounding is spread over the column: its deviation is below 2⁻¹¹ of
    # the root mean square of the column's elements, which is at most 1; six deviations.
    assert np.max(np.abs(backs[0] - rows)) < 6 * 2.0**-11


@pytest.mark.parametrize("s", [512, 1024])
@pytest.mark.parametrize("parallel", [False, True])
def test_what_is_written_past_the_caches_is_the_same(s: int, parallel: bool) -> None:
    """Columns are independent: some of them alone, few enough for the caches, are the reference."""
    n, d, few = s - 9, (PAST_BYTES // (4 * s) + 256) // 32 * 32, 96
    generator = np.random.default_rng(s)
    signs, one = draw_signs(key_of(s).stream("signs"), s), np.float32(s**-1.5)
    scales, floats = np.ones(n, np.float32), tile_floats(s, tile_width(s))
    scratch = on_lines((2, floats) if parallel else floats, np.float32)
    apply, unapply = (hd3_apply_parallel, hd3_unapply_parallel) if parallel else (hd3_apply, hd3_unapply)
    rows, shield = on_lines((n, d), np.float32), on_lines((s - n, d), np.float32)
    for array in (rows, shield):
        generator.standard_normal(dtype=np.float32, out=array)
    operand, back = on_lines((s, d), np.uint16), on_lines((n, d), np.float32)
    assert goes_past(back)
    assert shield.size == shield_size(n, s, d)
    apply(rows, scales, shield.ravel(), np.float32(0.5), signs, one, operand, scratch)
    result = operand.view(np.float16).astype(np.float32)
    assert unapply(result, signs, scales, one, back, scratch) is False
    for first in (0, 2048, d - few):
        part = np.s_[:, first : first + few]
        small, small_back = np.zeros((s, few), np.uint16), np.zeros((n, few), np.float32)
        assert not goes_past(small_back)
        normals = shield[part].ravel()
        apply(rows[part].copy(), scales, normals, np.float32(0.5), signs, one, small, scratch)
        np.testing.assert_array_equal(operand[part], small)
        assert unapply(result[part].copy(), signs, scales, one, small_back, scratch) is False
        np.testing.assert_array_equal(back[part], small_back)


def test_only_rows_on_lines_are_written_past_the_caches() -> None:
    memory = on_lines((4096, 1040), np.float32)
    assert goes_past(memory)
    assert not goes_past(memory[:, 1:])
    assert not goes_past(memory[:16])
    assert not goes_past(on_lines((4096, 1041), np.float32))


def test_kernels_refuse_what_they_cannot_address() -> None:
    mask = Hd3(ExactTransport(), key=key_of(1)).new_mask(20)
    rows, ones, one = np.zeros((20, 32), np.float32), np.ones(20, np.float32), np.float32(1.0)
    operand, normals = np.zeros((32, 32), np.uint16), np.zeros(12 * 32, np.float32)
    with pytest.raises(ValueError, match="contiguous"):
        mask.apply(np.asfortranarray(rows), ones, normals, one, one, operand)
    with pytest.raises(ValueError, match="too few normals"):
        mask.apply(rows, ones, normals[:-1], one, one, operand)
    with pytest.raises(ValueError, match="contiguous"):
        mask.unapply(np.asfortranarray(np.zeros((32, 32), np.float32)), ones, one, rows)
