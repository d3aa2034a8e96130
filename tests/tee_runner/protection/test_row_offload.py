"""A decode step's row through a doorbell: what is sent, what comes back, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gelo.header import OffloadHeader, Status
from tee_runner.errors import (
    GeloError,
    IntegrityError,
    WorkerError,
    WorkerProtocolError,
    WorkerUnavailableError,
)
from tee_runner.protection.base import Linear, Protection
from tee_runner.protection.gelo.base import GeloProtection
from tee_runner.protection.gelo.kernels import block_scales
from tee_runner.protection.gelo.tiles import shield_size
from tee_runner.protection.plain import Plain

from .doubles import GELO_SCHEMES, ExactTransport, Float32, key_of
from .rung import RungTransport
from .test_decode_row import normal_of

D_OUT = 64
LARGEST_D_IN = 200
WEIGHT = np.random.default_rng(1).standard_normal((D_OUT, LARGEST_D_IN)).astype(np.float16)
ROWS = np.random.default_rng(2).standard_normal((1, 40)).astype(np.float32)
Kind = type[GeloProtection] | type[Plain]
KINDS: tuple[Kind, ...] = (*GELO_SCHEMES, Plain)
kinds = pytest.mark.parametrize("kind", KINDS)


def linear_of(weight: Any, weight_id: int = 0) -> Linear:
    d_out, d_in = weight.shape
    return Linear(weight_id=weight_id, name=f"w{weight_id}", d_in=d_in, d_out=d_out, load=lambda: weight)


def checked(kind: Kind, transport: Any, weights: list[Any], *, probes: int = 2) -> tuple[Any, list[Linear]]:
    protection = kind(transport, key=key_of(4)) if issubclass(kind, GeloProtection) else kind(transport)
    linears = [linear_of(weight, index) for index, weight in enumerate(weights)]
    protection.provision(linears, probes=probes)
    return protection, linears


def offload(protection: Protection, linear: Linear, rows: Float32) -> Float32:
    out = np.full((len(rows), linear.d_out), np.nan, np.float32)
    with protection.forward_session() as session:
        session.linear(linear, rows, [len(rows)], out)
    return out


def product(rows: Float32, weight: Any) -> Any:
    return rows.astype(np.float64) @ weight.astype(np.float64).T


@pytest.fixture
def transport() -> Iterator[RungTransport]:
    transport = RungTransport([WEIGHT[:, :40]])
    yield transport
    transport.close()


@pytest.mark.parametrize("kind", GELO_SCHEMES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.integers(1, 50), d=st.integers(1, LARGEST_D_IN), exponent=st.integers(-20, 20))
def test_what_is_sent_is_what_apply_makes(
    transport: RungTransport, kind: type[GeloProtection], key: int, d: int, exponent: int
) -> None:
    """The copy that is checked and the one that the worker reads, in full."""
    rng = np.random.default_rng(key)
    weight = WEIGHT[:, :d]
    transport.weights[0] = weight.astype(np.float64)
    protection, (linear,) = checked(kind, transport, [weight])
    mask = protection.new_mask(1)
    link = protection.single.link(protection.integrity, linear, mask.s)
    assert link is not None
    operand, sent = link.held[0], link.held[1].view(np.uint16)
    assert not np.may_share_memory(operand, sent)
    operand[...] = 0x7E00
    sent[...] = 0x7E00
    rows = (rng.standard_normal((1, d)) * 2.0**exponent).astype(np.float32)
    normals = rng.standard_normal(shield_size(1, mask.s, d)).astype(np.float32)
    factor, asleep = mask.ask(rows, normals, link.words, link.bell, 0, protection.single.tally)
    if asleep:
        transport.wake()
    transport.until_answered()
    transport.doorbell.wait_words(1.0)
    scales, expected = np.empty(1, np.float32), np.full((mask.s, d), 0x7E00, np.uint16)
    sigma, scale = block_scales(rows, scales, mask.s - 1)
    mask.apply(rows, scales, normals, np.float32(sigma), np.float32(scale), expected)
    np.testing.assert_array_equal(operand, expected)
    np.testing.assert_array_equal(sent, expected)
    np.testing.assert_array_equal(transport.operands[-1].view(np.uint16), expected)
    assert factor == normal_of(mask) / (scale * float(scales[0]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(d=st.integers(1, LARGEST_D_IN), exponent=st.integers(-20, 20))
def test_plain_sends_what_it_sends_without_a_doorbell(
    transport: RungTransport, d: int, exponent: int
) -> None:
    weight = WEIGHT[:, :d]
    transport.weights[0] = weight.astype(np.float64)
    rows = (np.random.default_rng(d).standard_normal((1, d)) * 2.0**exponent).astype(np.float32)
    protection, (linear,) = checked(Plain, transport, [weight])
    out = offload(protection, linear, rows)
    assert protection.single._links
    exact = ExactTransport([weight])
    other, (linear,) = checked(Plain, exact, [weight])
    np.testing.assert_array_equal(out, offload(other, linear, rows))
    np.testing.assert_array_equal(transport.operands[-1], exact.operands[-1])


@kinds
def test_rows_of_several_weights_in_turns(kind: Kind) -> None:
    shapes = [(64, 40), (16, 40), (48, 200), (64, 40), (1040, 17)]
    weights = [np.random.default_rng(d_in).standard_normal((d_out, d_in)) for d_out, d_in in shapes]
    halves = [weight.astype(np.float16) for weight in weights]
    transport = RungTransport(halves)
    protection, linears = checked(kind, transport, halves)
    for step in range(3):
        with protection.forward_session() as session:
            for linear, half in zip(linears, halves, strict=True):
                rows = np.random.default_rng(step).standard_normal((1, linear.d_in)).astype(np.float32)
                out = np.empty((1, linear.d_out), np.float32)
                session.linear(linear, rows, [1], out)
                np.testing.assert_allclose(out, product(rows, half), atol=0.2)
    assert len(protection.single._links) == len(shapes)
    assert transport.stats.offloads == 3 * len(shapes)
    assert not protection.single._sums.any()
    transport.close()


@kinds
def test_all_other_offloads_take_the_general_way(kind: Kind) -> None:
    ragged = WEIGHT[:60, :40]
    transport = RungTransport([WEIGHT[:, :40], ragged])
    protection, (linear, odd) = checked(kind, transport, [WEIGHT[:, :40], ragged])
    s = kind.operand_rows([1])
    assert protection.single.link(protection.integrity, linear, s) is not None
    assert protection.single.link(protection.integrity, odd, s) is None
    np.testing.assert_allclose(offload(protection, odd, ROWS), product(ROWS, ragged), atol=0.1)
    several = np.repeat(ROWS, 2, axis=0)
    np.testing.assert_allclose(
        offload(protection, linear, several), product(several, WEIGHT[:, :40]), atol=0.1
    )
    assert len(protection.single._links) == 1
    for probes in (1, 4):
        other, (linear, _) = checked(kind, transport, [WEIGHT[:, :40], ragged], probes=probes)
        assert other.single.link(other.integrity, linear, s) is None
        np.testing.assert_allclose(offload(other, linear, ROWS), product(ROWS, WEIGHT[:, :40]), atol=0.1)
    inline, (linear,) = checked(kind, ExactTransport([WEIGHT[:, :40]]), [WEIGHT[:, :40]])
    assert inline.single.link(inline.integrity, linear, s) is None
    transport.close()


@pytest.mark.parametrize(
    ("kind", "row"), [(kind, row) for kind in KINDS for row in range(kind.operand_rows([1]))]
)
def test_a_lie_in_any_row_is_caught(transport: RungTransport, kind: Kind, row: int) -> None:
    """Of the operand, not of what comes out of the mask: the verdict tells nothing about the mask."""
    protection, (linear,) = checked(kind, transport, [WEIGHT[:, :40]])
    np.testing.assert_allclose(offload(protection, linear, ROWS), product(ROWS, WEIGHT[:, :40]), atol=0.1)

    def tamper(result: Float32) -> None:
        result[row, 5] += np.float32(0.01 * np.abs(result).max())

    transport.tamper = tamper
    with pytest.raises(IntegrityError):
        offload(protection, linear, ROWS)
    assert protection.integrity is not None
    assert protection.integrity.over
    link = protection.single._links[0, kind.operand_rows([1])]
    assert not any(array.any() for array in link.held[3:])
    transport.tamper = None
    with pytest.raises(IntegrityError, match="over"):
        offload(protection, linear, ROWS)


@kinds
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("probes", "error"), [(2, IntegrityError), (0, WorkerProtocolError)])
def test_what_is_not_finite_is_refused(
    transport: RungTransport, kind: Kind, value: float, probes: int, error: type[Exception]
) -> None:
    protection, (linear,) = checked(kind, transport, [WEIGHT[:, :40]], probes=probes)

    def tamper(result: Float32) -> None:
        result[-1, 17] = value

    transport.tamper = tamper
    with pytest.raises(error):
        offload(protection, linear, ROWS)


@kinds
def test_without_checks_nothing_is_copied(transport: RungTransport, kind: Kind) -> None:
    protection, (linear,) = checked(kind, transport, [WEIGHT[:, :40]], probes=0)
    out = offload(protection, linear, ROWS)
    np.testing.assert_allclose(out, product(ROWS, WEIGHT[:, :40]), atol=0.1)
    (link,) = protection.single._links.values()
    assert np.shares_memory(link.held[0], link.held[1])
    assert protection.profile.nanoseconds["check"] == 0
    assert protection.profile.nanoseconds["unapply"] > 0


@kinds
def test_the_worker_is_not_blamed_for_an_operand_that_is_not_finite(
    transport: RungTransport, kind: Kind
) -> None:
    protection, (linear,) = checked(kind, transport, [WEIGHT[:, :40]])
    with pytest.raises(GeloError, match="not finite in float16") as error:
        offload(protection, linear, np.full((1, 40), np.nan, np.float32))
    assert not isinstance(error.value, WorkerError)


FORGED = {
    "another sequence": {"sequence": 77},
    "another weight": {"weight_id": 1},
    "another number of rows": {"rows": 3},
    "another width": {"d_in": 41},
    "another shape": {"d_out": 32},
}


@pytest.mark.parametrize("changes", FORGED.values(), ids=FORGED.keys())
def test_an_answer_to_another_request_is_refused(transport: RungTransport, changes: dict[str, int]) -> None:
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])
    transport.forge = lambda header: header._replace(**changes).pack()
    with pytest.raises(WorkerProtocolError):
        offload(protection, linear, ROWS)


@pytest.mark.parametrize("raw", [bytes(64), b"\xff" * 64], ids=["zeros", "ones"])
def test_a_header_that_is_none_is_refused(transport: RungTransport, raw: bytes) -> None:
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])
    transport.forge = lambda _: raw
    with pytest.raises(WorkerProtocolError, match="header"):
        offload(protection, linear, ROWS)


def test_a_failure_that_the_worker_reports(transport: RungTransport) -> None:
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])
    transport.forge = lambda header: header._replace(status=Status.ENGINE_FAILED).pack()
    with pytest.raises(WorkerError, match="ENGINE_FAILED"):
        offload(protection, linear, ROWS)


@pytest.mark.parametrize("compute_ns", [0, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_what_the_worker_says_it_took_is_not_trusted(transport: RungTransport, compute_ns: int) -> None:
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])
    transport.forge = lambda header: header._replace(compute_ns=compute_ns).pack()
    offload(protection, linear, ROWS)
    assert transport.stats.worker_ns == min(compute_ns, 1 << 62)
    assert 0 <= protection.profile.nanoseconds["worker compute"] <= transport.stats.exchange_ns
    assert protection.profile.nanoseconds["wire"] >= 0


@kinds
def test_a_slow_answer_is_waited_for(kind: Kind) -> None:
    transport = RungTransport([WEIGHT[:, :40]], spins=3)
    transport.delay = 0.05
    protection, (linear,) = checked(kind, transport, [WEIGHT[:, :40]])
    for _ in range(3):
        np.testing.assert_allclose(offload(protection, linear, ROWS), product(ROWS, WEIGHT[:, :40]), atol=0.1)
    assert transport.stats.exchange_ns >= 3 * 50_000_000
    transport.close()


def test_no_answer_in_time(transport: RungTransport) -> None:
    transport._timeout = 0.05
    transport.forge = lambda _: None
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])
    with pytest.raises(WorkerUnavailableError, match="within"):
        offload(protection, linear, ROWS)


def test_a_worker_that_leaves(transport: RungTransport) -> None:
    transport.forge = lambda _: b""
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])
    with pytest.raises(WorkerUnavailableError):
        offload(protection, linear, ROWS)
    with pytest.raises(WorkerUnavailableError):
        offload(protection, linear, ROWS)


@kinds
def test_the_profile_has_what_the_pass_took(transport: RungTransport, kind: Kind) -> None:
    transport.delay = 0.01
    protection, (linear,) = checked(kind, transport, [WEIGHT[:, :40]])
    offload(protection, linear, ROWS)
    spent = protection.profile.nanoseconds
    s = kind.operand_rows([1])
    assert spent["wire"] + spent["worker compute"] >= 9_000_000
    assert spent["mask apply"] > 0
    assert spent["check"] > 0
    assert spent["unapply"] == 0
    assert (transport.stats.bytes_sent, transport.stats.bytes_received) == (s * 40 * 2, s * D_OUT * 4)
    assert transport.stats.worker_ns == 0
    assert not protection.single.tally.any()


def test_a_failed_pass_is_counted_too(transport: RungTransport) -> None:
    protection, (linear,) = checked(GELO_SCHEMES[1], transport, [WEIGHT[:, :40]])

    def tamper(result: Float32) -> None:
        result += 1.0

    transport.tamper = tamper
    with pytest.raises(IntegrityError):
        offload(protection, linear, ROWS)
    assert transport.stats.offloads == 1


def test_the_header_of_a_request(transport: RungTransport) -> None:
    seen: list[OffloadHeader] = []

    def forge(header: OffloadHeader) -> bytes:
        seen.append(header)
        return header.pack()

    transport.forge = forge
    protection, (linear,) = checked(GELO_SCHEMES[0], transport, [WEIGHT[:, :40]])
    offload(protection, linear, ROWS)
    offload(protection, linear, np.repeat(ROWS, 3, axis=0))
    offload(protection, linear, ROWS)
    assert [(header.sequence, header.rows) for header in seen] == [(1, 9), (2, 11), (3, 9)]
