"""The attacks' own schemes: they compute the right product, and put on the wire what they say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from evals.attacks.conditions import CONDITIONS, Condition, register
from evals.attacks.model import HEAD_LAYER
from evals.attacks.schemes import MixOptions, draw_mask, left_in_runner, mixed, power_of_two_scales
from tee_runner.errors import WorkerProtocolError
from tee_runner.protection.base import Linear, MaskOptions, Protection
from tee_runner.protection.plain import Plain
from tests.tee_runner.protection.doubles import ExactTransport, key_of, run

D_IN, D_OUT = 96, 48
WEIGHT = (np.random.default_rng(4).standard_normal((D_OUT, D_IN)) / 10).astype(np.float16)


def rows_of(n: int) -> np.ndarray:
    """Rows whose norms differ by a factor of 10⁴, as activations do."""
    normals = np.random.default_rng(n).standard_normal((n, D_IN))
    return (normals * np.logspace(-2, 2, n)[:, None]).astype(np.float32)


def protect(options: MixOptions, masks: MaskOptions | None = None) -> tuple[Protection, ExactTransport]:
    transport = ExactTransport([WEIGHT])
    return mixed("test", options)(transport, masks=masks, key=key_of(7)), transport


# --- shields and masks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "n", "k"), [(0.05, 20, 1), (0.05, 21, 2), (0.12, 25, 3), (0.14, 50, 7), (0.14, 1, 1)]
)
def test_shield_of_a_fraction(fraction: float, n: int, k: int) -> None:
    assert MixOptions(shield_fraction=fraction).shield(n) == k
    assert mixed("x", MixOptions(shield_fraction=fraction)).operand_rows([n, 0, n]) == 2 * (n + k)


@pytest.mark.parametrize("kappa", [1.0, 6.0, 50.0])
@pytest.mark.parametrize("s", [1, 2, 33])
def test_masks_have_their_condition_number(kappa: float, s: int) -> None:
    mask, inverse = draw_mask(key_of(1).stream("mask"), s, kappa)
    assert np.allclose(mask @ inverse, np.eye(s), atol=1e-5 * kappa)
    assert np.linalg.cond(mask) == pytest.approx(kappa if s > 1 else 1.0, rel=1e-3)
    assert np.linalg.norm(mask, 2) == pytest.approx(np.sqrt(kappa) if s > 1 else 1.0, rel=1e-3)


def test_masks_are_fresh() -> None:
    stream = key_of(1).stream("mask")
    assert not np.allclose(draw_mask(stream, 9, 6.0)[0], draw_mask(stream, 9, 6.0)[0])


# --- the product, and the wire ---------------------------------------------------------------------------

SETTINGS = [
    MixOptions(),
    MixOptions(shield_rows=8),
    MixOptions(shield_fraction=0.05, shield_energy=10.0),
    MixOptions(shield_fraction=0.12, shield_energy=25.0),
    MixOptions(shield_fraction=0.14, shield_energy=30.0),
    MixOptions(shield_fraction=0.12, shield_energy=25.0, condition_number=6.0),
    MixOptions(shield_fraction=0.14, shield_energy=30.0, condition_number=50.0),
]


def expected_error(options: MixOptions, scaled: np.ndarray) -> float:
    """Root mean square error of a data row that was mixed, rounded to float16 and unmixed.

    Rounding is off by at most 2⁻¹¹ of a value, by half of that on average at the most, and independent:
    it grows with the mean square of A's and of A⁻¹'s singular values, which are the same.
    """
    n = len(scaled)
    k = options.shield(n)
    mean = np.linalg.norm(scaled, axis=1).mean()
    energy = np.linalg.norm(scaled) ** 2 + k * (options.shield_energy * mean) ** 2
    half = np.log(options.condition_number) / 2.0
    growth = np.mean(np.exp(2.0 * np.linspace(-half, half, n + k)))
    return float(2.0**-12 * growth * np.sqrt(energy / (n + k)))


@pytest.mark.parametrize("masks", [MaskOptions(), MaskOptions(per_offload=True)])
@pytest.mark.parametrize("options", SETTINGS)
def test_the_product_comes_back(options: MixOptions, masks: MaskOptions) -> None:
    protection, transport = protect(options, masks)
    rows = rows_of(24)
    with protection.forward_session() as session:
        got = run(session, WEIGHT, rows, [5, 0, 18, 1])
    (operand,) = transport.operands
    assert operand.shape == (protection.operand_rows([5, 0, 18, 1]), D_IN)
    assert np.isfinite(operand).all()
    scales = power_of_two_scales(rows)[:, None]
    exact = rows.astype(np.float64) @ WEIGHT.astype(np.float64).T
    errors = np.linalg.norm((got - exact) * scales, axis=1)
    scaled = rows * scales
    blocks = (scaled[:5], scaled[5:23], scaled[23:])
    expected = np.repeat([expected_error(options, block) for block in blocks], [5, 18, 1])
    gain = np.linalg.norm(WEIGHT.astype(np.float64)) / np.sqrt(D_IN)
    assert (errors < 4.0 * expected * gain).all()
    # Most rows come back well under every setting: without the right inverse none would.
    assert np.median(errors / np.linalg.norm(exact * scales, axis=1)) < 0.1


@pytest.mark.parametrize("options", SETTINGS)
def test_the_operand_is_a_mix_of_rows_and_shield(options: MixOptions) -> None:
    """It spans the data, has the energy it should, and shows no row by itself."""
    protection, transport = protect(options)
    rows = rows_of(20)
    with protection.forward_session() as session:
        run(session, WEIGHT, rows, [20])
    operand = transport.operands[0].astype(np.float64)
    scaled = rows * power_of_two_scales(rows)[:, None]
    projection = spans(operand)
    outside = np.linalg.norm(scaled - scaled @ projection, axis=1)
    assert outside.max() < 4.0 * expected_error(options, scaled)
    stranger = np.random.default_rng(9).standard_normal(D_IN)
    assert np.linalg.norm(stranger - projection @ stranger) > 0.5 * np.linalg.norm(stranger)
    if options.condition_number == 1.0:
        # An orthogonal mask keeps the energy, up to the operand's power of two.
        mean = np.linalg.norm(scaled, axis=1).mean()
        energy = np.linalg.norm(scaled) ** 2 + options.shield(20) * (options.shield_energy * mean) ** 2
        exponent = np.log2(np.linalg.norm(operand) ** 2 / energy) / 2
        assert abs(exponent - round(exponent)) < 0.25
    cosines = _unit(operand) @ _unit(scaled).T
    assert np.abs(cosines).max() < 0.9


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def spans(operand: np.ndarray) -> np.ndarray:
    """The projection onto an operand's row space."""
    basis = np.linalg.qr(operand.astype(np.float64).T)[0]
    return basis @ basis.T


