"""Collateral of a real Milan report at a dated clock, with a key service, a cache and a host that may lie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from attestation import collateral as collateral_module
from attestation.certificates import AMD_ROOTS
from attestation.collateral import CRL_REFRESH, RETRY_AFTER, Collateral, KdsCollateral
from attestation.disk_cache import DiskCache
from attestation.errors import AttestationError, CollateralError
from attestation.evidence import Evidence
from attestation.kds import ATTEMPTS, Endorsement, KdsClient, cert_chain_url, crl_url, vcek_url
from attestation.pem import read_der
from attestation.providers.certificate_table import OfferedCertificates
from attestation.report import Product, Report, Tcb, parse_report
from attestation.verify import verify_evidence

DATA = Path(__file__).parent / "data"
NOW = datetime(2026, 3, 1, tzinfo=UTC)
AFTER_CRL = datetime(2026, 5, 13, tzinfo=UTC)
NOTHING = OfferedCertificates()


def der(name: str) -> bytes:
    return read_der((DATA / name).read_bytes(), "CERTIFICATE", name)[0]


VCEK, ASK, ARK = der("milan_ms_vcek.pem"), der("milan_ms_ask.pem"), der("milan_ms_ark.pem")
CRL = (DATA / "milan_crl_openpcc.der").read_bytes()
REPORT = parse_report((DATA / "milan_ms_report.bin").read_bytes())
OTHER_REPORT = parse_report((DATA / "milan_cdai_az_v3_report_inner.bin").read_bytes())
WHOLE = Collateral(VCEK, ASK, ARK, CRL)
VCEK_URL = vcek_url(Product.MILAN, REPORT.chip_id, Tcb.decode(REPORT.reported_tcb, Product.MILAN))
CHAIN_URL = cert_chain_url(Product.MILAN, Endorsement.VCEK)
CRL_URL = crl_url(Product.MILAN, Endorsement.VCEK)


@dataclass
class Amd:
    """AMD's key service: what it has, and what it was asked. ``down`` makes it fail."""

    objects: dict[str, bytes]
    asked: list[str] = field(default_factory=list)
    down: bool = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        url = str(request.url)
        self.asked.append(url)
        if self.down:
            raise httpx.ConnectError("down")
        if url not in self.objects:
            return httpx.Response(404)
        return httpx.Response(200, content=iter([self.objects[url]]))


@pytest.fixture
def amd() -> Amd:
    chain = (DATA / "milan_ms_ask.pem").read_bytes() + (DATA / "milan_ms_ark.pem").read_bytes()
    return Amd({VCEK_URL: VCEK, CHAIN_URL: chain, CRL_URL: CRL})


@dataclass
class Clock:
    now: datetime = NOW


@pytest.fixture
def clock() -> Clock:
    return Clock()


Build = Callable[[], KdsCollateral]


@pytest.fixture
def build(amd: Amd, clock: Clock, tmp_path: Path) -> Build:
    """A new process on the same machine: memory is empty, the cache on disk is not."""

    def make() -> KdsCollateral:
        kds = KdsClient(
            transport=httpx.MockTransport(amd), sleep=lambda _: None, monotonic=lambda: 0.0,
            clock=lambda: clock.now,
        )  # fmt: skip
        return KdsCollateral(
            kds=kds, cache=DiskCache(tmp_path / "cache"), clock=lambda: clock.now,
            background=lambda work: work(),
        )  # fmt: skip

    return make


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_everything_comes_from_amd_once(build: Build, amd: Amd) -> None:
    source = build()
    for _ in range(5):
        assert source.collateral(REPORT, NOTHING) == WHOLE
    assert sorted(amd.asked) == sorted([VCEK_URL, CHAIN_URL, CRL_URL])


def test_what_comes_back_verifies_the_report(build: Build) -> None:
    had = build().collateral(REPORT, NOTHING)
    evidence = Evidence(REPORT.raw, had.vek, had.ask, had.ark, had.crl)
    assert verify_evidence(evidence, roots=AMD_ROOTS, at=NOW, crl=had.crl).product is Product.MILAN


