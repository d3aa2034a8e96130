"""AMD's Key Distribution Service: addresses, and a patient, bounded client.

Source: AMD publication 57230, "Versioned Chip Endorsement Key (VCEK) Certificate and KDS Interface
Specification", chapter on the KDS interface. What comes back is not judged here: ``collateral`` verifies it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from urllib.parse import urlsplit

import httpx

from attestation.errors import CollateralError
from attestation.report import Product, Tcb

logger = logging.getLogger(__name__)

KDS_URL = "https://kdsintf.amd.com"

TOTAL_TIMEOUT_S = 60.0
"""For one object, with all waiting and all attempts."""

ATTEMPTS = 5
_REQUEST_TIMEOUT = httpx.Timeout(10.0)
_FIRST_DELAY_S = 1.0
_MAX_RETRY_AFTER_S = 24 * 3600.0
_TRY_AGAIN = frozenset({429, 500, 502, 503, 504})


class Endorsement(Enum):
    """The two kinds of endorsement keys, as the service names them."""

    VCEK = "vcek"
    VLEK = "vlek"


def vcek_url(product: Product, chip_id: bytes, tcb: Tcb) -> str:
    """Where the VCEK of one chip at one patch level is. ``chip_id`` is CHIP_ID, all 64 bytes.

    Turin's chips have ids of 8 bytes, and patch levels that begin with the FMC's.
    """
    hardware_id = chip_id[:8] if product is Product.TURIN else chip_id
    return f"{KDS_URL}/vcek/v1/{product.value}/{hardware_id.hex()}?{_levels(tcb)}"


def vlek_url(product: Product, tcb: Tcb) -> str:
    """Where a VLEK is. AMD gives those to the cloud provider that owns them only."""
    return f"{KDS_URL}/vlek/v1/{product.value}/cert?{_levels(tcb)}"


def cert_chain_url(product: Product, endorsement: Endorsement) -> str:
    """Where the issuer (ASK or ASVK) and the ARK are, in PEM and this order."""
    return f"{KDS_URL}/{endorsement.value}/v1/{product.value}/cert_chain"


def crl_url(product: Product, endorsement: Endorsement) -> str:
    """Where the ARK's revocation list is, in DER."""
    return f"{KDS_URL}/{endorsement.value}/v1/{product.value}/crl"


def _levels(tcb: Tcb) -> str:
    levels = {"blSPL": tcb.bootloader, "teeSPL": tcb.tee, "snpSPL": tcb.snp, "ucodeSPL": tcb.microcode}
    if tcb.fmc is not None:
        levels = {"fmcSPL": tcb.fmc, **levels}
    return "&".join(f"{name}={level:02}" for name, level in levels.items())


class _AgainError(Exception):
    """This attempt failed in a way that may pass. ``delay`` is what the service asked to wait, seconds."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(reason)
        self.delay = delay


class KdsClient:
    """Fetches one object at a time, over TLS and through the proxy that HTTPS_PROXY names.

    A service that answers 429 or 503 with Retry-After is left alone for as long as it says, also by
    later calls. ``transport`` replaces the network, ``monotonic`` and ``sleep`` the clock (seconds),
    ``clock`` tells the time of day (timezone-aware). Not thread-safe.
    """

    def __init__(
        self,
        *,
        transport: httpx.BaseTransport | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._transport = transport
        self._monotonic, self._sleep, self._clock = monotonic, sleep, clock
        self._not_before = float("-inf")

    def get(self, url: str, *, limit: int) -> bytes:
        """The body at ``url``, at most ``limit`` bytes, within a minute.

        Raises:
            CollateralError: the service does not have it, cannot be reached, asks to wait for too
                long, or sends too much.
        """
        deadline = self._monotonic() + TOTAL_TIMEOUT_S
        reason = ""
        with httpx.Client(
            transport=self._transport,
            timeout=_REQUEST_TIMEOUT,
            follow_redirects=False,
            headers={"Accept-Encoding": "identity"},
        ) as client:
            for attempt in range(ATTEMPTS):
                self._wait_until(self._not_before, deadline, reason or "it asked to before")
                try:
                    return self._attempt(client, url, limit, deadline)
                except _AgainError as error:
                    reason = str(error)
                    delay = _FIRST_DELAY_S * 2**attempt if error.delay is None else error.delay
                    self._not_before = self._monotonic() + delay
                    logger.warning("AMD's key service: %s; waiting %.0f s.", reason, delay)
        raise CollateralError(
            f"AMD's key service gave no answer in {ATTEMPTS} attempts ({reason}).",
            remedy="Check the network, and HTTPS_PROXY if this machine needs a proxy.",
        )

    def _wait_until(self, moment: float, deadline: float, reason: str) -> None:
        delay = moment - self._monotonic()
        if delay <= 0:
            return
        if moment >= deadline:
            raise CollateralError(
                f"AMD's key service is not to be asked for another {delay:.0f} s ({reason}).",
                remedy="Wait that long, then try again.",
            )
        self._sleep(delay)

    def _attempt(self, client: httpx.Client, url: str, limit: int, deadline: float) -> bytes:
        try:
            with client.stream("GET", url) as response:
                self._check_status(response, url)
                body = bytearray()
                for chunk in response.iter_raw():
                    body += chunk
                    if len(body) > limit:
                        raise CollateralError(f"AMD's key service sent more than {limit} bytes for {url}.")
                    if self._monotonic() > deadline:
                        raise CollateralError(f"AMD's key service took more than {TOTAL_TIMEOUT_S:.0f} s.")
        except httpx.InvalidURL:
            raise CollateralError(
                "The proxy address is not a URL.", remedy="Correct HTTPS_PROXY or ALL_PROXY."
            ) from None
        except httpx.HTTPError as error:
            raise _AgainError(f"{type(error).__name__} at {urlsplit(url).hostname}") from None
        return bytes(body)

    def _check_status(self, response: httpx.Response, url: str) -> None:
        status = response.status_code
        if status in _TRY_AGAIN:
            raise _AgainError(f"status {status}", self._retry_after(response.headers.get("retry-after")))
        if status == 200 and response.headers.get("content-encoding", "identity") == "identity":
            return
        remedy = {
            400: "The chip id or patch levels of the report are not ones that AMD knows.",
            401: "AMD gives VLEKs to their owners only: the host must hand over the certificate.",
            403: "AMD gives VLEKs to their owners only: the host must hand over the certificate.",
            404: "AMD does not know this chip or patch level. Is the firmware a released one?",
        }.get(
            status, "Something between here and AMD may be answering instead, such as a proxy's login page."
        )
        raise CollateralError(f"AMD's key service answered {status} for {url}.", remedy=remedy)

    def _retry_after(self, value: str | None) -> float | None:
        """RFC 9110 section 10.2.3: seconds or a date. None if absent or neither."""
        if value is None:
            return None
        if value.isascii() and value.isdigit():
            return min(float(value[:9]), _MAX_RETRY_AFTER_S)
        try:
            moment = parsedate_to_datetime(value)
        except ValueError:
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return min(max((moment - self._clock()).total_seconds(), 0.0), _MAX_RETRY_AFTER_S)