@pytest.mark.parametrize(("per_offload", "same"), [(False, True), (True, False)])
def test_how_often_masks_are_drawn(per_offload: bool, same: bool) -> None:
    protection, transport = protect(MixOptions(), MaskOptions(per_offload=per_offload))
    rows = rows_of(6)
    with protection.forward_session() as session:
        run(session, WEIGHT, rows, [6])
        run(session, WEIGHT, rows, [6])
    with protection.forward_session() as session:
        run(session, WEIGHT, rows, [6])
    first, second, other_pass = transport.operands
    assert np.array_equal(first, second) == same
    assert not np.array_equal(first, other_pass)


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 0, 1, 1]])
def test_a_shared_mask_makes_one_block(counts: Sequence[int]) -> None:
    rows = rows_of(3)
    for shared, blocks in ((True, [3 + 8]), (False, [1 + 8] * 3)):
        protection, transport = protect(MixOptions(shield_rows=8), MaskOptions(shared_decode=shared))
        with protection.forward_session() as session:
            run(session, WEIGHT, rows, counts)
        (operand,) = transport.operands
        assert len(operand) == sum(blocks) <= protection.operand_rows(counts)
        # A block spans its own rows and no others.
        first = spans(operand[: blocks[0]])
        outside = [np.linalg.norm(row - first @ row) / np.linalg.norm(row) for row in rows]
        assert [value < 5e-3 for value in outside] == [True, shared, shared]


