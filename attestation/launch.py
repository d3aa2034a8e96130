"""Which launch digests a guest built from given files can have, and a manifest that says so.

Sources: AMD publication 56860, chapter on launch (SNP_LAUNCH_UPDATE, table PAGE_INFO); QEMU's table of
hashes of kernel, initrd and command line, which an ``AmdSev`` build of OVMF checks before it boots them.
The arithmetic is sev-snp-measure's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from sevsnpmeasure.gctx import GCTX
from sevsnpmeasure.guest import snp_update_metadata_pages
from sevsnpmeasure.ovmf import OVMF, SectionType
from sevsnpmeasure.sev_hashes import SevHashes
from sevsnpmeasure.sev_mode import SevMode
from sevsnpmeasure.vcpu_types import CPU_SIGS
from sevsnpmeasure.vmm_types import VMMType
from sevsnpmeasure.vmsa import VMSA

from attestation.errors import InvalidPolicyError, LaunchMeasurementError
from attestation.policy import UnsafeAllowSimulated
from attestation.policy_file import policy_from, template
from attestation.statement import MODEL_IDENTITY_SIZE, parse_digest
from attestation.strict_data import parse_toml

FORMAT: Final = "gelo-launch-manifest/1"

VCPU_TYPES: Final = tuple(sorted(CPU_SIGS))
"""QEMU's names of processor models."""

DEFAULT_GUEST_FEATURES: Final = 0x1
"""SEV_FEATURES of every VMSA: SNP active, and nothing else."""

MAX_VCPUS: Final = 512
MAX_COMMAND_LINE: Final = 2047
"""Linux's COMMAND_LINE_SIZE on x86, without the final zero."""

