"""The bundled floors, and tables that must not load."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

import pytest

from attestation.certificates import AMD_ROOTS
from attestation.errors import Fault, InvalidPolicyError
from attestation.report import Product, Tcb, product_of
from attestation.tcb_floors import TcbFloors, bundled_floors, floors_from, parse_floors
from attestation.verify import GenuineReport, verify_evidence

TABLE = """
format = "gelo-tcb-floors/1"
version = "test"
[sources]
a = "https://example.org"
[[floor]]
name = "Genoa"
cpuid = [0x19, 0xA0, 0x02]
tcb = { bootloader = 1, tee = 0, snp = 2, microcode = 3 }
mitigations = 0
sources = ["a"]
"""


@pytest.fixture(scope="module")
def genuine(vector: Any) -> GenuineReport:
    """A patched Bergamo: bootloader 10, SNP 27, microcode 27."""
    return verify_evidence(vector("genoa"), roots=AMD_ROOTS, at=datetime(2026, 10, 1, tzinfo=UTC))


def fields(floors: TcbFloors, genuine: GenuineReport) -> list[str]:
    return [mismatch.field for mismatch in floors.mismatches(genuine)]


def test_the_bundled_table_is_dated_and_sourced() -> None:
    floors = bundled_floors()
    assert date.fromisoformat(floors.version) <= datetime.now(UTC).date()
    products = {product_of(cpuid) for cpuid in floors.floors}
    assert products == set(Product)
    for floor in floors.floors.values():
        assert floor.sources
        assert floor.reported == floor.committed == floor.launch == floor.current
        assert (floor.reported.fmc is not None) is (product_of(floor.cpuid) is Product.TURIN)


def test_a_patched_machine_passes(genuine: GenuineReport) -> None:
    assert fields(bundled_floors(), genuine) == []


def test_a_real_machine_without_the_fix_of_cve_2025_0033_is_refused(vector: Any) -> None:
    """A Genoa with SNP 23, microcode 84: AMD-SB-3020 asks for 27 and 86."""
    genuine = verify_evidence(vector("genoa-v3"), roots=AMD_ROOTS, at=datetime(2026, 10, 1, tzinfo=UTC))
    names = ("reported", "committed", "launch", "current")
    expected = [f"{name}_tcb.{part}" for name in names for part in ("snp", "microcode")]
    assert fields(bundled_floors(), genuine) == expected


@pytest.mark.parametrize("name", ["reported", "committed", "launch", "current"])
@pytest.mark.parametrize("part", ["bootloader", "snp", "microcode"])
def test_each_component_of_each_field_is_judged_alone(genuine: GenuineReport, name: str, part: str) -> None:
    tcb = genuine.tcbs[name]
    high = Tcb(None, 255, 255, 255, 255)
    lowered = replace(high, **{part: getattr(tcb, part) - 1})
    (mismatch,) = bundled_floors().mismatches(replace(genuine, **{f"{name}_tcb": lowered}))
    assert mismatch.field == f"{name}_tcb.{part}"
    assert mismatch.fault is Fault.HOST
    assert mismatch.expected == f"at least {getattr(tcb, part)}"


def test_the_front_end_microcode_is_judged_on_turin(vector: Any) -> None:
    turin = verify_evidence(vector("turin"), roots=AMD_ROOTS, at=datetime(2026, 10, 1, tzinfo=UTC))
    assert fields(bundled_floors(), turin) == []
    low = replace(turin, launch_tcb=replace(turin.launch_tcb, fmc=0))
    assert fields(bundled_floors(), low) == ["launch_tcb.fmc"]
    absent = replace(turin, launch_tcb=replace(turin.launch_tcb, fmc=None))
    assert fields(bundled_floors(), absent) == ["launch_tcb.fmc"]


@pytest.mark.parametrize("cpuid", [None, (0x19, 0xA0, 3), (0x1A, 0x11, 0), (0, 0, 0)])
def test_an_unlisted_processor_is_refused(genuine: GenuineReport, cpuid: Any) -> None:
    unknown = replace(genuine, report=replace(genuine.report, cpuid=cpuid))
    (mismatch,) = bundled_floors().mismatches(unknown)
    assert mismatch.field == "cpuid"
    assert mismatch.fault is Fault.CLIENT


def test_mitigations_are_bits_and_not_numbers(genuine: GenuineReport) -> None:
    def with_vectors(launch: int | None, current: int | None) -> GenuineReport:
        report = replace(genuine.report, launch_mitigations=launch, current_mitigations=current)
        return replace(genuine, report=report)

    floors = bundled_floors()
    assert fields(floors, with_vectors(0x0B, 0xFF)) == []
    assert fields(floors, with_vectors(0xF4, 0x0B)) == ["launch_mit_vector"]
    assert fields(floors, with_vectors(0x0B, 0x0A)) == ["current_mit_vector"]
    assert fields(floors, with_vectors(None, None)) == []


def test_a_field_may_have_its_own_floor(genuine: GenuineReport) -> None:
    text = TABLE + "launch = { bootloader = 1, tee = 0, snp = 99, microcode = 3 }\n"
    assert fields(parse_floors(TABLE.encode()), genuine) == []
    assert fields(parse_floors(text.encode()), genuine) == ["launch_tcb.snp"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"gelo-tcb-floors/1"', '"gelo-tcb-floors/2"'),
        ('version = "test"', "version = 1"),
        ('version = "test"', ""),
        ("[sources]", "extra = 1\n[sources]"),
        ("0xA0", "0x100"),
        ("0xA0", "0x60"),
        (", 0x02]", "]"),
        ("snp = 2", "snp = 256"),
        ("snp = 2", "snp = -1"),
        ("snp = 2", "snp = true"),
        ("snp = 2", "snp = 2.0"),
        ("snp = 2, ", ""),
        ("snp = 2", "snp = 2, fmc = 1"),
        ("mitigations = 0", ""),
        ("mitigations = 0", "mitigations = -1"),
        ('sources = ["a"]', 'sources = ["b"]'),
        ('sources = ["a"]', "sources = []"),
        ('name = "Genoa"', "name = 3"),
        ('name = "Genoa"', 'name = "Genoa"\nunknown = 1'),
        (TABLE, TABLE + TABLE[TABLE.index("[[floor]]") :]),
        (TABLE[TABLE.index("[[floor]]") :], "floor = []"),
        (TABLE, "not toml"),
    ],
)
def test_incomplete_tables_do_not_load(old: str, new: str) -> None:
    assert old in TABLE
    with pytest.raises(InvalidPolicyError):
        parse_floors(TABLE.replace(old, new).encode())


def test_a_turin_needs_its_front_end_microcode() -> None:
    entry: dict[str, object] = {
        "name": "Turin",
        "cpuid": [0x1A, 2, 1],
        "tcb": {"bootloader": 1, "tee": 1, "snp": 4, "microcode": 81},
        "mitigations": 0,
        "sources": ["x"],
    }
    with pytest.raises(InvalidPolicyError, match="fmc"):
        floors_from([entry])


def test_no_floors_are_no_table() -> None:
    with pytest.raises(InvalidPolicyError):
        TcbFloors("x", {})
