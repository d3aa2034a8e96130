"""Parsing of ATTESTATION_REPORT: fields, formats, and input made to hurt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import AttestationError, MalformedEvidenceError
from attestation.report import (
    REPORT_SIZE,
    PlatformBit,
    PolicyBit,
    Product,
    Tcb,
    parse_report,
    product_of,
)
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


def test_every_field_is_where_the_specification_has_it() -> None:
    """Each byte of each field, through a report whose fields all differ."""
    raw = bytearray(GENOA)
    marks = {
        "family_id": (0x010, 16), "image_id": (0x020, 16), "report_data": (0x050, 64),
        "measurement": (0x090, 48), "host_data": (0x0C0, 32), "id_key_digest": (0x0E0, 48),
        "author_key_digest": (0x110, 48), "report_id": (0x140, 32), "report_id_ma": (0x160, 32),
        "chip_id": (0x1A0, 64),
    }  # fmt: skip
    for number, (offset, size) in enumerate(marks.values()):
        raw[offset : offset + size] = bytes((number * 16 + i) & 0xFF for i in range(size))
    raw[0x004:0x008] = b"\x01\x02\x03\x04"
    raw[0x030:0x034] = b"\x02\x00\x00\x00"
    raw[0x048] = 0b11101
    raw[0x038], raw[0x180], raw[0x1E0], raw[0x1F0] = 1, 2, 3, 4
    raw[0x1E8:0x1EB], raw[0x1EC:0x1EF] = b"\x07\x08\x09", b"\x04\x05\x06"
    raw[0x1F8:0x200], raw[0x200:0x208] = b"\x01" + bytes(7), bytes(7) + b"\x80"
    report = parse_report(bytes(raw))
    for name, (offset, size) in marks.items():
        assert getattr(report, name) == raw[offset : offset + size]
    assert (report.guest_svn, report.vmpl) == (0x04030201, 2)
    assert (report.author_key_enabled, report.chip_key_masked, report.signing_key) == (True, False, 7)
    assert [tcb[0] for tcb in report.raw_tcbs.values()] == [2, 3, 4, 1]
    assert (report.current_firmware, report.committed_firmware) == ((9, 8, 7), (6, 5, 4))
    assert (report.launch_mitigations, report.current_mitigations) == (1, 0x80 << 56)


@pytest.mark.parametrize("bit", PolicyBit)
def test_policy_bits(bit: PolicyBit) -> None:
    raw = GENOA[:8] + int(bit).to_bytes(8, "little") + GENOA[16:]
    report = parse_report(raw)
    assert [other for other in PolicyBit if report.policy_bit(other)] == [bit]
    assert report.policy_abi == (0, 0)
    assert parse_report(GENOA[:8] + b"\x37\x01" + GENOA[10:]).policy_abi == (1, 0x37)


@pytest.mark.parametrize("bit", PlatformBit)
def test_platform_bits(bit: PlatformBit) -> None:
    report = parse_report(GENOA[:0x40] + int(bit).to_bytes(8, "little") + GENOA[0x48:])
    assert [other for other in PlatformBit if report.platform_bit(other)] == [bit]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in DATA.glob("*_report*.bin") if "_neg_" not in path.name)
)
def test_every_real_report_is_printable(name: str) -> None:
    report = parse_report((DATA / name).read_bytes())
    values = json.loads(json.dumps(report.as_dict()))
    assert values["measurement"] == report.measurement.hex()
    assert values["policy"]["debug"] is report.debug
    assert (values["reported_tcb"] == report.reported_tcb.hex()) is (report.product is None)
    assert "raw" not in values


def test_the_replay_key_is_over_the_signed_bytes() -> None:
    other = bytearray(GENOA)
    other[0x2A0] ^= 1
    assert parse_report(bytes(other)).replay_key == parse_report(GENOA).replay_key
    other[0x29F - 0x200] ^= 1  # in MEASUREMENT
    assert parse_report(bytes(other)).replay_key != parse_report(GENOA).replay_key


@pytest.mark.parametrize("offset", [0x038, 0x180, 0x1E0, 0x1F0])
def test_reserved_bytes_of_each_tcb_must_be_zero(offset: int) -> None:
    raw = bytearray(GENOA)
    raw[offset + 4] = 1
    with pytest.raises(MalformedEvidenceError, match="TCB_VERSION"):
        parse_report(bytes(raw))


@pytest.mark.parametrize("bit", range(5, 32))
def test_reserved_bits_of_the_key_information_must_be_zero(bit: int) -> None:
    with pytest.raises(MalformedEvidenceError, match="KEY_INFO"):
        parse_report(GENOA[:0x48] + (1 << bit).to_bytes(4, "little") + GENOA[0x4C:])


@pytest.mark.parametrize(
    ("cpuid", "product"),
    [
        ((0x19, 0x01, 1), Product.MILAN),
        ((0x19, 0x0F, 0), Product.MILAN),
        ((0x19, 0x10, 0), Product.GENOA),
        ((0x19, 0x20, 0), None),
        ((0x19, 0xA0, 2), Product.GENOA),
        ((0x19, 0xB0, 2), None),
        ((0x1A, 0x02, 1), Product.TURIN),
        ((0x1A, 0x11, 0), Product.TURIN),
        ((0x1A, 0x12, 0), None),
        ((0x17, 0x31, 0), None),
        (None, None),
    ],
)
def test_products_by_cpuid(cpuid: tuple[int, int, int] | None, product: Product | None) -> None:
    assert product_of(cpuid) is product


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
