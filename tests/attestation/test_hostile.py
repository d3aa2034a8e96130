"""Hundreds of hostile variants of good evidence: each refused for a typed reason, none crashes.

The good evidence is real (a patched Bergamo, report version 5) under a policy that accepts it, so
that every refusal is due to the change alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import cbor2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, SHA512
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from attestation.certificates import AMD_ROOTS, PSS, load_certificate
from attestation.errors import (
    AttestationError,
    MalformedEvidenceError,
    NotGenuineError,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.evidence import (
    EVIDENCE_MEDIA_TYPE,
    MAX_EVIDENCE_SIZE,
    Evidence,
    decode_fresh,
    decode_record,
    encode_fresh,
    encode_record,
)
from attestation.pem import CERTIFICATE, read_der
from attestation.pins import UNPINNED
from attestation.policy import Policy, UnsafeAllowSimulated, standard_platform, validate_report
from attestation.report import SIGNED_SIZE, Product, parse_report
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement
from attestation.verify import verify_evidence

DATA = Path(__file__).parent / "data"
AT = datetime(2026, 10, 1, tzinfo=UTC)


def read(name: str) -> bytes:
    return (DATA / name).read_bytes()


def der(name: str, index: int = 0) -> bytes:
    return read_der(read(name), CERTIFICATE, name)[index]


GOOD = Evidence(
    report=read("genoa_cdai_report_v5.bin"),
    vcek=der("genoa_cdai_vcek.der"),
    ask=der("genoa_ms_ask.pem"),
    ark=der("genoa_ms_ark.pem"),
)
POLICY = Policy(
    measurements=frozenset({GOOD.report[0x90:0xC0]}),
    products=frozenset({Product.GENOA}),
    model_identity=UNPINNED,
    service=UNPINNED,
    platform=replace(standard_platform(), revocation_required=False),
)


def judge(evidence: Evidence, policy: Policy | UnsafeAllowSimulated = POLICY, at: datetime = AT) -> None:
    genuine = verify_evidence(evidence, roots=policy.roots, at=at)
    validate_report(genuine, policy=policy, expected_report_data=evidence.report[0x50:0x90])


def test_the_good_evidence_is_accepted() -> None:
    judge(GOOD)
    judge(decode_fresh(encode_fresh(GOOD)))


@dataclass(frozen=True)
class Variant:
    """Changed evidence, and the errors one of which must come."""

    name: str
    evidence: Evidence
    errors: tuple[type[AttestationError], ...] = (NotGenuineError, MalformedEvidenceError)
    at: datetime = AT


FIELDS = {
    "version": (0x000, 4), "guest_svn": (0x004, 4), "policy": (0x008, 8), "family_id": (0x010, 16),
    "image_id": (0x020, 16), "vmpl": (0x030, 4), "signature_algorithm": (0x034, 4), "current_tcb": (0x038, 8),
    "platform_info": (0x040, 8), "key_info": (0x048, 4), "reserved_04c": (0x04C, 4),
    "report_data": (0x050, 64), "measurement": (0x090, 48), "host_data": (0x0C0, 32),
    "id_key_digest": (0x0E0, 48), "author_key_digest": (0x110, 48), "report_id": (0x140, 32),
    "report_id_ma": (0x160, 32), "reported_tcb": (0x180, 8), "cpuid": (0x188, 3), "reserved_18b": (0x18B, 21),
    "chip_id": (0x1A0, 64), "committed_tcb": (0x1E0, 8), "current_firmware": (0x1E8, 3),
    "reserved_1eb": (0x1EB, 1), "committed_firmware": (0x1EC, 3), "reserved_1ef": (0x1EF, 1),
    "launch_tcb": (0x1F0, 8), "launch_mit_vector": (0x1F8, 8), "current_mit_vector": (0x200, 8),
    "reserved_208": (0x208, 152), "signature_r": (0x2A0, 72), "signature_s": (0x2E8, 72),
    "signature_rest": (0x330, 368),
}  # fmt: skip


def changed_reports() -> Iterator[Variant]:
    """Every field: its first, middle and last byte flipped, all of it zero, all of it ones."""
    assert sum(size for _, size in FIELDS.values()) == len(GOOD.report)
    for name, (start, size) in FIELDS.items():
        edits = {
            f"flip{i}": (start + i, bytes([GOOD.report[start + i] ^ 0x80])) for i in {0, size // 2, size - 1}
        }
        edits |= {"zero": (start, bytes(size)), "ones": (start, b"\xff" * size)}
        for edit, (offset, value) in edits.items():
            report = GOOD.report[:offset] + value + GOOD.report[offset + len(value) :]
            if report != GOOD.report:
                yield Variant(f"report.{name}.{edit}", replace(GOOD, report=report))
    for length in (0, 1, 4, 0x2A0, 0x330, 1183):
        yield Variant(f"report.cut{length}", replace(GOOD, report=GOOD.report[:length]))
    for extra in (1, 16, 1184):
        yield Variant(f"report.longer{extra}", replace(GOOD, report=GOOD.report + bytes(extra)))


def malleable_signatures() -> Iterator[Variant]:
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
    r = int.from_bytes(GOOD.report[0x2A0:0x2D0], "little")
    for name, numbers in {
        "zero": (0, 0), "r_zero": (0, 5), "s_zero": (r, 0), "r_order": (order, 5), "s_order": (r, order),
        "ones": (1, 1), "largest": (2**384 - 1, 2**384 - 1), "same": (r, r),
    }.items():  # fmt: skip
        signature = b"".join(number.to_bytes(72, "little") for number in numbers)
        yield Variant(
            f"signature.{name}", replace(GOOD, report=GOOD.report[:0x2A0] + signature + bytes(0x170))
        )


def changed_certificates() -> Iterator[Variant]:
    """Bytes spread over each certificate, cuts, extensions, and each in the place of another."""
    for part in ("vcek", "ask", "ark"):
        data: bytes = getattr(GOOD, part)
        for offset in [*range(8), *range(8, len(data), len(data) // 24), len(data) - 1]:
            edited = data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]
            yield Variant(f"{part}.flip{offset}", replace(GOOD, **{part: edited}))
        for length in (0, 1, 4, 100, len(data) // 2, len(data) - 1):
            yield Variant(f"{part}.cut{length}", replace(GOOD, **{part: data[:length]}))
        for extra in (b"\x00", data):
            yield Variant(f"{part}.longer{len(extra)}", replace(GOOD, **{part: data + extra}))
        yield Variant(f"{part}.huge", replace(GOOD, **{part: bytes(9000)}))
    others = {
        "turin_vcek": der("turin_ms_vcek.pem"), "turin_ask": der("turin_ms_ask.pem"),
        "turin_ark": der("turin_ms_ark.pem"), "milan_vcek": der("milan_ms_vcek.pem"),
        "milan_ask": der("milan_ms_ask.pem"), "milan_ark": der("milan_ms_ark.pem"),
        "milan_vlek": der("milan_trustee_vlek.der"), "genoa_other_vcek": der("genoa_ms_vcek.pem"),
        "genoa_asvk": der("genoa_trustee_ask_ark_asvk.pem", 2), "own_vcek": GOOD.vcek, "own_ask": GOOD.ask,
        "own_ark": GOOD.ark,
    }  # fmt: skip
    for part in ("vcek", "ask", "ark"):
        for name, other in others.items():
            if getattr(GOOD, part) != other:
                yield Variant(f"{part}.is_{name}", replace(GOOD, **{part: other}))
    yield Variant(
        "chain.turin",
        replace(GOOD, vcek=others["turin_vcek"], ask=others["turin_ask"], ark=others["turin_ark"]),
    )
    yield Variant("chain.milan", replace(GOOD, ask=others["milan_ask"], ark=others["milan_ark"]))


def wrong_times() -> Iterator[Variant]:
    vek = load_certificate(GOOD.vcek, "VEK").x509
    for name, at in {
        "before_vek": vek.not_valid_before_utc - timedelta(seconds=1),
        "after_vek": vek.not_valid_after_utc + timedelta(seconds=1),
        "before_all": datetime(1970, 1, 1, tzinfo=UTC),
        "after_all": datetime(2099, 1, 1, tzinfo=UTC),
    }.items():
        yield Variant(f"time.{name}", GOOD, (NotGenuineError,), at)


def bad_revocation_lists() -> Iterator[Variant]:
    genoa = read("genoa_crl_openpcc.der")
    lists = {
        "expired": genoa, "other_product": read("milan_crl_openpcc.der"), "empty": b"", "huge": bytes(70_000),
        "certificate": GOOD.ark, "cut": genoa[:-1], "longer": genoa + b"\0", "garbage": b"\x30\x82" * 400,
    }  # fmt: skip
    for name, data in lists.items():
        yield Variant(f"crl.{name}", replace(GOOD, crl=data))
    for offset in range(0, len(genoa), 50):
        edited = genoa[:offset] + bytes([genoa[offset] ^ 0x10]) + genoa[offset + 1 :]
        inside = datetime(2025, 10, 1, tzinfo=UTC)
        yield Variant(f"crl.flip{offset}", replace(GOOD, crl=edited), at=inside)


VARIANTS = [
    *changed_reports(),
    *malleable_signatures(),
    *changed_certificates(),
    *wrong_times(),
    *bad_revocation_lists(),
]


def test_there_are_enough_variants_and_none_twice() -> None:
    assert len(VARIANTS) >= 200
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert len({(variant.evidence, variant.at) for variant in VARIANTS}) > len(VARIANTS) - 10


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_hostile_variant_is_refused(variant: Variant) -> None:
    with pytest.raises(variant.errors) as caught:
        judge(variant.evidence, at=variant.at)
    assert caught.value.message
    assert caught.value.remedy


def test_a_malleated_signature_is_the_same_report() -> None:
    """(r, n - s) also verifies, so that a replay must be recognised by the signed bytes."""
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
    s = int.from_bytes(GOOD.report[0x2E8:0x330], "little")
    other = GOOD.report[:0x2E8] + (order - s).to_bytes(72, "little") + GOOD.report[0x330:]
    first = verify_evidence(GOOD, roots=AMD_ROOTS, at=AT).report
    second = verify_evidence(replace(GOOD, report=other), roots=AMD_ROOTS, at=AT).report
    assert first.raw != second.raw
    assert first.replay_key == second.replay_key


class Forger:
    """Makes evidence with the simulated ASK and keys of its choice."""

    def __init__(self, psp: SimulatedPsp, cache_dir: Path) -> None:
        key = load_pem_private_key((cache_dir / "authority.pem").read_bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        self.key = key
        self.evidence = psp.evidence(bytes(64))
        self.template = x509.load_der_x509_certificate(self.evidence.vcek)

    def with_key(self, key: Any, digest: Any) -> Evidence:
        """Evidence whose endorsement certificate has ``key``, signed with it where that can be."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.template.subject)
            .issuer_name(self.template.issuer)
            .public_key(key.public_key())
            .serial_number(7)
            .not_valid_before(datetime.now(UTC) - timedelta(days=1))
            .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        )
        for extension in self.template.extensions:
            builder = builder.add_extension(extension.value, critical=False)
        vek = builder.sign(self.key, SHA384(), rsa_padding=PSS).public_bytes(Encoding.DER)
        report = self.evidence.report
        if isinstance(key, ec.EllipticCurvePrivateKey):
            r, s = decode_dss_signature(key.sign(report[:SIGNED_SIZE], ec.ECDSA(digest)))
            report = report[:SIGNED_SIZE] + r.to_bytes(72, "little") + s.to_bytes(72, "little") + bytes(0x170)
        return replace(self.evidence, vcek=vek, report=report)


