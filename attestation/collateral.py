"""Completes a report: endorsement certificate, its chain and the revocation list, all verified.

Three places have them: the host (in its certificate table), the cache on disk and AMD. None of them is
trusted. What does not verify under the pinned ARK, for this very report, is thrown away; what cannot
be had completely is an error, never evidence with a part missing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from attestation.certificates import (
    AMD_ROOTS,
    MAX_CERTIFICATE_SIZE,
    Certificate,
    TrustRoots,
    check_issued_by,
    check_validity,
    load_certificate,
)
from attestation.crl import Crl, check_crl, load_crl
from attestation.disk_cache import DiskCache, default_cache_dir
from attestation.errors import AttestationError, CollateralError, NotGenuineError
from attestation.evidence import MAX_CRL_ON_WIRE, Evidence
from attestation.kds import Endorsement, KdsClient, cert_chain_url, crl_url, vcek_url, vlek_url
from attestation.pem import CERTIFICATE, CRL, read_der
from attestation.report import Product, Report, SigningKey, Tcb
from attestation.verify import verify_evidence

if TYPE_CHECKING:
    from attestation.providers.certificate_table import OfferedCertificates

logger = logging.getLogger(__name__)

CRL_REFRESH = timedelta(hours=24)
"""AMD's lists are good for months; a revocation should be known sooner."""

RETRY_AFTER = timedelta(minutes=5)
"""After a failure nothing is asked for this long."""

_MAX_CHAIN_SIZE = 2 * 2 * MAX_CERTIFICATE_SIZE  # two certificates in PEM
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Collateral:
    """Everything that verifies a report, in DER. ``vek`` is the VCEK or VLEK, ``ask`` its issuer."""

    vek: bytes = field(repr=False)
    ask: bytes = field(repr=False)
    ark: bytes = field(repr=False)
    crl: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Chip:
    """What a VEK is about; a change of patch level under a running guest needs another one."""

    product: Product
    endorsement: Endorsement
    chip_id: bytes
    tcb: Tcb


@dataclass(frozen=True, slots=True)
class _Chain:
    ask: Certificate
    ark: Certificate


@dataclass(frozen=True, slots=True)
class _Held:
    """Collateral in memory, useless once a part of it has ended. The list is renewed at ``refresh``."""

    chip: _Chip
    collateral: Collateral
    chain: _Chain
    certificates_expire: datetime
    crl_expires: datetime
    refresh: datetime

    def usable(self, chip: _Chip, now: datetime) -> bool:
        return self.chip == chip and now < min(self.certificates_expire, self.crl_expires)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="crl-refresh", daemon=True).start()


