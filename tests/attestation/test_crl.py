"""Revocation lists: AMD's own at their dates, and lists made to be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from attestation.certificates import AMD_ROOTS, PSS, Certificate, load_certificate
from attestation.crl import MAX_CRL_SIZE, MAX_REVOKED, check_crl, load_crl
from attestation.errors import AttestationError, MalformedEvidenceError, NotGenuineError
from attestation.evidence import Evidence
from attestation.pem import CERTIFICATE, read_der
from attestation.simulated import SimulatedPsp
from attestation.verify import failed_checks, verify_evidence

DATA = Path(__file__).parent / "data"
GENOA_CRL = (DATA / "genoa_crl_openpcc.der").read_bytes()
MILAN_CRL = (DATA / "milan_crl_openpcc.der").read_bytes()
NOW = datetime.now(UTC).replace(microsecond=0)
SIMULATED = replace(AMD_ROOTS, unsafe_allow_simulated=True)
UNKNOWN_EXTENSION = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), b"\x05\x00")
Make = Callable[..., bytes]


def certificate(name: str) -> Certificate:
    return load_certificate(read_der((DATA / name).read_bytes(), CERTIFICATE, name)[0], "ARK")


def test_amds_lists_parse() -> None:
    genoa, milan = load_crl(GENOA_CRL), load_crl(MILAN_CRL)
    assert (genoa.number, genoa.revoked) == (4, frozenset({0x020001}))
    assert (milan.number, milan.revoked) == (6, frozenset())
    assert (milan.issued.date().isoformat(), milan.expires.date().isoformat()) == ("2025-05-06", "2026-05-12")


def test_amds_lists_verify_and_leave_the_current_ask() -> None:
    ark, ask = certificate("genoa_ms_ark.pem"), certificate("genoa_ms_ask.pem")
    at = datetime(2025, 1, 1, tzinfo=UTC)
    status = check_crl(load_crl(GENOA_CRL), ark, (ark, ask), at)
    assert status.number == 4
    assert status.as_dict()["expires"] == "2025-11-03T01:00:00+00:00"


@pytest.mark.parametrize("at", [datetime(2024, 10, 23, tzinfo=UTC), datetime(2025, 11, 4, tzinfo=UTC)])
def test_a_list_outside_its_dates_is_refused(at: datetime) -> None:
    with pytest.raises(NotGenuineError, match="is valid 2024-10-23"):
        check_crl(load_crl(GENOA_CRL), certificate("genoa_ms_ark.pem"), (), at)


def test_a_list_of_another_product_is_refused() -> None:
    at = datetime(2025, 10, 1, tzinfo=UTC)
    with pytest.raises(NotGenuineError, match="another issuer"):
        check_crl(load_crl(GENOA_CRL), certificate("milan_ms_ark.pem"), (), at)


def test_a_real_report_verifies_with_its_list() -> None:
    evidence = Evidence(
        report=(DATA / "milan_ms_report.bin").read_bytes(),
        vcek=certificate("milan_ms_vcek.pem").der,
        ask=certificate("milan_ms_ask.pem").der,
        ark=certificate("milan_ms_ark.pem").der,
        crl=MILAN_CRL,
    )
    genuine = verify_evidence(evidence, roots=AMD_ROOTS, at=datetime(2026, 3, 1, tzinfo=UTC))
    assert genuine.revocation is not None
    assert genuine.revocation.number == 6
    without = verify_evidence(
        replace(evidence, crl=None), roots=AMD_ROOTS, at=datetime(2026, 3, 1, tzinfo=UTC)
    )
    assert without.revocation is None
    with pytest.raises(NotGenuineError, match="revocation list is valid"):
        verify_evidence(evidence, roots=AMD_ROOTS, at=datetime(2026, 10, 1, tzinfo=UTC))
    with pytest.raises(NotGenuineError, match="another issuer"):
        verify_evidence(
            replace(evidence, crl=GENOA_CRL), roots=AMD_ROOTS, at=datetime(2026, 3, 1, tzinfo=UTC)
        )


@pytest.fixture(scope="module")
def root_key(psp: SimulatedPsp, cache_dir: Path) -> rsa.RSAPrivateKey:
    """The simulated ASK's key, which plays the root here: the simulated ARK's key is gone."""
    key = load_pem_private_key((cache_dir / "authority.pem").read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    return key


def issued(key: rsa.RSAPrivateKey, subject: x509.Name, serial: int, usage: dict[str, bool] | None) -> bytes:
    """A CA certificate for ``key``, issued by the root with the same key."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ROOT_NAME)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(NOW - timedelta(days=30))
        .not_valid_after(NOW + timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    if usage is not None:
        flags = dict.fromkeys(
            (
                "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
                "key_agreement", "encipher_only", "decipher_only",
            ),
            False,
        )  # fmt: skip
        builder = builder.add_extension(x509.KeyUsage(**flags, **usage), critical=True)
    return builder.sign(key, SHA384(), rsa_padding=PSS).public_bytes(Encoding.DER)


ROOT_NAME = x509.Name(
    [
        x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, "SIMULATED - NOT AMD"),
        x509.NameAttribute(x509.NameOID.COUNTRY_NAME, "US"),
        x509.NameAttribute(x509.NameOID.COMMON_NAME, "SIM-ARK"),
    ]
)