@pytest.mark.parametrize(
    ("make_key", "digest"),
    [
        (lambda: ec.generate_private_key(ec.SECP256R1()), SHA256()),
        (lambda: ec.generate_private_key(ec.SECP256K1()), SHA256()),
        (lambda: ec.generate_private_key(ec.BrainpoolP384R1()), SHA384()),
        (lambda: ec.generate_private_key(ec.SECP521R1()), SHA512()),
        (lambda: ec.generate_private_key(ec.SECP384R1()), SHA256()),
        (lambda: ec.generate_private_key(ec.SECP384R1()), SHA512()),
        (lambda: rsa.generate_private_key(65537, 2048), SHA384()),
        (ed25519.Ed25519PrivateKey.generate, SHA384()),
    ],
    ids=["p256", "k256", "brainpool384", "p521", "p384_sha256", "p384_sha512", "rsa", "ed25519"],
)
def test_other_curves_and_digests_are_refused(
    psp: SimulatedPsp, cache_dir: Path, make_key: Callable[[], Any], digest: Any
) -> None:
    forged = Forger(psp, cache_dir).with_key(make_key(), digest)
    allowed = UnsafeAllowSimulated.only(model_identity=UNPINNED, service=UNPINNED)
    with pytest.raises((NotGenuineError, MalformedEvidenceError)):
        judge(forged, allowed, datetime.now(UTC))


