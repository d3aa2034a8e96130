"""Rules on the machine and the launch, each alone, and composed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from attestation.certificates import AMD_ROOTS
from attestation.crl import RevocationStatus
from attestation.errors import Fault, InvalidPolicyError
from attestation.pins import UNPINNED
from attestation.policy import NOTHING_GIVEN, standard_platform
from attestation.report import PlatformBit, PolicyBit, SigningKey
from attestation.rules import AllOf, AnyOf, CoreRules, LaunchRules, PlatformRules, Rule, StrictRules, Vlek
from attestation.verify import GenuineReport, verify_evidence

STANDARD = standard_platform()
STRICT_POLICY = (
    PolicyBit.RESERVED_ONE
    | PolicyBit.RAPL_DIS
    | PolicyBit.CIPHERTEXT_HIDING_DRAM
    | PolicyBit.PAGE_SWAP_DISABLE
)
STRICT_PLATFORM = (
    PlatformBit.RAPL_DIS | PlatformBit.CIPHERTEXT_HIDING_DRAM_EN | PlatformBit.ALIAS_CHECK_COMPLETE
)


@pytest.fixture(scope="module")
def genuine(vector: Any) -> GenuineReport:
    """A patched Bergamo without a revocation list."""
    at = datetime(2026, 10, 1, tzinfo=UTC)
    return verify_evidence(vector("genoa"), roots=AMD_ROOTS, at=at)


def with_report(genuine: GenuineReport, **changes: Any) -> GenuineReport:
    return replace(genuine, report=replace(genuine.report, **changes))


def fields(rule: Rule, genuine: GenuineReport) -> list[str]:
    return [mismatch.field for mismatch in rule.mismatches(genuine)]


def test_a_patched_machine_passes(genuine: GenuineReport) -> None:
    assert fields(CoreRules(), genuine) == []
    assert fields(NOTHING_GIVEN, genuine) == []
    assert fields(STANDARD, genuine) == ["revocation"]
    status = RevocationStatus(datetime.now(UTC), datetime.now(UTC), 1, "")
    assert fields(STANDARD, replace(genuine, revocation=status)) == []


@pytest.mark.parametrize("bit", range(64))
def test_every_policy_bit_is_judged(genuine: GenuineReport, bit: int) -> None:
    expected = {
        17: ["policy.reserved"],
        18: ["policy.migrate_ma"],
        19: ["policy.debug"],
        21: ["policy.cxl_allow"],
    }
    flipped = with_report(genuine, policy=genuine.report.policy ^ 1 << bit)
    assert fields(CoreRules(), flipped) == expected.get(bit, ["policy.reserved"] if bit >= 26 else [])


@pytest.mark.parametrize("vmpl", [1, 2, 3, 4, 0xFFFFFFFF])
def test_only_vmpl_0(genuine: GenuineReport, vmpl: int) -> None:
    assert fields(CoreRules(), with_report(genuine, vmpl=vmpl)) == ["vmpl"]


def test_firmware_must_be_committed(genuine: GenuineReport) -> None:
    older = replace(genuine.committed_tcb, snp=genuine.committed_tcb.snp - 1)
    assert fields(CoreRules(), replace(genuine, committed_tcb=older)) == ["committed_tcb"]
    assert fields(CoreRules(), with_report(genuine, committed_firmware=(1, 55, 48))) == ["committed_firmware"]


def test_the_alias_check_is_required(genuine: GenuineReport) -> None:
    without = genuine.report.platform_info & ~PlatformBit.ALIAS_CHECK_COMPLETE
    (mismatch,) = CoreRules().mismatches(with_report(genuine, platform_info=without))
    assert mismatch.field == "platform_info.alias_check_complete"
    assert mismatch.fault is Fault.HOST


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2}, ["version"]),
        ({"version": 4}, ["version"]),
        ({"current_firmware": (1, 54, 99)}, ["current_firmware"]),
        ({"committed_firmware": (0, 99, 99)}, ["committed_firmware"]),
        ({"signing_key": SigningKey.VLEK}, ["signing_key"]),
        ({"signing_key": SigningKey.NONE}, ["signing_key"]),
        ({"signing_key": 5}, ["signing_key"]),
        ({"chip_id": bytes(64)}, ["chip_id"]),
        ({"cpuid": (0x19, 0x11, 7)}, ["cpuid"]),
        ({"cpuid": None}, ["cpuid"]),
        ({"launch_mitigations": 3}, ["launch_mit_vector"]),
        ({"current_mitigations": 0}, ["current_mit_vector"]),
    ],
)
def test_the_standard_profile(genuine: GenuineReport, changes: dict[str, Any], expected: list[str]) -> None:
    rules = replace(STANDARD, revocation_required=False)
    assert fields(rules, with_report(genuine, **changes)) == expected


def test_the_guests_abi_floor(genuine: GenuineReport) -> None:
    rules = replace(STANDARD, minimum_guest_abi=(1, 55), revocation_required=False)
    assert fields(rules, genuine) == ["policy.abi"]
    for abi, expected in ((0x0136, ["policy.abi"]), (0x0137, []), (0x0200, [])):
        changed = with_report(genuine, policy=genuine.report.policy & ~0xFFFF | abi)
        assert fields(rules, changed) == expected


def test_chips_can_be_pinned(genuine: GenuineReport) -> None:
    own = replace(STANDARD, chip_ids=frozenset({genuine.report.chip_id}), revocation_required=False)
    assert fields(own, genuine) == []
    other = replace(own, chip_ids=frozenset({b"\x01" * 64}))
    assert fields(other, genuine) == ["chip_id"]


def test_a_vlek_is_accepted_by_provider_only(genuine: GenuineReport) -> None:
    hidden = replace(with_report(genuine, signing_key=SigningKey.VLEK, chip_id=bytes(64)), csp_id="SP-A")
    rules = replace(STANDARD, revocation_required=False)
    vlek = Vlek(csp_ids=frozenset({"SP-A"}), zero_chip_id=True)
    assert fields(rules, hidden) == ["signing_key", "chip_id"]
    assert fields(replace(rules, vlek=vlek), hidden) == []
    assert fields(replace(rules, vlek=replace(vlek, zero_chip_id=False)), hidden) == ["chip_id"]
    assert fields(replace(rules, vlek=replace(vlek, csp_ids=frozenset({"SP-B"}))), hidden) == ["csp_id"]
    assert fields(replace(rules, vlek=vlek), genuine) == []
    assert fields(replace(rules, vlek=vlek), with_report(genuine, chip_id=bytes(64))) == ["chip_id"]


@pytest.mark.parametrize(
    ("name", "size"),
    [("host_data", 32), ("family_id", 16), ("image_id", 16), ("id_key_digest", 48)],
)
def test_launch_values_are_zero_or_pinned(genuine: GenuineReport, name: str, size: int) -> None:
    value = b"\x07" * size
    given = with_report(genuine, **{name: value})
    assert fields(NOTHING_GIVEN, given) == [name]
    pinned = replace(NOTHING_GIVEN, **{name: value})
    assert fields(pinned, given) == []
    assert fields(pinned, genuine) == [name]


def test_svn_and_author_key_are_zero_or_pinned(genuine: GenuineReport) -> None:
    assert fields(NOTHING_GIVEN, with_report(genuine, guest_svn=1)) == ["guest_svn"]
    assert fields(replace(NOTHING_GIVEN, guest_svn=2), with_report(genuine, guest_svn=2)) == []
    assert fields(NOTHING_GIVEN, with_report(genuine, author_key_enabled=True)) == ["author_key_enabled"]
    author = replace(NOTHING_GIVEN, author_key_digest=b"\x01" * 48)
    signed = with_report(genuine, author_key_digest=b"\x01" * 48, author_key_enabled=True)
    assert fields(author, signed) == []
    assert fields(author, genuine) == ["author_key_digest", "author_key_enabled"]


def test_the_strict_profile(genuine: GenuineReport) -> None:
    hardened = with_report(genuine, policy=int(STRICT_POLICY), platform_info=int(STRICT_PLATFORM))
    assert fields(StrictRules(), hardened) == []
    assert fields(StrictRules(), genuine) == [
        "policy.smt",
        "policy.ciphertext_hiding_dram",
        "policy.page_swap_disable",
        "policy.rapl_dis",
        "platform_info.smt_en",
        "platform_info.ciphertext_hiding_dram_en",
        "platform_info.rapl_dis",
    ]


def test_rules_compose(genuine: GenuineReport) -> None:
    passes, fails = NOTHING_GIVEN, replace(NOTHING_GIVEN, guest_svn=3)
    also_fails = replace(NOTHING_GIVEN, host_data=b"\x01" * 32)
    assert fields(AllOf(passes, fails, also_fails), genuine) == ["guest_svn", "host_data"]
    assert fields(AnyOf(fails, passes), genuine) == []
    assert fields(AnyOf(fails, also_fails), genuine) == [
        "alternative 1: guest_svn",
        "alternative 2: host_data",
    ]
    assert fields(AllOf(AnyOf(fails, passes), CoreRules()), genuine) == []
    for empty in ((), (None,)):
        with pytest.raises(InvalidPolicyError):
            AllOf(*empty)
        with pytest.raises(InvalidPolicyError):
            AnyOf(*empty)


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": frozenset()},
        {"versions": frozenset({6})},
        {"versions": {3}},
        {"chip_ids": frozenset()},
        {"chip_ids": frozenset({bytes(64)})},
        {"chip_ids": frozenset({b"\x01" * 8})},
        {"chip_ids": None},
    ],
)
def test_invalid_platform_rules(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError):
        replace(STANDARD, **changes)


@pytest.mark.parametrize("kind", [PlatformRules, LaunchRules, Vlek])
def test_every_expectation_is_required(kind: Any) -> None:
    example = {PlatformRules: STANDARD, LaunchRules: NOTHING_GIVEN}.get(
        kind, Vlek(csp_ids=frozenset({"x"}), zero_chip_id=False)
    )
    values = {name: getattr(example, name) for name in kind.__dataclass_fields__}
    assert kind(**values) == example
    for name in values:
        with pytest.raises(TypeError):
            kind(**{key: value for key, value in values.items() if key != name})


@pytest.mark.parametrize(
    "changes", [{"host_data": b""}, {"family_id": bytes(15)}, {"guest_svn": -1}, {"guest_svn": True}]
)
def test_invalid_launch_rules(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError):
        replace(NOTHING_GIVEN, **changes)


@pytest.mark.parametrize("names", [frozenset(), frozenset({""}), ("a",)])
def test_a_vlek_needs_a_provider(names: Any) -> None:
    with pytest.raises(InvalidPolicyError):
        Vlek(csp_ids=names, zero_chip_id=False)


def test_unpinned_is_one_value() -> None:
    assert STANDARD.chip_ids is UNPINNED
