"""Genuine or not: real vectors, byte edits of them, and simulated chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from attestation.certificates import AMD_ROOTS, PSS, TrustRoots, load_certificate, vek_info
from attestation.errors import (
    AttestationError,
    MalformedEvidenceError,
    NotGenuineError,
    SimulatedEvidenceRefusedError,
)
from attestation.evidence import Evidence
from attestation.report import Product, Tcb
from attestation.simulated import SimulatedPsp
from attestation.verify import GenuineReport, failed_checks, verify_evidence

AT = datetime(2026, 10, 1, tzinfo=UTC)
SIMULATED = replace(AMD_ROOTS, unsafe_allow_simulated=True)
Vector = Callable[[str], Evidence]


def verify(evidence: Evidence, roots: TrustRoots = AMD_ROOTS, at: datetime = AT) -> GenuineReport:
    return verify_evidence(evidence, roots=roots, at=at)


def edited(evidence: Evidence, offset: int) -> Evidence:
    report = bytearray(evidence.report)
    report[offset] ^= 1
    return replace(evidence, report=bytes(report))


@pytest.mark.parametrize(
    ("name", "product", "tcb", "at"),
    [
        ("genoa", Product.GENOA, Tcb(None, 10, 0, 27, 27), AT),
        ("turin", Product.TURIN, Tcb(1, 1, 1, 4, 81), AT),
        ("milan-debug", Product.MILAN, Tcb(None, 2, 0, 5, 68), AT),
        ("milan-vlek", Product.MILAN, Tcb(None, 4, 0, 24, 217), datetime(2025, 6, 1, tzinfo=UTC)),
    ],
)
def test_real_vectors_verify(vector: Vector, name: str, product: Product, tcb: Tcb, at: datetime) -> None:
    genuine = verify(vector(name), at=at)
    assert (genuine.product, genuine.reported_tcb, genuine.simulated) == (product, tcb, False)
    assert AMD_ROOTS.pins[genuine.root_sha256] is product


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0x008, "signature does not verify"),  # POLICY
        (0x030, "signature does not verify"),  # VMPL
        (0x050, "signature does not verify"),  # REPORT_DATA
        (0x090, "signature does not verify"),  # MEASUREMENT
        (0x2A0, "signature does not verify"),  # R
        (0x2E8, "signature does not verify"),  # S
        (0x034, "algorithm"),
        (0x048 + 0, "signature does not verify"),  # AUTHOR_KEY_EN
        (0x187, "REPORTED_TCB"),
        (0x1A0, "CHIP_ID"),
        (0x188, "CPUID"),
    ],
)
def test_edited_reports_fail_for_the_right_reason(vector: Vector, offset: int, reason: str) -> None:
    with pytest.raises(NotGenuineError, match=reason):
        verify(edited(vector("genoa"), offset))


def test_a_vlek_report_needs_a_vlek(vector: Vector) -> None:
    report = bytearray(vector("genoa").report)
    report[0x48] |= 1 << 2
    with pytest.raises(NotGenuineError, match="signing key"):
        verify(replace(vector("genoa"), report=bytes(report)))


def test_unsigned_reports_are_refused(vector: Vector) -> None:
    report = vector("genoa").report[:0x2A0] + bytes(0x200)
    with pytest.raises(NotGenuineError, match="not signed"):
        verify(replace(vector("genoa"), report=report))


def test_swapped_chains_are_refused(vector: Vector) -> None:
    genoa, turin = vector("genoa"), vector("turin")
    for mixed in (
        replace(genoa, ask=turin.ask),
        replace(genoa, ark=turin.ark),
        replace(genoa, ask=turin.ask, ark=turin.ark),
        replace(genoa, vcek=turin.vcek),
        replace(genoa, ask=genoa.ark),
        replace(genoa, vcek=genoa.ask),
    ):
        with pytest.raises(AttestationError) as caught:
            verify(mixed)
        assert caught.type in (NotGenuineError, MalformedEvidenceError)


def test_a_root_must_be_pinned(vector: Vector) -> None:
    with pytest.raises(NotGenuineError, match="not a trusted ARK"):
        verify(vector("genoa"), TrustRoots({}))
    pins = dict.fromkeys(AMD_ROOTS.pins, Product.TURIN)
    with pytest.raises(NotGenuineError, match="The root is Turin's"):
        verify(vector("genoa"), TrustRoots(pins))


def test_a_vcek_must_come_from_the_ask_and_not_from_the_asvk(vector: Vector) -> None:
    asvk = vector("milan-vlek").ask
    with pytest.raises(NotGenuineError, match="not the one for this product and kind"):
        verify(replace(vector("milan-debug"), ask=asvk))


def test_an_auditor_gets_every_reason_at_once(vector: Vector) -> None:
    altered = edited(vector("genoa"), 0x187)
    at = datetime(2040, 1, 1, tzinfo=UTC)
    messages = [error.message for error in failed_checks(altered, roots=TrustRoots({}), at=at)]
    assert len(messages) == 4
    for message, reason in zip(
        messages, ("trusted ARK", "is valid", "REPORTED_TCB", "signature"), strict=True
    ):
        assert reason in message
    assert failed_checks(vector("genoa"), roots=AMD_ROOTS, at=AT) == []
    with pytest.raises(MalformedEvidenceError):
        failed_checks(replace(altered, report=b""), roots=AMD_ROOTS, at=AT)


def test_all_patch_levels_are_decoded(vector: Vector) -> None:
    genuine = verify(vector("milan-vlek"), at=datetime(2025, 6, 1, tzinfo=UTC))
    assert {name: tcb.microcode for name, tcb in genuine.tcbs.items()} == {
        "reported": 217,
        "committed": 219,
        "launch": 219,
        "current": 220,
    }
    assert genuine.csp_id
    assert genuine.revocation is None


@pytest.mark.parametrize("at", [datetime(2020, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)])
def test_validity_is_checked_at_the_given_time(vector: Vector, at: datetime) -> None:
    with pytest.raises(NotGenuineError, match="is valid"):
        verify(vector("genoa"), at=at)


@pytest.mark.parametrize("expired", ["ARK", "ASK"])
def test_validity_of_each_issuer_is_checked(psp: SimulatedPsp, expired: str) -> None:
    evidence = psp.evidence(bytes(64))
    authority = psp._authority
    now = datetime.now(UTC)

    def issue(name: str, subject: x509.Name) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority.ark.subject)
            .public_key(authority.ask_key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(days=9))
            .not_valid_after(now + timedelta(days=-1 if name == expired else 1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        )
        return builder.sign(authority.ask_key, SHA384(), rsa_padding=PSS).public_bytes(Encoding.DER)

    chain = {"ark": issue("ARK", authority.ark.subject), "ask": issue("ASK", authority.ask.subject)}
    with pytest.raises(NotGenuineError, match=f"The {expired} certificate is valid"):
        verify(replace(evidence, **chain), SIMULATED, now)


def test_zero_serials_load_without_a_warning(vector: Vector, recwarn: pytest.WarningsRecorder) -> None:
    certificate = load_certificate(vector("genoa").vcek, "VEK")
    assert certificate.der == vector("genoa").vcek
    assert certificate.signed_bytes in certificate.der
    assert vek_info(certificate).product is Product.GENOA
    assert not list(recwarn)


@pytest.mark.parametrize("product", Product)
def test_simulated_evidence_is_marked(cache_dir: Path, product: Product) -> None:
    evidence = SimulatedPsp(cache_dir=cache_dir, product=product).evidence(bytes(64))
    genuine = verify(evidence, SIMULATED, datetime.now(UTC))
    assert genuine.simulated
    assert genuine.product is product


def test_simulated_evidence_is_refused_by_default(psp: SimulatedPsp) -> None:
    with pytest.raises(SimulatedEvidenceRefusedError) as caught:
        verify(psp.evidence(bytes(64)), at=datetime.now(UTC))
    assert caught.value.code == "simulated-refused"
    assert "UnsafeAllowSimulated" in caught.value.remedy


def test_real_evidence_verifies_beside_simulated_roots(vector: Vector) -> None:
    assert not verify(vector("genoa"), SIMULATED).simulated


def test_a_simulated_chip_cannot_extend_a_real_chain(psp: SimulatedPsp, vector: Vector) -> None:
    fake, real = psp.evidence(bytes(64)), vector("genoa")
    for mixed in (replace(fake, ark=real.ark), replace(fake, ask=real.ask, ark=real.ark)):
        with pytest.raises(SimulatedEvidenceRefusedError):
            verify(mixed, at=datetime.now(UTC))
        with pytest.raises(NotGenuineError):
            verify(mixed, SIMULATED, datetime.now(UTC))


def test_another_chips_key_does_not_verify(psp: SimulatedPsp, cache_dir: Path) -> None:
    other = SimulatedPsp(cache_dir=cache_dir).evidence(bytes(64))
    with pytest.raises(NotGenuineError, match="signature does not verify"):
        verify(replace(psp.evidence(bytes(64)), vcek=other.vcek), SIMULATED, datetime.now(UTC))


class Issuer:
    """Makes endorsement certificates with the session's simulated ASK."""

    def __init__(self, cache_dir: Path, evidence: Evidence) -> None:
        self.key = load_pem_private_key((cache_dir / "authority.pem").read_bytes(), None)
        self.template = x509.load_der_x509_certificate(evidence.vcek)

    def reissue(
        self,
        *,
        key: object = None,
        replaced: dict[str, bytes | None] | None = None,
        salt: int = 48,
        days: int = 365,
    ) -> bytes:
        assert isinstance(self.key, rsa.RSAPrivateKey)
        start = datetime.now(UTC) - timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.template.subject)
            .issuer_name(self.template.issuer)
            .public_key(key or self.template.public_key())  # type: ignore[arg-type]
            .serial_number(7)
            .not_valid_before(start - timedelta(days=2))
            .not_valid_after(start + timedelta(days=days))
        )
        for extension in self.template.extensions:
            value = extension.value
            assert isinstance(value, x509.UnrecognizedExtension)
            content = (replaced or {}).get(
                extension.oid.dotted_string.removeprefix("1.3.6.1.4.1.3704.1."), value.value
            )
            if content is not None:
                builder = builder.add_extension(
                    x509.UnrecognizedExtension(extension.oid, content), critical=False
                )
        scheme = padding.PSS(mgf=padding.MGF1(SHA384()), salt_length=salt)
        return builder.sign(self.key, SHA384(), rsa_padding=scheme).public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"replaced": {"3.3": b"\x02\x01\x16"}}, NotGenuineError, "REPORTED_TCB"),
        ({"replaced": {"4": bytes(64)}}, NotGenuineError, "CHIP_ID"),
        ({"replaced": {"4": bytes(8)}}, NotGenuineError, "64 bytes"),
        ({"replaced": {"4": None}}, NotGenuineError, "64 bytes"),
        ({"replaced": {"3.8": None}}, MalformedEvidenceError, "lacks extension"),
        ({"replaced": {"3.8": b"\x02\x02\x01\x54"}}, MalformedEvidenceError, "patch level"),
        ({"replaced": {"3.8": b""}}, MalformedEvidenceError, "patch level"),
        ({"replaced": {"2": b"\x16\x04Rome"}}, MalformedEvidenceError, "unknown product"),
        ({"replaced": {"2": b"\x16\x05Milan"}}, NotGenuineError, "CPUID"),
        ({"replaced": {"2": b"\x16\x7fGenoa"}}, MalformedEvidenceError, "IA5String"),
        ({"replaced": {"2": b"\x16\x01\x07"}}, MalformedEvidenceError, "printable"),
        ({"replaced": {"5": b"\x0c\x01a"}}, None, ""),
        ({"key": "p256"}, NotGenuineError, "P-384"),
        ({"key": "rsa"}, NotGenuineError, "P-384"),
        ({"salt": 32}, NotGenuineError, "did not sign"),
        ({"days": -1}, NotGenuineError, "is valid"),
    ],
)
def test_endorsement_certificates_are_held_to_the_profile(
    psp: SimulatedPsp,
    cache_dir: Path,
    changes: dict[str, object],
    error: type[AttestationError] | None,
    reason: str,
) -> None:
    evidence = psp.evidence(bytes(64))
    if changes.get("key") == "p256":
        changes = {"key": ec.generate_private_key(ec.SECP256R1()).public_key()}
    elif changes.get("key") == "rsa":
        changes = {"key": rsa.generate_private_key(65537, 2048).public_key()}
    issued = Issuer(cache_dir, evidence).reissue(**changes)  # type: ignore[arg-type]
    altered = replace(evidence, vcek=issued)
    if error is None:
        verify(altered, SIMULATED, datetime.now(UTC))
        return
    with pytest.raises(error, match=reason):
        verify(altered, SIMULATED, datetime.now(UTC))


