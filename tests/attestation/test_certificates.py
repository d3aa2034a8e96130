"""Certificates: AMD's roots and profile, zero serial numbers, PEM, and edits that must not pass."""

from __future__ import annotations

import base64
import hashlib
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from attestation.certificates import (
    AMD_ROOTS,
    PSS,
    check_issued_by,
    load_certificate,
    vek_info,
    vek_public_key,
)
from attestation.errors import MalformedEvidenceError, NotGenuineError
from attestation.evidence import Evidence
from attestation.pem import CERTIFICATE, CRL, MAX_BLOCKS, MAX_PEM_SIZE, read_der
from attestation.report import Product, Tcb
from attestation.simulated import SimulatedPsp
from attestation.verify import verify_evidence

DATA = Path(__file__).parent / "data"
VEKS = [
    ("genoa_cdai_vcek.der", Product.GENOA, Tcb(None, 10, 0, 27, 27), 64, None),
    ("genoa_ms_vcek.pem", Product.GENOA, Tcb(None, 10, 0, 23, 84), 64, None),
    ("milan_gsg_vcek.der", Product.MILAN, Tcb(None, 2, 0, 5, 68), 64, None),
    ("milan_ms_vcek.pem", Product.MILAN, Tcb(None, 4, 0, 24, 219), 64, None),
    ("turin_ms_vcek.pem", Product.TURIN, Tcb(1, 1, 1, 4, 81), 8, None),
    ("turin_virtee_vcek.der", Product.TURIN, None, 8, None),
    ("milan_trustee_vlek.der", Product.MILAN, Tcb(None, 4, 0, 24, 217), None, "csp"),
    ("milan_openanolis_vlek.der", Product.MILAN, Tcb(None, 3, 0, 21, 209), None, "csp"),
]
CHAINS = [
    "milan_trustee_ask_ark_asvk.pem",
    "genoa_trustee_ask_ark_asvk.pem",
    "turin_trustee_ask_ark_asvk.pem",
]


def ders(name: str) -> list[bytes]:
    return read_der((DATA / name).read_bytes(), CERTIFICATE, name)


def test_the_pins_are_amds_roots() -> None:
    roots = {
        hashlib.sha256(ders(f"{product.value.lower()}_ms_ark.pem")[0]).hexdigest(): product
        for product in Product
    }
    assert dict(AMD_ROOTS.pins) == roots
    assert not AMD_ROOTS.unsafe_allow_simulated
    with pytest.raises(TypeError):
        AMD_ROOTS.pins["00"] = Product.MILAN  # type: ignore[index]


@pytest.mark.parametrize("name", CHAINS)
def test_both_issuing_certificates_chain_to_the_root(name: str) -> None:
    ask, ark, asvk = (load_certificate(der, "x") for der in ders(name))
    assert ark.sha256 in AMD_ROOTS.pins
    check_issued_by(ark, ark)
    check_issued_by(ask, ark)
    check_issued_by(asvk, ark)
    with pytest.raises(NotGenuineError, match="names another issuer"):
        check_issued_by(ask, asvk)


def test_the_unsigned_algorithm_must_be_the_signed_one() -> None:
    ask, ark = ders("genoa_ms_ask.pem")[0], load_certificate(ders("genoa_ms_ark.pem")[0], "ARK")
    salt = ask.rindex(b"\x02\x01\x30", 0, len(ask) - 517) + 2  # the salt length outside the signed part
    altered = load_certificate(ask[:salt] + b"\x20" + ask[salt + 1 :], "ASK")
    with pytest.raises(NotGenuineError, match="two different signature algorithms"):
        check_issued_by(altered, ark)


@pytest.mark.parametrize(("name", "product", "tcb", "hardware_id", "csp"), VEKS)
def test_extensions_of_real_endorsement_certificates(
    name: str, product: Product, tcb: Tcb | None, hardware_id: int | None, csp: str | None
) -> None:
    vek = load_certificate(ders(name)[0], "VEK")
    info = vek_info(vek)
    assert info.product is product
    assert tcb is None or info.tcb == tcb
    assert (None if info.hardware_id is None else len(info.hardware_id)) == hardware_id
    assert (info.csp_id is None) is (csp is None)
    assert vek_public_key(vek).curve.name == "secp384r1"


