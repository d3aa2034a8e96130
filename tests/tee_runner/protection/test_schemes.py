"""Every scheme through its session: the product, its error, extreme activations, hostile answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import InvalidRequestError, WorkerError, WorkerProtocolError
from tee_runner.protection.base import OPERAND_LIMIT, Protection
from tee_runner.protection.gelo.base import GeloProtection
from tee_runner.protection.gelo.kernels import SHIELD_ENERGY, operand_scale
from tee_runner.protection.plain import Plain
from tee_runner.protection.schemes import DEFAULT_SCHEME, SCHEMES, scheme

from .doubles import (
    GELO_SCHEMES,
    HALF_FLOOR,
    HALF_ROUNDING,
    HALF_SCHEMES,
    SINGLE_ROUNDING,
    ExactTransport,
    Float32,
    Float64,
    half_weight,
    linear_of,
    protect,
    run,
    scales_of,
)

ALL = list(HALF_SCHEMES.values())
REAL = st.integers(0, 2**32 - 1)


def block_of(n: int, s: int, rows: Float32) -> tuple[Float64, float]:
    """Column norms ``(d,)`` of [H; S] after scaling, and σ, for one block."""
    scales, mean = scales_of(rows)
    sigma = SHIELD_ENERGY * mean / np.sqrt(rows.shape[1])
    return (rows * scales[:, None]).astype(np.float64), sigma


def tolerance_of(kind: type[Protection], rows: Float32, counts: Sequence[int], weight: np.ndarray) -> Float64:
    """A bound that every element of the result must meet, ``(n, d_out)``.

    An operand element M is off by e ≤ 2⁻¹¹|M| + 2⁻²⁵ (float16) and by float32 roundings of its
    column's norm. Unapplying takes inner products with unit vectors, so by Cauchy and Schwarz
    a result is off by at most ‖E·w‖ ≤ ‖E‖_F·‖w‖; ‖M‖_F = ‖[H; S]‖_F. The shield's norm stays
    below 1.5 times its expectation (k·d ≥ 7 squared normals: beyond eight deviations from 64
    on; below, Box–Muller's 6.8σ bounds it outright).
    """
    d = rows.shape[1]
    w = np.linalg.norm(weight.astype(np.float64), axis=1)
    bounds = []
    row = 0
    for n in counts:
        data = rows[row : row + n]
        scales, mean = scales_of(data)
        if issubclass(kind, GeloProtection):
            s = kind.block_rows(n)
            sigma = SHIELD_ENERGY * mean / np.sqrt(d)
            k = s - n
            shield = sigma * np.sqrt(k * d) * (1.5 if k * d >= 64 else 6.8)
            size = np.hypot(np.linalg.norm(data * scales[:, None]), shield)
            scale = operand_scale(n, k, sigma)
            steps = 2 * s + 32
            floor = HALF_FLOOR / scale * np.sqrt(s * d)
            bounds.append(
                ((HALF_ROUNDING + steps * SINGLE_ROUNDING) * size + floor) / scales[:, None] * w[None, :]
            )
        else:
            each = np.linalg.norm(data, axis=1)[:, None]
            floor = HALF_FLOOR * np.sqrt(d) / scales[:, None]
            bounds.append(((HALF_ROUNDING + 4 * SINGLE_ROUNDING) * each + floor) * w[None, :])
        row += n
    return np.concatenate(bounds)


def expected_rms(kind: type[GeloProtection], rows: Float32, weight: np.ndarray) -> float:
    """Upper estimate of the result's error in scaled units, root mean square over one block.

    Rounding errors are independent with variance below 2⁻²²·M² and E[M²] is 1/s of the column's
    square norm, so a result's variance is Σ_c w_c²·‖[H; S]_c‖²·2⁻²²/s. The true variance of a
    float16 rounding is a seventh of that.
    """
    n = len(rows)
    s = kind.block_rows(n)
    block, sigma = block_of(n, s, rows)
    columns = (block**2).sum(axis=0) + (s - n) * sigma**2
    return float(np.sqrt(np.mean(weight.astype(np.float64) ** 2 @ columns) / s)) * HALF_ROUNDING


def product(rows: Float32, weight: np.ndarray) -> Float64:
    result: Float64 = rows.astype(np.float64) @ weight.astype(np.float64).T
    return result


def check(kind: type[Protection], rows: Float32, counts: Sequence[int], weight: np.ndarray) -> Float32:
    transport = ExactTransport([weight])
    with protect(kind, transport).forward_session() as session:
        out = run(session, weight, rows, counts)
    assert np.isfinite(transport.operands[0]).all()
    assert len(transport.operands[0]) == kind.operand_rows(counts)
    assert (np.abs(out - product(rows, weight)) <= tolerance_of(kind, rows, counts, weight)).all()
    return out


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    d_in=st.integers(1, 150),
    d_out=st.integers(1, 70),
    seed=REAL,
    spread=st.floats(0.0, 4.0),
)
def test_linear_is_the_product(
    kind: type[Protection], counts: list[int], d_in: int, d_out: int, seed: int, spread: float
) -> None:
    generator = np.random.default_rng(seed)
    n = sum(counts)
    rows = generator.standard_normal((n, d_in)) * np.exp(generator.normal(0.0, spread, (n, 1)))
    check(kind, rows.astype(np.float32), counts, half_weight(generator, d_out, d_in))


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@pytest.mark.parametrize("n", [1, 2, 8, 24, 120, 504])
def test_error_is_that_of_float16(kind: type[GeloProtection], n: int) -> None:
    generator = np.random.default_rng(n)
    weight = half_weight(generator, 96, 320)
    rows = generator.standard_normal((n, 320)).astype(np.float32)
    rows[:, 7] *= 300.0  # an outlier channel
    out = check(kind, rows, [n], weight)
    error = (out - product(rows, weight)) * scales_of(rows)[0][:, None]
    assert np.sqrt(np.mean(error**2)) < expected_rms(kind, rows, weight)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("counts", "d_in", "d_out"),
    [
        ([1], 576, 960),
        ([1, 1, 1, 1], 576, 49),
        ([7, 1, 130, 1, 8], 100, 33),
        ([504, 1, 1], 333, 257),  # parallel kernels, no multiple of 16
        ([248], 1536, 64),
        ([600], 192, 300),
    ],
)
def test_shapes_of_real_steps(kind: type[Protection], counts: list[int], d_in: int, d_out: int) -> None:
    generator = np.random.default_rng([d_in, d_out])
    rows = generator.standard_normal((sum(counts), d_in)).astype(np.float32)
    check(kind, rows, counts, half_weight(generator, d_out, d_in))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("n", [1, 4, 30, 120])
@pytest.mark.parametrize("case", ["channel", "row", "all", "tiny", "mixed", "zero row", "zero"])
def test_extreme_activations_neither_overflow_nor_drown_others(
    kind: type[Protection], n: int, case: str
) -> None:
    generator = np.random.default_rng(n)
    rows = generator.standard_normal((n, 200)).astype(np.float32)
    if case == "channel":
        rows[:, 13] = 1e5
    elif case == "row":
        rows[n // 2] *= 1e5
    elif case == "all":
        rows *= 1e5
    elif case == "tiny":
        rows *= 1e-6
    elif case == "mixed":
        rows[::2] *= 1e-6
        rows[1::2] *= 1e6
    elif case == "zero row":
        rows[n // 2] = 0.0
    else:
        rows[:] = 0.0
    weight = half_weight(generator, 48, 200)
    transport = ExactTransport([weight])
    with protect(kind, transport).forward_session() as session:
        out = run(session, weight, rows, [n])
    # The bound per row is relative to that row, whatever the others hold.
    assert (np.abs(out - product(rows, weight)) <= tolerance_of(kind, rows, [n], weight)).all()
    operand = np.abs(transport.operands[0].astype(np.float64))
    assert operand.max() <= 2 * OPERAND_LIMIT


@pytest.mark.parametrize("kind", ALL)
def test_activations_that_are_not_finite_are_refused_not_served(kind: type[Protection]) -> None:
    weight = np.ones((4, 20), np.float16)
    for bad in (np.nan, np.inf, -np.inf):
        rows = np.ones((3, 20), np.float32)
        rows[1, 5] = bad
        with protect(kind, ExactTransport([weight])).forward_session() as session, pytest.raises(WorkerError):
            run(session, weight, rows, [3])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("n", [1, 3, 6, 20])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_position_of_a_result_is_checked(kind: type[Protection], n: int, value: float) -> None:
    weight = half_weight(np.random.default_rng(n), 19, 16)
    rows = np.random.default_rng(n).standard_normal((n, 16)).astype(np.float32)
    transport = ExactTransport([weight], keep=False)
    session = protect(kind, transport).forward_session()
    for r in range(kind.operand_rows([n])):
        for c in range(19):

            def tamper(result: Float32, r: int = r, c: int = c) -> None:
                result[r, c] = value

            transport.tamper = tamper
            with pytest.raises(WorkerProtocolError, match="w0 is not finite"):
                run(session, weight, rows, [n])
    transport.tamper = None
    run(session, weight, rows, [n])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_large_and_ragged_results_are_checked(kind: type[Protection], value: float) -> None:
    counts, d_out = [300, 1, 12], 500  # parallel, few rows, dense: three ways back in one result
    weight = half_weight(np.random.default_rng(1), d_out, 24)
    rows = np.random.default_rng(2).standard_normal((sum(counts), 24)).astype(np.float32)
    transport = ExactTransport([weight], keep=False)
    session = protect(kind, transport).forward_session()
    total = kind.operand_rows(counts)
    places = np.random.default_rng(3).integers(0, [total, d_out], (12, 2)).tolist()
    for r, c in [[0, 0], [0, d_out - 1], [total - 1, 0], [total - 1, d_out - 1], *places]:

        def tamper(result: Float32, r: int = r, c: int = c) -> None:
            result[r, c] = value

        transport.tamper = tamper
        with pytest.raises(WorkerProtocolError):
            run(session, weight, rows, counts)


@pytest.mark.parametrize("kind", ALL)
def test_results_that_overflow_on_the_way_back_are_refused(kind: type[Protection]) -> None:
    weight = np.ones((8, 16), np.float16)
    transport = ExactTransport([weight])
    transport.tamper = lambda result: result.fill(3e38)
    rows = np.full((12, 16), 1e6, np.float32)
    with protect(kind, transport).forward_session() as session, pytest.raises(WorkerProtocolError):
        run(session, weight, rows, [12])


def test_transport_errors_pass_through() -> None:
    class Broken(ExactTransport):
        def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> Float32:
            raise WorkerError("gone")

    weight = np.ones((4, 16), np.float16)
    for kind in ALL:
        with (
            protect(kind, Broken([weight])).forward_session() as session,
            pytest.raises(WorkerError, match="gone"),
        ):
            run(session, weight, np.ones((2, 16), np.float32), [2])


def test_schemes_by_name() -> None:
    assert scheme(DEFAULT_SCHEME).name == DEFAULT_SCHEME
    assert all(kind.name == name for name, kind in SCHEMES.items())
    for kind in ALL:
        assert kind.warning  # none of these is without a known limit
        protection = protect(kind, ExactTransport())
        protection.provision([linear_of(np.ones((2, 3)))])
        assert protection.idle() is False
    with pytest.raises(InvalidRequestError, match="gelo-hd3"):
        scheme("none")
    assert Plain.parameters() == {}
    for kind in GELO_SCHEMES:
        assert kind.parameters() == {"shield_rows": 8, "shield_energy": 4.0}


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 1 << 19), mean=st.floats(0.0, 2.0), d=st.integers(1, 1 << 16))
def test_operand_scale_is_a_power_of_two_within_the_limit(n: int, mean: float, d: int) -> None:
    for kind in GELO_SCHEMES:
        k = kind.block_rows(n) - n
        sigma = SHIELD_ENERGY * mean / np.sqrt(d)
        scale = operand_scale(n, k, sigma)
        assert np.log2(scale) == round(np.log2(scale))
        bound = np.sqrt(4 * n + k * (6.8 * sigma) ** 2)
        assert scale * bound * (1 + 1e-9) >= OPERAND_LIMIT / 2
        assert scale * bound <= OPERAND_LIMIT * (1 + 1e-9)
