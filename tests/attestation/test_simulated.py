"""The simulated PSP's cache and limits."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from cryptography import x509

from attestation.certificates import SIMULATED_LABEL, load_certificate
from attestation.errors import EvidenceUnavailableError
from attestation.simulated import SimulatedPsp, default_cache_dir


def test_the_authority_is_made_once(psp: SimulatedPsp, cache_dir: Path) -> None:
    again = SimulatedPsp(cache_dir=cache_dir)
    first, second = psp.evidence(bytes(64)), again.evidence(bytes(64))
    assert (first.ark, first.ask) == (second.ark, second.ask)
    assert first.vcek != second.vcek


def test_the_cache_is_private(psp: SimulatedPsp, cache_dir: Path) -> None:
    nested = cache_dir / "fresh"
    (authority,) = [path for path in cache_dir.iterdir() if path.is_file()]
    assert authority.stat().st_mode & 0o777 == 0o600
    nested.mkdir(mode=0o700)
    (nested / authority.name).write_bytes(authority.read_bytes())
    SimulatedPsp(cache_dir=nested)
    nested.chmod(0o777)
    with pytest.raises(EvidenceUnavailableError, match="writable by others"):
        SimulatedPsp(cache_dir=nested)


def test_a_new_cache_directory_is_0700(
    psp: SimulatedPsp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("attestation.simulated._create_authority", lambda: psp._authority)
    SimulatedPsp()
    assert default_cache_dir() == tmp_path / "gelo" / "simulated-psp"
    assert default_cache_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_damaged_cache_is_replaced(
    psp: SimulatedPsp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("attestation.simulated._create_authority", lambda: psp._authority)
    (tmp_path / "authority.pem").write_bytes(damage)
    SimulatedPsp(cache_dir=tmp_path)
    assert b"PRIVATE KEY" in (tmp_path / "authority.pem").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["authority.pem"]


def test_an_unusable_cache_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EvidenceUnavailableError, match="cache directory"):
        SimulatedPsp(cache_dir=tmp_path / "file")


def test_every_certificate_is_labelled(psp: SimulatedPsp) -> None:
    evidence = psp.evidence(bytes(64))
    for der in (evidence.vcek, evidence.ask, evidence.ark):
        assert load_certificate(der, "x").simulated
        assert SIMULATED_LABEL in x509.load_der_x509_certificate(der).subject.rfc4514_string()


def test_it_says_what_it_is(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        SimulatedPsp(cache_dir=cache_dir)
    assert "SIMULATED" in caplog.text


@pytest.mark.parametrize("length", [0, 63, 65])
def test_report_data_has_64_bytes(psp: SimulatedPsp, length: int) -> None:
    with pytest.raises(EvidenceUnavailableError):
        psp.evidence(bytes(length))