class KdsCollateral:
    """A ``CollateralSource``: the host's offer and the cache first, AMD's service for what is missing.

    A VEK is fetched once per product, chip and patch level; the revocation list is renewed daily, in
    the background. ``roots`` are the trusted ARKs, ``clock`` tells the time (timezone-aware),
    ``background`` runs a renewal. Thread-safe.

    Raises:
        CollateralError: the cache directory cannot be used.
    """

    def __init__(
        self,
        *,
        kds: KdsClient | None = None,
        cache: DiskCache | None = None,
        roots: TrustRoots = AMD_ROOTS,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        background: Callable[[Callable[[], None]], None] = _in_thread,
    ) -> None:
        self._kds = kds or KdsClient()
        self._cache = cache or DiskCache(default_cache_dir())
        self._roots, self._clock, self._background = roots, clock, background
        self._fetching, self._lock = threading.Lock(), threading.Lock()
        self._held: _Held | None = None
        self._refreshing = False
        self._failed: tuple[_Chip, datetime, CollateralError] | None = None

    def collateral(self, report: Report, offered: OfferedCertificates) -> Collateral:
        """See ``CollateralSource``. Returns at once unless chip or patch level are new.

        Raises:
            CollateralError: a part cannot be had from anywhere, or none that verifies.
        """
        chip, now = _chip(report), self._clock()
        held = self._held
        if held is None or not held.usable(chip, now):
            with self._fetching:
                held = self._held
                if held is None or not held.usable(chip, now):
                    held = self._complete(chip, report, offered, now)
        if now >= held.refresh:
            self._start_refresh(held, now)
        return held.collateral

    def _complete(self, chip: _Chip, report: Report, offered: OfferedCertificates, now: datetime) -> _Held:
        if self._failed is not None and self._failed[0] == chip and now < self._failed[1]:
            error = self._failed[2]
            raise CollateralError(error.message, remedy=error.remedy)
        try:
            chain = self._chain(chip, offered, now)
            vek = self._vek(chip, chain, report, offered, now)
            crl, renewed = self._crl(chip, chain, offered, now)
        except CollateralError as error:
            self._failed = (chip, now + RETRY_AFTER, error)
            raise
        self._failed = None
        ends = [certificate.x509.not_valid_after_utc for certificate in (vek, chain.ask, chain.ark)]
        self._held = _Held(
            chip=chip,
            collateral=Collateral(vek.der, chain.ask.der, chain.ark.der, crl.der),
            chain=chain,
            certificates_expire=min(ends),
            crl_expires=crl.expires,
            refresh=renewed + CRL_REFRESH,
        )
        return self._held

    def _chain(self, chip: _Chip, offered: OfferedCertificates, now: datetime) -> _Chain:
        def verified(ask: bytes, ark: bytes) -> _Chain:
            chain = _Chain(load_certificate(ask, "ASK"), load_certificate(ark, "ARK"))
            if self._roots.pins.get(chain.ark.sha256) is not chip.product:
                raise NotGenuineError(f"The root certificate is not AMD's for {chip.product.value}.")
            for certificate in (chain.ark, chain.ask):
                check_validity(certificate, now)
                check_issued_by(certificate, chain.ark)
            return chain

        def from_pem(data: bytes) -> _Chain:
            parts = read_der(data, CERTIFICATE, "certificate chain")
            if len(parts) != 2:
                raise NotGenuineError("The certificate chain does not have two certificates.")
            return verified(*parts)

        ask, ark = offered.ask, offered.ark
        if ask is not None and ark is not None:
            chain = _accept(lambda: verified(ask, ark), "chain that the host offers")
            if chain is not None:
                return chain
        return self._obtain(
            cert_chain_url(chip.product, chip.endorsement),
            _MAX_CHAIN_SIZE,
            from_pem,
            "certificate chain",
            now,
        )

    def _vek(
        self, chip: _Chip, chain: _Chain, report: Report, offered: OfferedCertificates, now: datetime
    ) -> Certificate:
        name = chip.endorsement.name

        def verified(data: bytes) -> Certificate:
            der = _one(data, CERTIFICATE, name)
            evidence = Evidence(report.raw, der, chain.ask.der, chain.ark.der)
            verify_evidence(evidence, roots=self._roots, at=now)
            return load_certificate(der, name)

        vlek = chip.endorsement is Endorsement.VLEK
        candidate = offered.vlek if vlek else offered.vcek
        if candidate is not None:
            vek = _accept(lambda: verified(candidate), f"{name} that the host offers")
            if vek is not None:
                return vek
        if not vlek and not any(chip.chip_id):
            raise CollateralError(
                "The host hides which chip it is (CHIP_ID is zero), so that its VCEK cannot be fetched.",
                remedy="Only the owner of the host can change that, with SNP_CONFIG.",
            )
        url = vlek_url(chip.product, chip.tcb) if vlek else vcek_url(chip.product, chip.chip_id, chip.tcb)
        return self._obtain(url, MAX_CERTIFICATE_SIZE, verified, name, now)

    def _crl(
        self, chip: _Chip, chain: _Chain, offered: OfferedCertificates, now: datetime
    ) -> tuple[Crl, datetime]:
        """The newest list, and when it was had.

        The host's is a last resort: it may be holding back a newer one.
        """

        def verified(data: bytes) -> Crl:
            return _verified_crl(data, chain, now)

        url = crl_url(chip.product, chip.endorsement)
        cached = self._cache.load(url, limit=MAX_CRL_ON_WIRE)
        known = None if cached is None else _accept(lambda: verified(cached.data), "cached revocation list")
        if cached is not None and known is not None and timedelta(0) <= now - cached.stored < CRL_REFRESH:
            return known, cached.stored
        try:
            return self._fetch_crl(url, verified, known, now), now
        except CollateralError as error:
            last = known
            if last is None and offered.crl is not None:
                last = _accept(lambda: verified(offered.crl or b""), "revocation list that the host offers")
            if last is None:
                raise
            logger.warning("Using the revocation list of %s: %s", last.issued, error.message)
            return last, now - CRL_REFRESH + RETRY_AFTER

    def _fetch_crl(self, url: str, verified: Callable[[bytes], Crl], known: Crl | None, now: datetime) -> Crl:
        crl = _from_amd(lambda: verified(self._kds.get(url, limit=MAX_CRL_ON_WIRE)), "revocation list")
        if known is not None and crl.issued < known.issued:
            raise CollateralError("AMD's key service answered with an older revocation list than before.")
        self._cache.store(url, crl.der, now)
        return crl

    def _start_refresh(self, held: _Held, now: datetime) -> None:
        with self._lock:
            if self._refreshing:
                return
            self._refreshing = True

        def refresh() -> None:
            try:
                with self._fetching:
                    if self._held is held:
                        self._held = self._refreshed(held, now)
            finally:
                self._refreshing = False

        self._background(refresh)

    def _refreshed(self, held: _Held, now: datetime) -> _Held:
        """``held`` with the current list, or with the old one and a date for the next attempt."""
        known = load_crl(held.collateral.crl)
        url = crl_url(held.chip.product, held.chip.endorsement)
        try:
            crl = self._fetch_crl(url, lambda data: _verified_crl(data, held.chain, now), known, now)
        except AttestationError as error:
            logger.warning("Could not renew the revocation list: %s", error.message)
            return replace(held, refresh=now + RETRY_AFTER)
        return replace(
            held,
            collateral=replace(held.collateral, crl=crl.der),
            crl_expires=crl.expires,
            refresh=now + CRL_REFRESH,
        )

    def _obtain(self, url: str, limit: int, verified: Callable[[bytes], _T], what: str, now: datetime) -> _T:
        """From the cache, otherwise from AMD and into the cache. Only what verifies is kept."""
        cached = self._cache.load(url, limit=limit)
        if cached is not None:
            value = _accept(lambda: verified(cached.data), f"cached {what}")
            if value is not None:
                return value
        data = self._kds.get(url, limit=limit)
        value = _from_amd(lambda: verified(data), what)
        self._cache.store(url, data, now)
        return value