def test_the_forgers_own_tools_work(psp: SimulatedPsp, cache_dir: Path) -> None:
    forged = Forger(psp, cache_dir).with_key(ec.generate_private_key(ec.SECP384R1()), SHA384())
    allowed = UnsafeAllowSimulated.only(model_identity=UNPINNED, service=UNPINNED)
    judge(forged, allowed, datetime.now(UTC))
    with pytest.raises(SimulatedEvidenceRefusedError):
        judge(forged, POLICY, datetime.now(UTC))


SIGNED = {
    **{f"policy_bit{bit}": {"policy": 0x30000 ^ 1 << bit} for bit in (17, 18, 19, 21, *range(26, 64))},
    **{f"vmpl{vmpl}": {"vmpl": vmpl} for vmpl in (1, 2, 3, 4, 2**32 - 1)},
    **{f"version{version}": {"version": version} for version in (2, 4)},
    "masked": {"key_info": 2},
    "author_key": {"key_info": 1},
    "alias_check": {"platform_info": 0x05},
    "measurement": {"measurement": bytes(48)},
    "host_data": {"host_data": b"\x01" * 32},
    "firmware": {"firmware": (1, 54, 255)},
}


@pytest.mark.parametrize("name", SIGNED)
def test_genuine_but_unacceptable_reports_are_refused(psp: SimulatedPsp, name: str) -> None:
    """Signed by the chip (here a simulated one) as they are: only the policy can refuse them."""
    evidence = psp.altered(**SIGNED[name]).evidence(bytes(64))
    allowed = UnsafeAllowSimulated.only(model_identity=UNPINNED, service=UNPINNED)
    with pytest.raises(PolicyRefusedError):
        judge(evidence, allowed, datetime.now(UTC))