def test_a_result_that_is_not_finite_is_refused() -> None:
    protection, transport = protect(MixOptions(shield_rows=2))
    transport.tamper = lambda result: result.__setitem__((0, 0), np.nan)
    with protection.forward_session() as session, pytest.raises(WorkerProtocolError, match="not finite"):
        run(session, WEIGHT, rows_of(3), [3])


# --- layers that stay in the runner ----------------------------------------------------------------------


def test_layers_left_in_the_runner_never_reach_the_worker() -> None:
    layers = 4
    weights = [WEIGHT + np.float16(i) for i in range(4 * layers + 1)]
    linears = [
        Linear(weight_id=i, name=f"w{i}", d_in=D_IN, d_out=D_OUT, load=lambda w=w: w)
        for i, w in enumerate(weights)
    ]
    transport = ExactTransport(weights)
    protection = left_in_runner(Plain, first_layers=1, last=True)(transport)
    protection.provision(linears)
    rows = rows_of(3)
    seen = []
    with protection.forward_session() as session:
        for linear, weight in zip(linears, weights, strict=True):
            before = transport.stats.offloads
            out = np.full((3, D_OUT), np.nan, np.float32)
            session.linear(linear, rows, [3], out)
            assert np.allclose(
                out, rows @ weight.astype(np.float32).T, rtol=1e-2, atol=1e-2 * np.abs(out).max()
            )
            if transport.stats.offloads > before:
                seen.append(linear.weight_id)
    assert seen == list(range(4, 12))


# --- conditions ------------------------------------------------------------------------------------------


def test_the_paper_s_settings_are_all_there() -> None:
    paper = [c for name, c in CONDITIONS.items() if name.startswith("paper-")]
    assert all(c.masks.per_offload for c in paper)
    values = [c.public_parameters() for c in paper]
    shields = {(v["shield_fraction"], v["shield_energy"]) for v in values}
    assert shields == {(0.05, 10.0), (0.12, 25.0), (0.14, 30.0)}
    assert {v["condition_number"] for v in values} == {1.0, 6.0, 50.0}
    assert any(v["skip_first_layers"] and v["skip_last"] for v in values)


def test_conditions_have_a_control_and_their_names() -> None:
    assert {"c0", "c1", "c2", "c3", "c4", "c5", "c6", "c2-offload"} <= set(CONDITIONS)
    assert [name for name, c in CONDITIONS.items() if c.is_control] == ["c0", "c0-int8"]
    assert all(name == c.name for name, c in CONDITIONS.items())
    assert CONDITIONS["c2"].public_parameters()["shield_rows"] == 8
    assert CONDITIONS["c5"].masks.shared_decode
    with pytest.raises(ValueError, match="already"):
        register(Condition(name="c2", title="", scheme="plain"))


def test_what_is_captured() -> None:
    places = CONDITIONS["c2"].places(30, "short")
    assert {layer for layer, _ in places} == {0, 1, 2, 24, 29, HEAD_LAYER}
    assert len(places) == 5 * 4 + 1
    assert {layer for layer, _ in CONDITIONS["c2"].places(30, "long")} == {0, 1, 2}
    assert CONDITIONS["c6"].places(30, "short") == ((HEAD_LAYER, "lm_head"),)
    assert {layer for layer, _ in CONDITIONS["paper-14"].places(30, "short")} == {2, 3, 4, 24}
    # In the order of a pass.
    assert list(places[:-1]) == sorted(
        places[:-1], key=lambda p: (p[0], ["qkv", "o", "gate_up", "down"].index(p[1]))
    )