def test_a_new_process_uses_the_cache(build: Build, amd: Amd) -> None:
    build().collateral(REPORT, NOTHING)
    amd.down = True
    assert build().collateral(REPORT, NOTHING) == WHOLE
    assert len(amd.asked) == 3


def test_another_chip_is_fetched_anew(build: Build, amd: Amd) -> None:
    source = build()
    source.collateral(REPORT, NOTHING)
    other = der("milan_cdai_az_v3_vcek.der")
    tcb = Tcb.decode(OTHER_REPORT.reported_tcb, Product.MILAN)
    url = vcek_url(Product.MILAN, OTHER_REPORT.chip_id, tcb)
    amd.objects[url] = other
    assert source.collateral(OTHER_REPORT, NOTHING) == Collateral(other, ASK, ARK, CRL)
    assert amd.asked[3:] == [url]


def test_another_patch_level_needs_another_vcek(build: Build, amd: Amd) -> None:
    source = build()
    source.collateral(REPORT, NOTHING)
    newer = replace(REPORT, reported_tcb=Tcb(None, 4, 0, 24, 220).encode(Product.MILAN))
    with pytest.raises(CollateralError, match="404"):
        source.collateral(newer, NOTHING)
    assert "ucodeSPL=220" in amd.asked[-1]


def test_the_hosts_certificates_are_used_but_its_list_is_not_preferred(build: Build, amd: Amd) -> None:
    offered = OfferedCertificates(vcek=VCEK, ask=ASK, ark=ARK, crl=CRL)
    assert build().collateral(REPORT, offered) == WHOLE
    assert amd.asked == [CRL_URL]


def test_without_amd_the_hosts_list_will_do(build: Build, amd: Amd) -> None:
    amd.down = True
    offered = OfferedCertificates(vcek=VCEK, ask=ASK, ark=ARK, crl=CRL)
    assert build().collateral(REPORT, offered) == WHOLE