@pytest.fixture(scope="module")
def make(root_key: rsa.RSAPrivateKey) -> Make:
    """``make(revoked=..., ...)``: a list of the simulated root."""

    def making(
        *,
        revoked: tuple[int, ...] = (),
        days: tuple[int, int] = (-1, 1),
        issuer: x509.Name = ROOT_NAME,
        key: Any = None,
        pad: Any = PSS,
        digest: Any = None,
        extension: tuple[x509.ExtensionType, bool] | None = None,
        entry_extension: tuple[x509.ExtensionType, bool] | None = None,
    ) -> bytes:
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(issuer)
            .last_update(NOW + timedelta(days=days[0]))
            .next_update(NOW + timedelta(days=days[1]))
        )
        if extension is not None:
            builder = builder.add_extension(*extension)
        for serial in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW)
            if entry_extension is not None:
                entry = entry.add_extension(*entry_extension)
            builder = builder.add_revoked_certificate(entry.build())
        signer = root_key if key is None else key
        extra = {} if isinstance(signer, ec.EllipticCurvePrivateKey) else {"rsa_padding": pad}
        return builder.sign(signer, digest or SHA384(), **extra).public_bytes(Encoding.DER)

    return making


@pytest.fixture(scope="module")
def evidence(psp: SimulatedPsp, root_key: rsa.RSAPrivateKey) -> Evidence:
    """Simulated evidence under a root whose key the tests have."""
    real = psp.evidence(bytes(64))
    ask_name = x509.load_der_x509_certificate(real.ask).subject
    return replace(
        real, ask=issued(root_key, ask_name, 0x20001, None), ark=issued(root_key, ROOT_NAME, 1, None)
    )


def test_a_list_that_revokes_others_is_fine(evidence: Evidence, make: Make) -> None:
    der = make(revoked=(7, 0x20002), extension=(x509.CRLNumber(9), False))
    genuine = verify_evidence(replace(evidence, crl=der), roots=SIMULATED, at=NOW)
    assert genuine.revocation is not None
    assert genuine.revocation.number == 9
    assert verify_evidence(evidence, roots=SIMULATED, at=NOW, crl=der).revocation is not None


def test_a_revoked_ask_is_refused(evidence: Evidence, make: Make) -> None:
    der = make(revoked=(7, 0x20001))
    with pytest.raises(NotGenuineError, match="AMD has revoked the ASK certificate 0x20001"):
        verify_evidence(evidence, roots=SIMULATED, at=NOW, crl=der)
    failures = failed_checks(evidence, roots=SIMULATED, at=NOW, crl=der)
    assert ["revoked" in failure.message for failure in failures] == [True]


