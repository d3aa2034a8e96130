"""Rules over a genuine report, which compose, and the rules that hold for every policy.

A rule returns all mismatches it finds; an empty list means that it is content. Bits and fields are
those of AMD publication 56860, tables ATTESTATION_REPORT, GUEST_POLICY and PLATFORM_INFO.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

from attestation.errors import Fault, InvalidPolicyError, Mismatch
from attestation.pins import UNPINNED, PinnedOr
from attestation.report import POLICY_KNOWN_BITS, VERSIONS, PlatformBit, PolicyBit, SigningKey
from attestation.tcb_floors import TcbFloors
from attestation.verify import GenuineReport

CHIP_ID_SIZE = 64


@runtime_checkable
class Rule(Protocol):
    """Something a genuine report can be held against."""

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """Everything that is not as the rule wants it."""
        ...


def _check_rules(rules: tuple[Rule, ...]) -> None:
    if not rules or not all(isinstance(rule, Rule) for rule in rules):
        raise InvalidPolicyError("A composed rule needs at least one rule, and rules only.")


class AllOf:
    """Content if every rule is; reports the mismatches of all."""

    def __init__(self, *rules: Rule) -> None:
        _check_rules(rules)
        self.rules = rules

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """The mismatches of every rule, in order."""
        return [mismatch for rule in self.rules for mismatch in rule.mismatches(genuine)]


class AnyOf:
    """Content if one rule is; otherwise reports what each alternative misses, numbered."""

    def __init__(self, *rules: Rule) -> None:
        _check_rules(rules)
        self.rules = rules

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """Nothing if a rule is content, else the mismatches of all alternatives."""
        found: list[Mismatch] = []
        for number, rule in enumerate(self.rules):
            missed = rule.mismatches(genuine)
            if not missed:
                return []
            found += [replace(m, field=f"alternative {number + 1}: {m.field}") for m in missed]
        return found


class CoreRules:
    """What no policy can relax.

    DEBUG, MIGRATE_MA and CXL_ALLOW off, no reserved policy bits, VMPL 0, the chip's key not masked,
    the memory alias check done, and the current firmware committed (so that it cannot be rolled back).
    """

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """See the class."""
        report = genuine.report
        reserved_ok = report.policy_bit(PolicyBit.RESERVED_ONE) and not report.policy >> POLICY_KNOWN_BITS
        checks = (
            (
                not report.debug,
                Mismatch(
                    "policy.debug",
                    "off",
                    "on",
                    "The host can read this guest's memory. It must be launched without DEBUG.",
                ),
            ),
            (
                not report.migration_agent,
                Mismatch(
                    "policy.migrate_ma",
                    "off",
                    "on",
                    "A migration agent could move its secrets. It must be launched without MIGRATE_MA.",
                ),
            ),
            (
                not report.policy_bit(PolicyBit.CXL_ALLOW),
                Mismatch(
                    "policy.cxl_allow",
                    "off",
                    "on",
                    "The guest's memory may be on CXL devices. It must be launched without CXL_ALLOW.",
                ),
            ),
            (
                reserved_ok,
                Mismatch(
                    "policy.reserved",
                    "bit 17 set, bits 63:26 clear",
                    f"{report.policy:#x}",
                    "This client does not know what the policy bits mean; update it.",
                    Fault.CLIENT,
                ),
            ),
            (
                report.vmpl == 0,
                Mismatch(
                    "vmpl",
                    "0",
                    str(report.vmpl),
                    "The report was made at a less privileged level, or by the host itself.",
                ),
            ),
            (
                not report.chip_key_masked,
                Mismatch(
                    "mask_chip_key", "off", "on", "The platform must sign with its own key.", Fault.HOST
                ),
            ),
            (
                report.platform_bit(PlatformBit.ALIAS_CHECK_COMPLETE),
                Mismatch(
                    "platform_info.alias_check_complete",
                    "on",
                    "off",
                    "Memory aliases (AMD-SB-3015, BadRAM) were not ruled out. Update the host's firmware.",
                    Fault.HOST,
                ),
            ),
        )
        return [mismatch for ok, mismatch in checks if not ok] + _uncommitted(genuine)


def _uncommitted(genuine: GenuineReport) -> list[Mismatch]:
    remedy = "The host can go back to the committed firmware. It must commit what it runs (SNP_COMMIT)."
    report = genuine.report
    pairs = (
        ("committed_tcb", str(genuine.current_tcb.as_dict()), str(genuine.committed_tcb.as_dict())),
        ("committed_firmware", _dotted(report.current_firmware), _dotted(report.committed_firmware)),
    )
    return [
        Mismatch(field, f"the current {current}", committed, remedy, Fault.HOST)
        for field, current, committed in pairs
        if current != committed
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vlek:
    """Opting in to keys that AMD makes for a cloud provider instead of a chip.

    ``csp_ids``: accepted providers, as the certificate names them. ``zero_chip_id``: whether the
    provider may hide which chip it is; with a VLEK nothing else vouches for the chip anyway.
    """

    csp_ids: frozenset[str]
    zero_chip_id: bool

    def __post_init__(self) -> None:
        if not isinstance(self.csp_ids, frozenset) or not self.csp_ids or not all(self.csp_ids):
            raise InvalidPolicyError("A VLEK is accepted for named cloud providers only.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformRules:
    """What the machine must be. Every expectation is required.

    ``versions``: accepted report versions. ``minimum_firmware``: major, minor, build of the SNP
    firmware. ``minimum_guest_abi``: major, minor that the guest's own POLICY must insist on.
    ``floors``: patch levels. ``vlek``: None accepts a VCEK only. ``chip_ids``: accepted CHIP_IDs of
    64 bytes (a Turin's 8 bytes are padded with zeros), or UNPINNED. ``revocation_required``: a current
    revocation list must come with the evidence of real hardware.

    Raises:
        InvalidPolicyError: an expectation is empty or malformed.
    """

    versions: frozenset[int]
    minimum_firmware: tuple[int, int, int]
    minimum_guest_abi: tuple[int, int]
    floors: TcbFloors
    vlek: Vlek | None
    chip_ids: PinnedOr[frozenset[bytes]]
    revocation_required: bool

    def __post_init__(self) -> None:
        if (
            not isinstance(self.versions, frozenset)
            or not self.versions
            or not self.versions <= set(VERSIONS)
        ):
            raise InvalidPolicyError("versions must be a frozenset of known report versions, at least one.")
        if self.chip_ids is not UNPINNED and (
            not isinstance(self.chip_ids, frozenset)
            or not self.chip_ids
            or any(not isinstance(c, bytes) or len(c) != CHIP_ID_SIZE or not any(c) for c in self.chip_ids)
        ):
            raise InvalidPolicyError(f"chip_ids must be ids of {CHIP_ID_SIZE} bytes, not zero, or UNPINNED.")

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """See the class."""
        report = genuine.report
        found = []
        if report.version not in self.versions:
            remedy = "The host's firmware or the guest's kernel is too old, or this client is."
            found.append(
                Mismatch("version", listing(map(str, self.versions)), str(report.version), remedy, Fault.HOST)
            )
        for field in ("current_firmware", "committed_firmware"):
            firmware = getattr(report, field)
            if firmware < self.minimum_firmware:
                found.append(
                    Mismatch(
                        field,
                        f"at least {_dotted(self.minimum_firmware)}",
                        _dotted(firmware),
                        "Update the host's SNP firmware.",
                        Fault.HOST,
                    )
                )
        if report.policy_abi < self.minimum_guest_abi:
            remedy = "Launch the guest with a POLICY that refuses older firmware."
            found.append(
                Mismatch(
                    "policy.abi",
                    f"at least {_dotted(self.minimum_guest_abi)}",
                    _dotted(report.policy_abi),
                    remedy,
                )
            )
        return [*found, *self._key(genuine), *self.floors.mismatches(genuine), *self._revocation(genuine)]

    def _key(self, genuine: GenuineReport) -> list[Mismatch]:
        report = genuine.report
        found = []
        vlek = self.vlek if report.signing_key == SigningKey.VLEK else None
        if report.signing_key != SigningKey.VCEK and vlek is None:
            names = {key: key.name for key in SigningKey}
            got = next((name for key, name in names.items() if key == report.signing_key), "reserved")
            remedy = (
                "The platform must sign with its chip's own key, or the policy accept a VLEK by provider."
            )
            found.append(Mismatch("signing_key", "VCEK", got, remedy, Fault.HOST))
        if vlek is not None and genuine.csp_id not in vlek.csp_ids:
            remedy = "The key belongs to another cloud provider."
            found.append(
                Mismatch("csp_id", f"one of {listing(vlek.csp_ids)}", str(genuine.csp_id), remedy, Fault.HOST)
            )
        if not any(report.chip_id) and not (vlek is not None and vlek.zero_chip_id):
            remedy = "The platform hides which chip it is (MASK_CHIP_ID)."
            found.append(Mismatch("chip_id", "not zero", "zero", remedy, Fault.HOST))
        elif self.chip_ids is not UNPINNED and report.chip_id not in self.chip_ids:
            wanted = f"one of {listing(chip.hex() for chip in self.chip_ids)}"
            remedy = "The policy does not accept this machine."
            found.append(Mismatch("chip_id", wanted, report.chip_id.hex(), remedy, Fault.HOST))
        return found

    def _revocation(self, genuine: GenuineReport) -> list[Mismatch]:
        if genuine.revocation is not None or genuine.simulated or not self.revocation_required:
            return []
        remedy = "The service must send the current revocation list of its product with the evidence."
        return [Mismatch("revocation", "a current revocation list", "none", remedy)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRules:
    """What the launch was given besides the measured memory: each value must be exactly this.

    Byte strings have the sizes of the report's fields; zeros mean that nothing may be given.

    Raises:
        InvalidPolicyError: a value of another size or type.
    """

    host_data: bytes
    family_id: bytes
    image_id: bytes
    guest_svn: int
    id_key_digest: bytes
    author_key_digest: bytes

    def __post_init__(self) -> None:
        for name, size in LAUNCH_SIZES.items():
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != size:
                raise InvalidPolicyError(f"{name} must have {size} bytes; zeros mean that none may be given.")
        if type(self.guest_svn) is not int or not 0 <= self.guest_svn < 2**32:
            raise InvalidPolicyError("guest_svn must be an integer of 32 bits.")

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """See the class."""
        report = genuine.report
        remedy = "The guest was launched with other options than the policy knows."
        found = []
        for item in fields(self):
            expected, got = getattr(self, item.name), getattr(report, item.name)
            if expected != got:
                found.append(Mismatch(item.name, _value(expected), _value(got), remedy))
        author = any(self.author_key_digest)
        if report.author_key_enabled != author:
            found.append(Mismatch("author_key_enabled", _on(author), _on(report.author_key_enabled), remedy))
        return found


LAUNCH_SIZES = {
    "host_data": 32,
    "family_id": 16,
    "image_id": 16,
    "id_key_digest": 48,
    "author_key_digest": 48,
}


class StrictRules:
    """The ``strict`` profile: less for side channels to work with.

    SMT off, ciphertext hiding on, page swapping off, RAPL off; both as the guest's POLICY demands it
    and, where PLATFORM_INFO has a bit, as the platform reports it.
    """

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """See the class."""
        report = genuine.report
        policy = (
            (PolicyBit.SMT, False),
            (PolicyBit.CIPHERTEXT_HIDING_DRAM, True),
            (PolicyBit.PAGE_SWAP_DISABLE, True),
            (PolicyBit.RAPL_DIS, True),
        )
        platform = (
            (PlatformBit.SMT_EN, False),
            (PlatformBit.CIPHERTEXT_HIDING_DRAM_EN, True),
            (PlatformBit.RAPL_DIS, True),
        )
        found = []
        for bit, wanted in policy:
            if report.policy_bit(bit) != wanted:
                field = f"policy.{str(bit.name).lower()}"
                remedy = "Launch the guest with a POLICY that demands this."
                found.append(Mismatch(field, _on(wanted), _on(not wanted), remedy))
        for platform_bit, wanted in platform:
            if report.platform_bit(platform_bit) != wanted:
                field = f"platform_info.{str(platform_bit.name).lower()}"
                remedy = "Configure the host accordingly (firmware setup, SNP_CONFIG)."
                found.append(Mismatch(field, _on(wanted), _on(not wanted), remedy, Fault.HOST))
        return found


def listing(values: Iterable[str]) -> str:
    """The values in order, with commas; a long list is cut."""
    names = sorted(values)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _on(value: bool) -> str:
    return "on" if value else "off"


def _value(value: bytes | int) -> str:
    if isinstance(value, int):
        return str(value)
    return value.hex() if any(value) else "zero"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