def nested(depth: int, head: bytes) -> bytes:
    return head * depth + b"\x00"


BODY = {"report": GOOD.report, "vcek": GOOD.vcek, "ask": GOOD.ask, "ark": GOOD.ark}
HOSTILE_CBOR = {
    "empty": b"",
    "null": b"\xf6",
    "huge_claimed_bytes": b"\x5b" + b"\xff" * 8,
    "huge_claimed_text": b"\x7b\x00\x00\x00\x7f\xff\xff\xff\xff",
    "huge_claimed_array": b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff",
    "huge_claimed_map": b"\xbb\x7f\xff\xff\xff\xff\xff\xff\xff",
    "huge_real_bytes": cbor2.dumps(bytes(MAX_EVIDENCE_SIZE)),
    "huge_report": cbor2.dumps({**BODY, "report": bytes(60_000)}),
    "huge_vcek": cbor2.dumps({**BODY, "vcek": bytes(50_000)}),
    "huge_crl": cbor2.dumps({**BODY, "crl": bytes(40_000)}),
    "over_the_limit": cbor2.dumps({**BODY, "ark": bytes(200_000)}),
    "many_keys": cbor2.dumps({str(i): i for i in range(5000)}),
    "nested_arrays": nested(50_000, b"\x81"),
    "nested_maps": nested(30_000, b"\xa1\x00"),
    "nested_tags": nested(50_000, b"\xc1"),
    "nested_indefinite": b"\x9f" * 50_000,
    "indefinite_map": b"\xbf" + cbor2.dumps("report") + cbor2.dumps(GOOD.report) + b"\xff",
    "indefinite_bytes": b"\x5f\x41\x00\xff",
    "tagged": b"\xc0" + cbor2.dumps(BODY),
    "shared_reference": b"\xd8\x1c\x81\xd8\x1d\x00",
    "bignum": b"\xc2\x59\xff\xff" + b"\xff" * 65_535,
    "duplicate_key": b"\xa2" + (cbor2.dumps("report") + cbor2.dumps(b"")) * 2,
    "missing": cbor2.dumps({key: value for key, value in BODY.items() if key != "ark"}),
    "extra": cbor2.dumps({**BODY, "more": 1}),
    "text_for_bytes": cbor2.dumps({**BODY, "vcek": "text"}),
    "number_for_bytes": cbor2.dumps({**BODY, "vcek": 7}),
    "null_for_bytes": cbor2.dumps({**BODY, "ark": None}),
    "crl_is_text": cbor2.dumps({**BODY, "crl": "text"}),
    "crl_is_null": cbor2.dumps({**BODY, "crl": None}),
    "array_for_map": cbor2.dumps(list(BODY.values())),
    "trailing": encode_fresh(GOOD) + b"\x00",
    "cut": encode_fresh(GOOD)[:-1],
    "undefined": b"\xf7",
    "break": b"\xff",
    "reserved": b"\x1c",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_CBOR)
