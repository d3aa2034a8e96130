"""What a session keeps secret: the shield's size, masks of one block, rows hidden, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest

from tee_runner.errors import WorkerProtocolError
from tee_runner.protection.base import Linear, Scratch
from tee_runner.protection.gelo.base import SHIELD_ROWS, GeloProtection
from tee_runner.protection.gelo.kernels import SHIELD_ENERGY, operand_scale
from tee_runner.protection.plain import Plain
from tee_runner.protection.schemes import SCHEMES

from .doubles import (
    GELO_SCHEMES,
    HALF_ROUNDING,
    ExactTransport,
    Float32,
    Float64,
    half_weight,
    matrix_of,
    protect,
    run,
    scales_of,
)


def unmixed(mask: object, operand: np.ndarray, scale: float) -> Float64:
    """[H; S] as the owner of the mask recovers it from what the worker saw."""
    return matrix_of(mask).T @ operand.astype(np.float64) / scale  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@pytest.mark.parametrize("n", [1, 5, 24, 56])
def test_shield_rows_have_four_times_the_mean_norm(kind: type[GeloProtection], n: int) -> None:
    d, offloads = 320, 30
    generator = np.random.default_rng(n)
    rows = (generator.standard_normal((n, d)) * np.exp(generator.normal(0, 1, (n, 1)))).astype(np.float32)
    weight = half_weight(generator, 16, d)
    transport = ExactTransport([weight])
    session = protect(kind, transport).forward_session()
    for _ in range(offloads):
        run(session, weight, rows, [n])
    (mask,) = session._masks.values()  # type: ignore[attr-defined]
    k = mask.s - n
    assert k >= SHIELD_ROWS
    scales, mean = scales_of(rows)
    scale = operand_scale(n, k, SHIELD_ENERGY * mean / np.sqrt(d))
    blocks = [unmixed(mask, operand, scale) for operand in transport.operands]
    norms = np.concatenate([np.linalg.norm(block[n:], axis=1) for block in blocks])
    # A norm of d normals over √d has mean 1 - 1/(4d) and deviation 1/√(2d); rounding to float16
    # adds independent noise of 2⁻¹¹ of an element's size: nothing here.
    mean_norm = SHIELD_ENERGY * mean * (1 - 1 / (4 * d))
    assert abs(norms.mean() / mean_norm - 1) < 5 / np.sqrt(2 * d * len(norms))
    assert np.max(np.abs(norms / mean_norm - 1)) < 6 / np.sqrt(2 * d)

    # The data rows are the same under the same mask in every offload, the shield never is.
    for block in blocks:
        rounding = HALF_ROUNDING * np.linalg.norm(block)
        assert np.linalg.norm(block[:n] - rows * scales[:, None]) < rounding
    for i, left in enumerate(blocks):
        for right in blocks[:i]:
            similarity = np.sum(left[n:] * right[n:]) / np.linalg.norm(left[n:]) / np.linalg.norm(right[n:])
            assert abs(similarity) < 6 / np.sqrt(k * d)
    # Within one offload the shield is white: rows are independent of each other.
    unit = blocks[0][n:] / np.linalg.norm(blocks[0][n:], axis=1, keepdims=True)
    assert np.max(np.abs(unit @ unit.T - np.eye(k))) < 6 / np.sqrt(d)


@pytest.mark.parametrize("kind", GELO_SCHEMES)
def test_a_mask_lives_for_one_session_and_one_block(kind: type[GeloProtection]) -> None:
    weight = half_weight(np.random.default_rng(1), 8, 64)
    rows = np.random.default_rng(2).standard_normal((12, 64)).astype(np.float32)
    protection = protect(kind, ExactTransport([weight]))
    seen = []
    for _ in range(2):
        with protection.forward_session() as session:
            run(session, weight, rows, [5, 5, 2])
            first = {key: matrix_of(mask) for key, mask in session._masks.items()}  # type: ignore[attr-defined]
            run(session, weight, rows, [5, 5, 2])
            second = {key: matrix_of(mask) for key, mask in session._masks.items()}  # type: ignore[attr-defined]
        assert first.keys() == second.keys()
        assert len(first) == 3
        for key in first:
            np.testing.assert_array_equal(first[key], second[key])
        seen += list(first.values())
    for i, left in enumerate(seen):
        for right in seen[:i]:
            if left.shape == right.shape:
                assert abs(np.sum(left * right)) < 6  # about N(0, 1) for independent masks


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@pytest.mark.parametrize("failing", [False, True])
def test_leaving_a_session_overwrites_its_secrets(kind: type[GeloProtection], failing: bool) -> None:
    weight = half_weight(np.random.default_rng(1), 40, 600)
    transport = ExactTransport([weight])
    protection = protect(kind, transport)
    assert isinstance(protection, GeloProtection)
    shield_before, mask_before = protection.shield._stream._cipher, protection.mask_stream._cipher
    session = protection.forward_session()
    arrays: list[np.ndarray] = []
    taken: list[tuple[np.ndarray, np.ndarray]] = []
    take = protection.shield.take

    def watched(count: int) -> Float32:
        normals = take(count)
        taken.append((normals, normals.copy()))
        return normals

    protection.shield.take = watched  # type: ignore[method-assign]

    def body() -> None:
        with session:
            for n in (1, 3, 40, 300):
                run(session, weight, np.ones((n, 600), np.float32), [n])
                arrays.append(protection.scratch._buffer)
            for mask in session._masks.values():  # type: ignore[attr-defined]
                arrays.extend(value for value in vars(mask).values() if isinstance(value, np.ndarray))
            assert arrays[-1].any()
            if failing:
                transport.tamper = lambda result: result.fill(np.nan)
                run(session, weight, np.ones((3, 600), np.float32), [3])

    if failing:
        with pytest.raises(WorkerProtocolError):
            body()
    else:
        body()
    # Buffers outgrown on the way included.
    assert not any(array.any() for array in arrays)
    assert not session._masks  # type: ignore[attr-defined]
    # No shield that was used is left: its place is zero, or holds one for later.
    for place, used in taken:
        assert np.mean(place == used) < 0.01
    # And the streams have moved on: the old key is gone.
    assert protection.shield._stream._cipher is not shield_before
    assert protection.mask_stream._cipher is not mask_before


def test_scratch_grows_is_reused_and_forgets() -> None:
    scratch = Scratch()
    first = scratch.take(100)
    first.fill(3.0)
    assert scratch.take(50).base is first.base
    held = scratch._buffer
    scratch.take(1000).fill(4.0)
    assert not held.any()
    scratch.wipe()
    assert not scratch.take(1000).any()


@pytest.mark.parametrize("kind", GELO_SCHEMES)
def test_what_the_worker_sees_changes_with_the_session_and_hides_the_rows(
    kind: type[GeloProtection],
) -> None:
    weight = half_weight(np.random.default_rng(1), 8, 256)
    rows = np.random.default_rng(2).standard_normal((24, 256)).astype(np.float32)
    transport = ExactTransport([weight])
    protection = protect(kind, transport)
    for _ in range(2):
        with protection.forward_session() as session:
            run(session, weight, rows, [24])
    left, right = (o.astype(np.float64) for o in transport.operands)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for operand in (left, right):
        own = operand / np.linalg.norm(operand, axis=1, keepdims=True)
        # No single row of the operand is a row of the input: |cos| stays well below 1.
        assert np.max(np.abs(own @ unit.T)) < 0.8
    cosine = np.sum(left * right) / np.linalg.norm(left) / np.linalg.norm(right)
    assert abs(cosine) < 6 / np.sqrt(len(left))


def test_plain_shows_the_rows_row_by_row() -> None:
    weight = half_weight(np.random.default_rng(1), 8, 64)
    rows = (np.random.default_rng(2).standard_normal((9, 64)) * 50).astype(np.float32)
    transport = ExactTransport([weight])
    with Plain(transport).forward_session() as session:
        run(session, weight, rows, [4, 5])
    scales, _ = scales_of(rows)
    np.testing.assert_array_equal(transport.operands[0], (rows * scales[:, None]).astype(np.float16))


@pytest.mark.parametrize("name", ["gelo-haar", "gelo-hd3"])
def test_a_sequence_keeps_its_mask_when_others_have_no_rows(name: str) -> None:
    """With rows of the second sequence only, its own A is used, not the first one's."""
    weight = np.eye(48, dtype=np.float16)
    transport = ExactTransport([weight])
    protection = SCHEMES[name](transport)
    linear = Linear(weight_id=0, name="w", d_in=48, d_out=48)
    rows = np.random.default_rng(3).standard_normal((2, 48)).astype(np.float32)
    with protection.forward_session() as session:
        out = np.empty((2, 48), dtype=np.float32)
        session.linear(linear, rows, [1, 1], out)
        session.linear(linear, rows[1:], [0, 1], out[1:])
        masks = session._masks  # type: ignore[attr-defined]
        assert set(masks) == {(0, 1), (1, 1)}
        np.testing.assert_allclose(out[1], rows[1], atol=5e-3)