def _chip(report: Report) -> _Chip:
    if report.product is None:
        raise CollateralError(
            f"The report (version {report.version}) does not say which processor signed it.",
            remedy="Update the host's firmware: reports of version 3 and later do.",
        )
    try:
        endorsement = {SigningKey.VCEK: Endorsement.VCEK, SigningKey.VLEK: Endorsement.VLEK}[
            SigningKey(report.signing_key)
        ]
        tcb = Tcb.decode(report.reported_tcb, report.product)
    except (KeyError, ValueError, AttestationError):
        raise CollateralError("The report names no signing key or patch level that is known.") from None
    return _Chip(report.product, endorsement, report.chip_id, tcb)


def _verified_crl(data: bytes, chain: _Chain, now: datetime) -> Crl:
    crl = load_crl(_one(data, CRL, "revocation list"))
    check_crl(crl, chain.ark, (chain.ark, chain.ask), now)
    return crl


def _one(data: bytes, label: str, what: str) -> bytes:
    objects = read_der(data, label, what)
    if len(objects) != 1:
        raise NotGenuineError(f"The {what} is not one object but {len(objects)}.")
    return objects[0]


def _accept(verified: Callable[[], _T], what: str) -> _T | None:
    """The value, or None with a warning if it does not verify and another source must do."""
    try:
        return verified()
    except AttestationError as error:
        logger.warning("Not using the %s: %s", what, error.message)
        return None


def _from_amd(verified: Callable[[], _T], what: str) -> _T:
    try:
        return verified()
    except CollateralError:
        raise
    except AttestationError as error:
        raise CollateralError(
            f"AMD's key service answered with a {what} that does not verify. {error.message}",
            remedy="Check this machine's clock, and whether something between here and AMD answers instead.",
        ) from None