def test_a_revoked_ark_is_refused(evidence: Evidence, make: Make) -> None:
    with pytest.raises(NotGenuineError, match="revoked the ARK"):
        verify_evidence(evidence, roots=SIMULATED, at=NOW, crl=make(revoked=(1,)))


def test_the_serial_of_an_endorsement_certificate_means_nothing(evidence: Evidence, make: Make) -> None:
    serial = x509.load_der_x509_certificate(evidence.vcek).serial_number
    listed = make(revoked=(serial + 100,))
    assert verify_evidence(evidence, roots=SIMULATED, at=NOW, crl=listed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"days": (-2, -1)}, "is valid"),
        ({"days": (1, 2)}, "is valid"),
        ({"issuer": x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "SIM-ARK")])}, "another issuer"),
        ({"key": "ec"}, "RSASSA-PSS"),
        ({"key": "rsa"}, "did not sign|two different"),
        ({"pad": padding.PKCS1v15()}, "RSASSA-PSS"),
        ({"pad": padding.PSS(mgf=padding.MGF1(SHA384()), salt_length=32)}, "did not sign"),
        (
            {"pad": padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=48), "digest": SHA256()},
            "did not sign",
        ),
    ],
)
def test_lists_that_the_ark_did_not_issue_so(
    evidence: Evidence, make: Make, changes: dict[str, Any], reason: str
) -> None:
    keys = {
        "ec": lambda: ec.generate_private_key(ec.SECP384R1()),
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
    }
    if "key" in changes:
        changes = {**changes, "key": keys[changes["key"]]()}
    with pytest.raises(NotGenuineError, match=reason):
        verify_evidence(evidence, roots=SIMULATED, at=NOW, crl=make(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"extension": (x509.DeltaCRLIndicator(1), True)},
        {"extension": (UNKNOWN_EXTENSION, True)},
        {"revoked": (5,), "entry_extension": (UNKNOWN_EXTENSION, True)},
    ],
)
def test_lists_that_say_more_than_is_understood(make: Make, changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedEvidenceError, match="critical"):
        load_crl(make(**changes))


@pytest.mark.parametrize(
    "usage", [{"key_cert_sign": True, "crl_sign": False}, {"key_cert_sign": False, "crl_sign": True}]
)
def test_the_roots_key_must_be_for_lists(
    evidence: Evidence, make: Make, root_key: rsa.RSAPrivateKey, usage: dict[str, bool]
) -> None:
    ark = issued(root_key, ROOT_NAME, 1, usage)
    with pytest.raises(NotGenuineError, match="not a certificate authority"):
        verify_evidence(replace(evidence, ark=ark), roots=SIMULATED, at=NOW, crl=make())


def test_large_lists_are_refused(make: Make) -> None:
    with pytest.raises(MalformedEvidenceError, match="65536 bytes"):
        load_crl(bytes(MAX_CRL_SIZE + 1))
    with pytest.raises(MalformedEvidenceError, match=f"{MAX_REVOKED + 1} entries"):
        load_crl(make(revoked=tuple(range(1, MAX_REVOKED + 2))))


@given(data=st.data())
def test_changed_lists_raise_nothing_unexpected(data: st.DataObject) -> None:
    der = bytearray(GENOA_CRL)
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    changed = bytes(der[: data.draw(st.integers(0, len(der)) | st.just(len(der)))])
    if changed != GENOA_CRL:
        with pytest.raises(AttestationError):
            check_crl(
                load_crl(changed), certificate("genoa_ms_ark.pem"), (), datetime(2025, 1, 1, tzinfo=UTC)
            )


@given(st.binary(max_size=300))
def test_arbitrary_lists_raise_nothing_unexpected(data: bytes) -> None:
    with pytest.raises(MalformedEvidenceError):
        load_crl(data)