@pytest.mark.parametrize("ca", [False, None])
def test_issuers_must_be_authorities_with_rsa_4096(psp: SimulatedPsp, ca: bool | None) -> None:
    evidence = psp.evidence(bytes(64))
    subject = x509.load_der_x509_certificate(evidence.ark).subject
    key = rsa.generate_private_key(65537, 2048)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
    )
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    root = builder.sign(key, SHA384(), rsa_padding=PSS).public_bytes(Encoding.DER)
    with pytest.raises(NotGenuineError, match="RSA-4096"):
        verify(replace(evidence, ark=root), SIMULATED, datetime.now(UTC))
    with pytest.raises(NotGenuineError, match="authority"):
        verify(replace(evidence, ark=_root_without_ca(psp)), SIMULATED, datetime.now(UTC))


def _root_without_ca(psp: SimulatedPsp) -> bytes:
    """An RSA-4096 certificate without the CA bit, self-signed with the simulated ASK's key."""
    authority = psp._authority
    name = authority.ark.subject
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(authority.ask_key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .sign(authority.ask_key, SHA384(), rsa_padding=PSS)
    )
    return certificate.public_bytes(Encoding.DER)


@given(data=st.data())
def test_mutated_certificates_raise_nothing_unexpected(data: st.DataObject, vector: Vector) -> None:
    evidence = vector("genoa")
    name = data.draw(st.sampled_from(["vcek", "ask", "ark"]))
    der = bytearray(getattr(evidence, name))
    for _ in range(data.draw(st.integers(1, 4))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(der)) | st.just(len(der)))
    altered = replace(evidence, **{name: bytes(der[:end])})
    if altered != evidence:
        with pytest.raises(AttestationError):
            verify(altered)


@given(st.binary(max_size=300))
def test_arbitrary_certificates_raise_nothing_unexpected(data: bytes) -> None:
    with pytest.raises(AttestationError):
        load_certificate(data, "test")


def test_oversized_certificates_are_refused(vector: Vector) -> None:
    with pytest.raises(MalformedEvidenceError, match="9000 bytes"):
        verify(replace(vector("genoa"), ark=bytes(9000)))
