"""Parsing of ATTESTATION_REPORT: fields, formats, and input made to hurt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import AttestationError, MalformedEvidenceError
from attestation.report import REPORT_SIZE, Product, Tcb, parse_report
from attestation.simulated import SimulatedPsp

DATA = Path(__file__).parent / "data"
GENOA = (DATA / "genoa_cdai_report_v5.bin").read_bytes()


@pytest.mark.parametrize(
    ("name", "version", "product", "vmpl", "firmware"),
    [
        ("genoa_cdai_report_v5.bin", 5, Product.GENOA, 0, (1, 55, 49)),
        ("turin_ms_report.bin", 5, Product.TURIN, 0, (1, 55, 65)),
        ("milan_openpcc_gce_report_v4.bin", 4, Product.MILAN, 0, (1, 55, 31)),
        ("milan_trustee_vlek_report.bin", 3, Product.MILAN, 1, (1, 55, 29)),
        ("milan_gsg_report_v2.bin", 2, None, 0, (1, 49, 3)),
    ],
)
def test_real_reports_parse(
    name: str, version: int, product: Product | None, vmpl: int, firmware: tuple[int, int, int]
) -> None:
    report = parse_report((DATA / name).read_bytes())
    assert (report.version, report.product, report.vmpl) == (version, product, vmpl)
    assert report.current_firmware == firmware
    assert report.debug is (name == "milan_gsg_report_v2.bin")


def test_fields_of_version_5() -> None:
    report = parse_report(GENOA)
    assert report.policy == 0x30000
    assert report.platform_info == 0x25
    assert report.cpuid == (0x19, 0xA0, 2)
    assert (report.launch_mitigations, report.current_mitigations) == (0xB, 0xB)
    assert Tcb.decode(report.reported_tcb, Product.GENOA) == Tcb(None, 10, 0, 27, 27)
    assert report.signed_bytes == GENOA[:0x2A0]


def test_version_2_has_no_cpuid() -> None:
    assert parse_report((DATA / "milan_gsg_report_v2.bin").read_bytes()).cpuid is None


@pytest.mark.parametrize("version", [2, 3, 4, 5])
@pytest.mark.parametrize("product", Product)
def test_simulated_reports_round_trip(cache_dir: Path, product: Product, version: int) -> None:
    psp = SimulatedPsp(cache_dir=cache_dir, product=product).altered(version=version, vmpl=2, policy=0xB0000)
    report = parse_report(psp.evidence(bytes(range(64))).report)
    assert report.report_data == bytes(range(64))
    assert (report.version, report.vmpl, report.policy) == (version, 2, 0xB0000)
    assert report.measurement == psp.guest.measurement
    assert report.report_id == psp.guest.report_id
    assert report.product is (product if version >= 3 else None)
    assert Tcb.decode(report.reported_tcb, product) == psp.tcb
    assert report.debug
    assert not report.migration_agent


@pytest.mark.parametrize("length", [0, 1, 0x2A0, REPORT_SIZE - 1, REPORT_SIZE + 1, 2 * REPORT_SIZE])
def test_any_other_length_is_refused(length: int) -> None:
    with pytest.raises(MalformedEvidenceError, match="1184"):
        parse_report((GENOA * 2)[:length])


@pytest.mark.parametrize("version", [0, 1, 6, 99, 2**32 - 1])
def test_unknown_versions_are_refused(version: int) -> None:
    with pytest.raises(MalformedEvidenceError, match="version"):
        parse_report(version.to_bytes(4, "little") + GENOA[4:])


@pytest.mark.parametrize(
    "offset", [0x48 + 3, 0x4C, 0x18B, 0x19F, 0x1EB, 0x1EF, 0x208, 0x29F, 0x2D0, 0x318, 0x49F]
)
def test_reserved_bytes_must_be_zero(offset: int) -> None:
    raw = bytearray(GENOA)
    raw[offset] = 1
    with pytest.raises(MalformedEvidenceError):
        parse_report(bytes(raw))


def test_fields_of_later_versions_are_reserved_in_earlier_ones() -> None:
    with pytest.raises(MalformedEvidenceError):  # mitigation vectors in a version 3 report
        parse_report(b"\x03\0\0\0" + GENOA[4:])
    with pytest.raises(MalformedEvidenceError):  # CPUID in a version 2 report
        parse_report(b"\x02\0\0\0" + GENOA[4:0x1F8] + bytes(0x10) + GENOA[0x208:])


@pytest.mark.parametrize(("product", "offset"), [(Product.GENOA, 3), (Product.MILAN, 5), (Product.TURIN, 6)])
def test_reserved_bytes_of_a_tcb_must_be_zero(product: Product, offset: int) -> None:
    raw = bytearray(8)
    raw[offset] = 1
    with pytest.raises(MalformedEvidenceError, match="TCB_VERSION"):
        Tcb.decode(bytes(raw), product)


@given(st.binary(max_size=2 * REPORT_SIZE) | st.binary(min_size=REPORT_SIZE, max_size=REPORT_SIZE))
def test_arbitrary_bytes_raise_nothing_unexpected(data: bytes) -> None:
    with pytest.raises(AttestationError):
        parse_report(data)


@given(st.integers(0, REPORT_SIZE - 1), st.integers(0, 255))
def test_a_changed_byte_parses_or_is_refused(offset: int, value: int) -> None:
    raw = bytearray(GENOA)
    raw[offset] = value
    try:
        report = parse_report(bytes(raw))
    except MalformedEvidenceError:
        return
    assert report.raw == bytes(raw)
