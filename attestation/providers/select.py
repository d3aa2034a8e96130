"""Picks the evidence provider of this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from attestation.collateral import KdsCollateral
from attestation.errors import EvidenceUnavailableError
from attestation.evidence import EvidenceProvider
from attestation.providers.base import CollateralSource, HardwareEvidence
from attestation.providers.configfs_tsm import REPORT_ROOT, ConfigfsTsm
from attestation.providers.sev_guest import DEVICE, SevGuest
from attestation.simulated import SimulatedPsp


class EvidenceKind(StrEnum):
    """Names of providers. ``AUTO`` stands for the real one that this machine has."""

    AUTO = "auto"
    CONFIGFS = "configfs"
    SEV_GUEST = "sev-guest"
    SIMULATED = "simulated"


def resolve_kind(kind: EvidenceKind, *, root: Path = REPORT_ROOT, device: Path = DEVICE) -> EvidenceKind:
    """``kind``, with ``AUTO`` replaced by what is there. Never ``SIMULATED`` unless asked for.

    Raises:
        EvidenceUnavailableError: ``AUTO`` on a machine that is no SEV-SNP guest.
    """
    if kind is not EvidenceKind.AUTO:
        return kind
    if root.is_dir():
        return EvidenceKind.CONFIGFS
    if device.exists():
        return EvidenceKind.SEV_GUEST
    raise EvidenceUnavailableError(
        f"This machine is no SEV-SNP guest: it has neither {root} nor {device}.",
        remedy=(
            "Run in a confidential VM with the module sev_guest. For development only, simulated evidence "
            "can be asked for by name; it proves nothing."
        ),
    )


def open_provider(
    kind: EvidenceKind,
    *,
    collateral: CollateralSource | None = None,
    root: Path = REPORT_ROOT,
    device: Path = DEVICE,
) -> EvidenceProvider:
    """The provider called ``kind``. ``collateral`` defaults to AMD's key distribution service.

    Raises:
        EvidenceUnavailableError: this machine does not have it.
    """
    kind = resolve_kind(kind, root=root, device=device)
    if kind is EvidenceKind.SIMULATED:
        return SimulatedPsp()
    source = ConfigfsTsm(root) if kind is EvidenceKind.CONFIGFS else SevGuest(device)
    return HardwareEvidence(source, collateral or KdsCollateral())