GENOA = {"ask": der("genoa_ms_ask.pem"), "ark": der("genoa_ms_ark.pem"), "vcek": der("genoa_ms_vcek.pem")}
LIES: dict[str, OfferedCertificates] = {
    "damaged VCEK": OfferedCertificates(vcek=damaged(VCEK), ask=ASK, ark=ARK),
    "damaged ASK": OfferedCertificates(vcek=VCEK, ask=damaged(ASK), ark=ARK),
    "damaged ARK": OfferedCertificates(vcek=VCEK, ask=ASK, ark=damaged(ARK)),
    "noise": OfferedCertificates(vcek=b"\x30\x01", ask=b"\x30\x02", ark=b"\x30\x03", crl=b"\x30\x04"),
    "another product's": OfferedCertificates(**GENOA),
    "another chip's": OfferedCertificates(vcek=der("milan_cdai_az_v3_vcek.der"), ask=ASK, ark=ARK),
    "a chain in the wrong order": OfferedCertificates(vcek=VCEK, ask=ARK, ark=ASK),
    "only half a chain": OfferedCertificates(ask=ASK),
    "a VLEK for a VCEK": OfferedCertificates(vlek=der("milan_trustee_vlek.der"), ask=ASK, ark=ARK),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_lies_is_not_believed(build: Build, lie: str) -> None:
    assert build().collateral(REPORT, LIES[lie]) == WHOLE


@pytest.mark.parametrize("lie", [name for name in LIES if name != "only half a chain"])
def test_a_host_that_lies_cannot_make_up_for_amd(build: Build, amd: Amd, lie: str) -> None:
    amd.down = True
    with pytest.raises(CollateralError):
        build().collateral(REPORT, LIES[lie])


WRONG: dict[str, tuple[str, bytes]] = {
    "VCEK damaged": (VCEK_URL, damaged(VCEK)),
    "VCEK of another chip": (VCEK_URL, der("milan_cdai_az_v3_vcek.der")),
    "VCEK that is none": (VCEK_URL, b"<html>log in</html>"),
    "VCEK empty": (VCEK_URL, b""),
    "VCEK too large": (VCEK_URL, bytes(10000)),
    "chain damaged": (CHAIN_URL, (DATA / "milan_ms_ask.pem").read_bytes() * 2),
    "chain of another product": (
        CHAIN_URL, (DATA / "genoa_ms_ask.pem").read_bytes() + (DATA / "genoa_ms_ark.pem").read_bytes(),
    ),
    "chain with three": (CHAIN_URL, (DATA / "milan_trustee_ask_ark_asvk.pem").read_bytes()),
    "chain too large": (CHAIN_URL, b"-" * 40000),
    "list damaged": (CRL_URL, damaged(CRL)),
    "list of another product": (CRL_URL, (DATA / "genoa_crl_openpcc.der").read_bytes()),
    "list that is a certificate": (CRL_URL, ASK),
    "list empty": (CRL_URL, b""),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_an_error_and_is_not_kept(
    build: Build, amd: Amd, wrong: str, tmp_path: Path
) -> None:
    url, answer = WRONG[wrong]
    right = amd.objects[url]
    amd.objects[url] = answer
    with pytest.raises(CollateralError):
        build().collateral(REPORT, NOTHING)
    assert DiskCache(tmp_path / "cache").load(url, limit=1 << 20) is None
    amd.objects[url] = right
    assert build().collateral(REPORT, NOTHING) == WHOLE


@pytest.mark.parametrize("url", [VCEK_URL, CHAIN_URL, CRL_URL])
def test_nothing_is_served_with_a_part_missing(build: Build, amd: Amd, url: str) -> None:
    del amd.objects[url]
    with pytest.raises(CollateralError, match="404"):
        build().collateral(REPORT, NOTHING)


@pytest.mark.parametrize("url", [VCEK_URL, CHAIN_URL, CRL_URL])
@pytest.mark.parametrize("content", [b"", b"noise", ASK])
def test_a_poisoned_cache_is_not_believed(
    build: Build, amd: Amd, tmp_path: Path, url: str, content: bytes
) -> None:
    """Whoever can write to the disk can also make the hashes fit."""
    build().collateral(REPORT, NOTHING)
    DiskCache(tmp_path / "cache").store(url, content, NOW)
    assert build().collateral(REPORT, NOTHING) == WHOLE
    assert amd.asked.count(url) == 2
    amd.down = True
    assert build().collateral(REPORT, NOTHING) == WHOLE


def test_a_report_that_was_altered_is_refused(build: Build) -> None:
    raw = bytearray(REPORT.raw)
    raw[0x90] ^= 1
    with pytest.raises(CollateralError, match="does not verify"):
        build().collateral(parse_report(bytes(raw)), NOTHING)


def test_a_failure_is_remembered_for_a_while(build: Build, amd: Amd, clock: Clock) -> None:
    amd.down = True
    source = build()
    for _ in range(3):
        with pytest.raises(CollateralError):
            source.collateral(REPORT, NOTHING)
    asked = len(amd.asked)
    amd.down = False
    clock.now += RETRY_AFTER
    assert source.collateral(REPORT, NOTHING) == WHOLE
    assert asked == ATTEMPTS


def test_the_list_is_renewed_daily(build: Build, amd: Amd, clock: Clock) -> None:
    source = build()
    source.collateral(REPORT, NOTHING)
    clock.now += CRL_REFRESH - timedelta(seconds=1)
    source.collateral(REPORT, NOTHING)
    assert len(amd.asked) == 3
    clock.now += timedelta(seconds=1)
    source.collateral(REPORT, NOTHING)
    source.collateral(REPORT, NOTHING)
    assert amd.asked[3:] == [CRL_URL]


def test_a_list_of_yesterday_is_renewed_at_the_start(build: Build, amd: Amd, clock: Clock) -> None:
    build().collateral(REPORT, NOTHING)
    clock.now += CRL_REFRESH
    build().collateral(REPORT, NOTHING)
    assert amd.asked[3:] == [CRL_URL]


def test_a_renewal_that_fails_keeps_the_old_list_until_it_expires(
    build: Build, amd: Amd, clock: Clock
) -> None:
    source = build()
    source.collateral(REPORT, NOTHING)
    amd.down = True
    clock.now += CRL_REFRESH
    assert source.collateral(REPORT, NOTHING) == WHOLE
    asked = len(amd.asked)
    assert source.collateral(REPORT, NOTHING) == WHOLE
    assert len(amd.asked) == asked
    clock.now += RETRY_AFTER
    assert source.collateral(REPORT, NOTHING) == WHOLE
    assert len(amd.asked) > asked
    assert build().collateral(REPORT, NOTHING) == WHOLE  # from the cache
    clock.now = AFTER_CRL
    for last in (source, build()):
        with pytest.raises(CollateralError):
            last.collateral(REPORT, NOTHING)


def test_an_expired_list_from_amd_or_the_host_is_refused(build: Build, clock: Clock) -> None:
    clock.now = AFTER_CRL
    with pytest.raises(CollateralError, match="revocation list"):
        build().collateral(REPORT, OfferedCertificates(crl=CRL))


def test_a_list_older_than_the_known_one_is_refused(
    build: Build, amd: Amd, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build()
    source.collateral(REPORT, NOTHING)
    real = collateral_module._verified_crl
    monkeypatch.setattr(
        collateral_module,
        "_verified_crl",
        lambda *a: replace(real(*a), issued=real(*a).issued - timedelta(1)),
    )
    clock.now += CRL_REFRESH
    assert source.collateral(REPORT, NOTHING) == WHOLE
    held = source._held
    assert held is not None
    assert held.refresh == clock.now + RETRY_AFTER


def test_a_renewal_does_not_hold_up_requests(build: Build, clock: Clock) -> None:
    source, works = build(), []
    source._background = works.append
    source.collateral(REPORT, NOTHING)
    clock.now += CRL_REFRESH
    source.collateral(REPORT, NOTHING)
    with source._fetching:  # as while a renewal waits for AMD
        done = threading.Event()
        threading.Thread(target=lambda: (source.collateral(REPORT, NOTHING), done.set())).start()
        assert done.wait(5)
    assert len(works) == 1
    works[0]()
    assert source._held is not None
    assert source._held.refresh == clock.now + CRL_REFRESH


def test_many_threads_fetch_once(build: Build, amd: Amd) -> None:
    source, results = build(), []
    threads = [
        threading.Thread(target=lambda: results.append(source.collateral(REPORT, NOTHING))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [WHOLE] * 8
    assert len(amd.asked) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cpuid": None}, "does not say which processor"),
        ({"cpuid": (0x19, 0x50, 0)}, "does not say which processor"),
        ({"signing_key": 7}, "no signing key"),
        ({"signing_key": 3}, "no signing key"),
        ({"reported_tcb": b"\1\2\3\4\5\6\7\x08"}, "patch level"),
        ({"chip_id": bytes(64)}, "hides which chip"),
    ],
)
def test_a_report_that_names_no_chip_cannot_be_completed(
    build: Build, amd: Amd, changes: dict[str, object], words: str
) -> None:
    report: Report = replace(REPORT, **changes)  # type: ignore[arg-type]
    with pytest.raises(CollateralError, match=words):
        build().collateral(report, NOTHING)
    assert not any("/Milan/0" in url for url in amd.asked)


def test_a_vlek_comes_from_the_host(build: Build, amd: Amd, clock: Clock) -> None:
    report = parse_report((DATA / "milan_trustee_vlek_report.bin").read_bytes())
    ark, asvk = (
        read_der((DATA / "milan_trustee_ask_ark_asvk.pem").read_bytes(), "CERTIFICATE", "chain")[index]
        for index in (1, 2)
    )
    vlek = der("milan_trustee_vlek.der")
    amd.objects[crl_url(Product.MILAN, Endorsement.VLEK)] = CRL
    clock.now = datetime(2025, 6, 1, tzinfo=UTC)
    source = build()
    assert source.collateral(report, OfferedCertificates(vlek=vlek, ask=asvk, ark=ark)) == Collateral(
        vlek, asvk, ark, CRL
    )
    with pytest.raises(CollateralError, match="404"):
        build().collateral(report, OfferedCertificates(ask=asvk, ark=ark))
    assert "/vlek/v1/Milan/cert?" in amd.asked[-1]


def test_every_error_is_of_this_package(build: Build, amd: Amd) -> None:
    amd.objects.clear()
    with pytest.raises(AttestationError) as caught:
        build().collateral(REPORT, NOTHING)
    assert caught.value.code == "collateral-unavailable"
    assert caught.value.remedy
