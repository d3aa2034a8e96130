"""Which provider a machine gets, and that none is ever simulated by surprise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attestation.errors import EvidenceUnavailableError
from attestation.providers.base import HardwareEvidence
from attestation.providers.configfs_tsm import ConfigfsTsm
from attestation.providers.select import EvidenceKind, open_provider, resolve_kind
from attestation.providers.sev_guest import SevGuest
from attestation.simulated import SimulatedPsp


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Any]:
    return {"root": tmp_path / "report", "device": tmp_path / "sev-guest"}


def test_auto_prefers_configfs(places: dict[str, Any]) -> None:
    places["device"].touch()
    assert resolve_kind(EvidenceKind.AUTO, **places) is EvidenceKind.SEV_GUEST
    places["root"].mkdir()
    assert resolve_kind(EvidenceKind.AUTO, **places) is EvidenceKind.CONFIGFS


def test_auto_is_never_simulated(places: dict[str, Any]) -> None:
    with pytest.raises(EvidenceUnavailableError, match="no SEV-SNP guest") as caught:
        open_provider(EvidenceKind.AUTO, **places)
    assert "proves nothing" in caught.value.remedy


@pytest.mark.parametrize("kind", [EvidenceKind.CONFIGFS, EvidenceKind.SEV_GUEST])
def test_a_provider_asked_for_by_name_is_not_replaced(kind: EvidenceKind, places: dict[str, Any]) -> None:
    class NoCollateral:
        def collateral(self, *_: object) -> Any:
            raise AssertionError

    provider = open_provider(kind, collateral=NoCollateral(), **places)
    assert isinstance(provider, HardwareEvidence)
    source = provider._source
    assert isinstance(source, ConfigfsTsm if kind is EvidenceKind.CONFIGFS else SevGuest)
    with pytest.raises(EvidenceUnavailableError, match="No such file"):
        provider.evidence(bytes(64))


def test_simulated_is_what_was_asked_for(
    psp: SimulatedPsp, cache_dir: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attestation.simulated.default_cache_dir", lambda: cache_dir)
    places["root"].mkdir()
    assert isinstance(open_provider(EvidenceKind.SIMULATED, **places), SimulatedPsp)