@pytest.mark.parametrize("name", [vek[0] for vek in VEKS])
def test_zero_serials_survive_when_the_parser_refuses_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cryptography warns about them today (RFC 5280 forbids them) and means to refuse them."""
    der = ders(name)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x509.load_der_x509_certificate(der)
    assert caught, "the certificate is no example of a zero serial"
    parse = x509.load_der_x509_certificate

    def strict(data: bytes) -> x509.Certificate:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return parse(data)

    monkeypatch.setattr("attestation.certificates.x509.load_der_x509_certificate", strict)
    certificate = load_certificate(der, "VEK")
    assert certificate.der == der
    assert certificate.signed_bytes in der
    assert vek_info(certificate)


def test_evidence_verifies_when_the_parser_refuses_zero_serials(vector: Callable[[str], Evidence]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify_evidence(vector("genoa"), roots=AMD_ROOTS, at=datetime(2026, 10, 1, tzinfo=UTC))


class Issuer:
    """Issues certificates with the session's simulated ASK."""

    def __init__(self, cache_dir: Path, evidence: Evidence) -> None:
        key = load_pem_private_key((cache_dir / "authority.pem").read_bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        self.key = key
        self.template = x509.load_der_x509_certificate(evidence.vcek)

    def issue(self, *added: tuple[x509.ExtensionType, bool], skip: str = "") -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.template.subject)
            .issuer_name(self.template.issuer)
            .public_key(self.template.public_key())
            .serial_number(7)
            .not_valid_before(datetime.now(UTC) - timedelta(days=1))
            .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        )
        for extension in self.template.extensions:
            if extension.oid.dotted_string != skip:
                builder = builder.add_extension(extension.value, critical=False)
        for value, critical in added:
            builder = builder.add_extension(value, critical=critical)
        return builder.sign(self.key, SHA384(), rsa_padding=PSS).public_bytes(Encoding.DER)


@pytest.fixture
def issuer(psp: SimulatedPsp, cache_dir: Path) -> Issuer:
    return Issuer(cache_dir, psp.evidence(bytes(64)))


@pytest.mark.parametrize(("critical", "refused"), [(True, True), (False, False)])
def test_unknown_critical_extensions_are_refused(
    issuer: Issuer, psp: SimulatedPsp, critical: bool, refused: bool
) -> None:
    unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")
    vek = load_certificate(issuer.issue((unknown, critical)), "VEK")
    ask = load_certificate(psp.evidence(bytes(64)).ask, "ASK")
    if not refused:
        check_issued_by(vek, ask)
        return
    with pytest.raises(NotGenuineError, match=r"critical extension, 1\.2\.3\.4"):
        check_issued_by(vek, ask)


def test_reserved_patch_levels_must_be_zero(issuer: Issuer) -> None:
    oid = "1.3.6.1.4.1.3704.1.3.5"
    level = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), b"\x02\x01\x01")
    with pytest.raises(MalformedEvidenceError, match="reserved part 5"):
        vek_info(load_certificate(issuer.issue((level, False), skip=oid), "VEK"))
    assert vek_info(load_certificate(issuer.issue(skip=oid), "VEK"))


def pem(der: bytes, label: str = CERTIFICATE) -> bytes:
    body = base64.encodebytes(der)
    return b"-----BEGIN " + label.encode() + b"-----\n" + body + b"-----END " + label.encode() + b"-----\n"


def test_pem_and_der_are_the_same() -> None:
    der = ders("genoa_ms_vcek.pem")[0]
    assert read_der(der, CERTIFICATE, "x") == [der]
    assert read_der(pem(der), CERTIFICATE, "x") == [der]
    assert read_der(b"Bag Attributes\n" + pem(der) + b"\ntext\n" + pem(der), CERTIFICATE, "x") == [der, der]
    assert read_der(pem(der).replace(b"\n", b"\r\n"), CERTIFICATE, "x") == [der]
    assert read_der(pem(der, CRL), CRL, "x") == [der]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"-----BEGIN CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nAA=A\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END X509 CRL-----\n",
        pem(b"\x30\x00", CRL),
        pem(b"\x30\x00", "PRIVATE KEY") + pem(b"\x30\x00"),
        pem(b"\x30\x00") + b"-----BEGIN CERTIFICATE-----\n",
        pem(b"\x30\x00") * (MAX_BLOCKS + 1),
        b"\x30" * (MAX_PEM_SIZE + 1),
    ],
)
def test_pem_that_is_none(data: bytes) -> None:
    with pytest.raises(MalformedEvidenceError):
        read_der(data, CERTIFICATE, "test")


def test_pem_cannot_be_made_slow() -> None:
    for data in (b"-----BEGIN " * 20_000, (b"-----BEGIN CERTIFICATE-----\n" + b"A" * 40) * 3000):
        with pytest.raises(MalformedEvidenceError):
            read_der(data, CERTIFICATE, "test")


@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda b: pem(b)[:-3] + b))
def test_arbitrary_pem_raises_nothing_unexpected(data: bytes) -> None:
    try:
        blocks = read_der(data, CERTIFICATE, "test")
    except MalformedEvidenceError:
        return
    assert all(isinstance(block, bytes) for block in blocks)


@pytest.mark.parametrize("changes", [{"name": "VEK"}, {"name": "server"}])
def test_messages_name_the_certificate(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedEvidenceError, match=f"The {changes['name']} certificate"):
        load_certificate(b"\x30\x00", **changes)