_PAGE = 4096
_LIMITS: Final = {"firmware": 16 << 20, "kernel": 512 << 20, "initrd": 8 << 30}
_SECTION_LIMIT = 64 << 20  # of memory that firmware may have measured as zeros
_LIBRARY_ERRORS = (RuntimeError, ValueError, LookupError, AssertionError, struct.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestImage:
    """What boots: OVMF, and the kernel, initrd and command line whose hashes QEMU hands to it."""

    firmware: Path
    kernel: Path
    initrd: Path
    command_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLaunch:
    """The launch digest (48 bytes) for one number and type of vCPUs."""

    vcpus: int
    vcpu_type: str
    guest_features: int
    measurement: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An image's digests. ``inputs`` has the SHA-256 of each part, in hex, and the command line."""

    inputs: Mapping[str, str]
    launches: tuple[ExpectedLaunch, ...]

    @property
    def measurements(self) -> tuple[bytes, ...]:
        """Every possible digest once, in order."""
        return tuple(sorted({launch.measurement for launch in self.launches}))


def measure(
    image: GuestImage,
    *,
    vcpus: Iterable[int],
    vcpu_types: Iterable[str],
    guest_features: int = DEFAULT_GUEST_FEATURES,
) -> Measured:
    """The launch digest of ``image`` for each of ``vcpus`` with each of ``vcpu_types``, under QEMU.

    Raises:
        LaunchMeasurementError: a file cannot be read or is no such file, the firmware does not check
            the kernel it boots, or a number or type is out of range.
    """
    counts, types = sorted(set(vcpus)), sorted(set(vcpu_types))
    _check_configuration(counts, types, guest_features, image.command_line)
    firmware = _firmware(image.firmware)
    hashes = _hashes(image)
    try:
        base = GCTX()
        base.update_normal_pages(firmware.gpa(), firmware.data())
        snp_update_metadata_pages(base, firmware, hashes, VMMType.QEMU)
        reset_vector = firmware.sev_es_reset_eip()
    except _LIBRARY_ERRORS as error:
        raise _bad_firmware(image.firmware, str(error)) from None
    launches = [
        ExpectedLaunch(vcpus=count, vcpu_type=name, guest_features=guest_features, measurement=digest)
        for name in types
        for count, digest in _with_vcpus(base.ld(), reset_vector, name, counts, guest_features)
    ]
    return Measured(
        inputs={
            "firmware_sha256": hashlib.sha256(firmware.data()).hexdigest(),
            "kernel_sha256": hashes.kernel_hash.hex(),
            "initrd_sha256": hashes.initrd_hash.hex(),
            "command_line": image.command_line,
        },
        launches=tuple(launches),
    )


def _with_vcpus(
    digest: bytes, reset_vector: int, vcpu_type: str, counts: Sequence[int], features: int
) -> Iterable[tuple[int, bytes]]:
    """The digest after as many vCPUs (VMSA pages) as each of ``counts``, ascending."""
    vmsa = VMSA(SevMode.SEV_SNP, reset_vector, CPU_SIGS[vcpu_type], features, VMMType.QEMU)
    context = GCTX(seed=digest)
    for number, page in enumerate(vmsa.pages(counts[-1]), start=1):
        context.update_vmsa_page(page)
        if number in counts:
            yield number, context.ld()


def _check_configuration(
    counts: Sequence[int], types: Sequence[str], features: int, command_line: str
) -> None:
    if not counts or not types:
        raise LaunchMeasurementError("At least one number and one type of vCPUs are needed.")
    if counts[0] < 1 or counts[-1] > MAX_VCPUS:
        raise LaunchMeasurementError(f"The number of vCPUs must be 1 to {MAX_VCPUS}.")
    if unknown := sorted(set(types) - set(VCPU_TYPES)):
        raise LaunchMeasurementError(
            f"Unknown vCPU types: {', '.join(unknown)}.", remedy=f"Known are: {', '.join(VCPU_TYPES)}."
        )
    if not features & 1 or not 0 < features < 2**64:
        raise LaunchMeasurementError("guest_features must be a 64-bit word with bit 0 (SNP active) set.")
    if not command_line.isascii() or (command_line and not command_line.isprintable()):
        raise LaunchMeasurementError("The kernel's command line must be printable ASCII.")
    if len(command_line) > MAX_COMMAND_LINE:
        raise LaunchMeasurementError(
            f"The kernel's command line may have {MAX_COMMAND_LINE} characters; Linux would cut it off."
        )


def _firmware(path: Path) -> OVMF:
    """The firmware, if it measures and checks what it boots."""
    size = _check_size(path, "firmware")
    if size % _PAGE:
        raise _bad_firmware(path, "its size is not whole pages")
    try:
        firmware = OVMF(str(path))
        sections = {item.section_type(): item for item in firmware.metadata_items()}
        memory = sum(item.size for item in firmware.metadata_items())
    except _LIBRARY_ERRORS as error:
        raise _bad_firmware(path, str(error)) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if memory > _SECTION_LIMIT:
        raise _bad_firmware(path, "its metadata describes too much memory")
    hashes = sections.get(SectionType.SNP_KERNEL_HASHES)
    # Firmware that takes the table from elsewhere than from the measured page would boot any kernel.
    if (
        hashes is None
        or not firmware.is_sev_hashes_table_supported()
        or hashes.gpa != firmware.sev_hashes_table_gpa() & ~(_PAGE - 1)
        or hashes.size != _PAGE
    ):
        raise LaunchMeasurementError(
            f"{path} does not check the kernel that it boots.",
            remedy="Use an OVMF built from OvmfPkg/AmdSev/AmdSevX64.dsc, with SNP kernel hashes.",
        )
    return firmware


def _hashes(image: GuestImage) -> SevHashes:
    for name in ("kernel", "initrd"):
        _check_size(getattr(image, name), name)
    try:
        return SevHashes(str(image.kernel), str(image.initrd), image.command_line)
    except OSError as error:
        raise _unreadable(image.kernel, error) from None


def _check_size(path: Path, what: str) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    if not path.is_file() or not 0 < size <= _LIMITS[what]:
        raise LaunchMeasurementError(
            f"The {what} {path} is not a file of 1 to {_LIMITS[what]} bytes (it has {size})."
        )
    return size


def _bad_firmware(path: Path, why: str) -> LaunchMeasurementError:
    return LaunchMeasurementError(
        f"{path} cannot be measured as SEV-SNP firmware: {why}.",
        remedy="Use an OVMF built from OvmfPkg/AmdSev/AmdSevX64.dsc, with SNP kernel hashes.",
    )


def _unreadable(path: Path, error: OSError) -> LaunchMeasurementError:
    return LaunchMeasurementError(f"{error.filename or path} cannot be read ({error.strerror}).")


def manifest(
    measured: Measured,
    *,
    model_identity: bytes | str,
    service: str,
    versions: Mapping[str, str],
    policy: Mapping[str, object] | None = None,
) -> bytes:
    """A launch manifest: canonical JSON (RFC 8785), so that equal inputs give equal bytes to sign.

    ``policy`` is a policy document (``policy_file``) whose measurements, model identity and service
    name are filled in; by default the one for patched Genoa and Turin machines. The manifest holds the
    complete policy, which a client can extract and use. ``versions`` names the software in the image;
    sev-snp-measure's is added.

    Raises:
        InvalidPolicyError: the policy or the model identity cannot be right, or simulated evidence
            would be accepted.
    """
    identity = parse_digest(model_identity, MODEL_IDENTITY_SIZE, "model_identity")
    digests = [digest.hex() for digest in measured.measurements]
    if policy is None:
        policy = parse_toml(template(measurement=measured.measurements[0]).encode(), "policy")
    complete = {
        **policy,
        "guest": {**_section(policy, "guest"), "measurements": digests},
        "service": {**_section(policy, "service"), "model_identity": identity.hex(), "name": service},
    }
    if isinstance(policy_from(complete), UnsafeAllowSimulated):
        raise InvalidPolicyError("A launch manifest cannot carry a policy that accepts simulated evidence.")
    return canonical_json(
        {
            "format": FORMAT,
            "inputs": dict(measured.inputs),
            "launches": [
                {
                    "guest_features": launch.guest_features,
                    "measurement": launch.measurement.hex(),
                    "vcpu_type": launch.vcpu_type,
                    "vcpus": launch.vcpus,
                    "vmm": "qemu",
                }
                for launch in measured.launches
            ],
            "measurements": digests,
            "model_identity": identity.hex(),
            "policy": complete,
            "versions": dict(versions) | {"sev-snp-measure": version("sev-snp-measure")},
        }
    )


def _section(policy: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = policy.get(name)
    if not isinstance(section, Mapping):
        raise InvalidPolicyError(f"The policy has no section {name}.")
    return section


def canonical_json(value: object) -> bytes:
    """RFC 8785 for values of maps, lists, ASCII text, booleans and integers below 2^53.

    Raises:
        InvalidPolicyError: there is something else in ``value``.
    """
    _check_canonical(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("ascii")


def _check_canonical(value: object) -> None:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and key.isascii() for key in value):
            raise InvalidPolicyError("The keys of a manifest are ASCII texts.")
        for inner in value.values():
            _check_canonical(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_canonical(inner)
    elif not (
        isinstance(value, bool)
        or (isinstance(value, int) and abs(value) < 2**53)
        or (isinstance(value, str) and value.isascii())
    ):
        raise InvalidPolicyError("A manifest may hold ASCII texts, booleans and integers below 2^53 only.")