def test_hostile_cbor_is_refused(name: str) -> None:
    data = HOSTILE_CBOR[name]
    with pytest.raises(MalformedEvidenceError):
        decode_fresh(data)
    for wrapped in (data, cbor2.dumps([EVIDENCE_MEDIA_TYPE, data]), cbor2.dumps(["other/type", data])):
        with pytest.raises(MalformedEvidenceError):
            decode_record(wrapped)
    with pytest.raises(MalformedEvidenceError):
        Statement.decode(data)


@given(st.binary(max_size=600) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.binary(max_size=40) | st.text(max_size=20) | st.floats(),
    lambda x: st.lists(x, max_size=5) | st.dictionaries(st.text(max_size=10), x, max_size=5),
).map(cbor2.dumps))  # fmt: skip
def test_arbitrary_cbor_raises_nothing_unexpected(data: bytes) -> None:
    for decode in (decode_fresh, decode_record, Statement.decode):
        with pytest.raises(MalformedEvidenceError):
            decode(data)


@given(data=st.data())
def test_changed_records_are_refused_or_mean_the_same(data: st.DataObject) -> None:
    good = encode_record(GOOD, b"statement")
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if bytes(raw) == good:
        return
    try:
        evidence, statement = decode_record(bytes(raw))
        if statement != b"statement":
            return  # REPORT_DATA binds the statement; nothing here does
        judge(evidence)
    except (MalformedEvidenceError, NotGenuineError, PolicyRefusedError, SimulatedEvidenceRefusedError):
        return
    pytest.fail("a changed record was accepted")


@given(report=st.binary(min_size=1184, max_size=1184), vek=st.binary(max_size=2000))
def test_arbitrary_evidence_raises_nothing_unexpected(report: bytes, vek: bytes) -> None:
    for evidence in (replace(GOOD, report=report), replace(GOOD, vcek=vek), replace(GOOD, crl=vek)):
        with pytest.raises((MalformedEvidenceError, NotGenuineError)):
            judge(evidence)


def test_a_parsed_report_does_not_follow_its_buffer() -> None:
    buffer = bytearray(GOOD.report)
    report = parse_report(buffer)
    buffer[:] = bytes(len(buffer))
    assert report.raw == GOOD.report
