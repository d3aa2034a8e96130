"""Addresses of AMD's key service, and a client that is patient within bounds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest

from attestation import kds
from attestation.errors import CollateralError
from attestation.kds import ATTEMPTS, Endorsement, KdsClient, cert_chain_url, crl_url, vcek_url, vlek_url
from attestation.report import Product, Tcb, parse_report

DATA = Path(__file__).parent / "data"
NOW = datetime(2026, 3, 1, tzinfo=UTC)
URL = crl_url(Product.GENOA, Endorsement.VCEK)


class Clock:
    """Time that passes only by waiting."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


Handler = Callable[[httpx.Request], httpx.Response]


def client(clock: Clock, handler: Handler) -> KdsClient:
    return KdsClient(
        transport=httpx.MockTransport(handler),
        monotonic=lambda: clock.now,
        sleep=clock.sleep,
        clock=lambda: NOW,
    )


def answers(*responses: httpx.Response | Exception) -> tuple[Handler, list[httpx.Request]]:
    """A handler that gives one response after the other, the last one for ever."""
    left, seen = list(responses), []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        response = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(response, Exception):
            raise response
        # A body that streams, as one from the network does.
        return httpx.Response(
            response.status_code, headers=response.headers, content=iter([response.content])
        )

    return handle, seen


def test_addresses() -> None:
    chip = bytes(range(64))
    genoa = Tcb(None, 10, 0, 23, 84)
    assert vcek_url(Product.GENOA, chip, genoa) == (
        f"https://kdsintf.amd.com/vcek/v1/Genoa/{chip.hex()}?blSPL=10&teeSPL=00&snpSPL=23&ucodeSPL=84"
    )
    assert vcek_url(Product.TURIN, chip, Tcb(1, 2, 3, 4, 81)) == (
        "https://kdsintf.amd.com/vcek/v1/Turin/0001020304050607"
        "?fmcSPL=01&blSPL=02&teeSPL=03&snpSPL=04&ucodeSPL=81"
    )
    assert vlek_url(Product.MILAN, Tcb(None, 4, 0, 24, 219)) == (
        "https://kdsintf.amd.com/vlek/v1/Milan/cert?blSPL=04&teeSPL=00&snpSPL=24&ucodeSPL=219"
    )
    assert cert_chain_url(Product.TURIN, Endorsement.VLEK) == (
        "https://kdsintf.amd.com/vlek/v1/Turin/cert_chain"
    )
    assert crl_url(Product.MILAN, Endorsement.VCEK) == "https://kdsintf.amd.com/vcek/v1/Milan/crl"


def test_the_address_of_a_real_turin_report() -> None:
    report = parse_report((DATA / "turin_ms_report.bin").read_bytes())
    tcb = Tcb.decode(report.reported_tcb, Product.TURIN)
    url = vcek_url(Product.TURIN, report.chip_id, tcb)
    assert url.endswith("?fmcSPL=01&blSPL=01&teeSPL=01&snpSPL=04&ucodeSPL=81")
    assert url.split("/")[-1].index("?") == 16


def test_a_body_comes_back_as_sent(clock: Clock) -> None:
    handler, seen = answers(httpx.Response(200, content=b"der"))
    assert client(clock, handler).get(URL, limit=3) == b"der"
    assert str(seen[0].url) == URL
    assert seen[0].headers["accept-encoding"] == "identity"
    assert clock.waits == []


@pytest.mark.parametrize("length", [4, 5, 100_000])
def test_too_much_is_refused(clock: Clock, length: int) -> None:
    handler, seen = answers(httpx.Response(200, content=bytes(length)))
    with pytest.raises(CollateralError, match="more than 3 bytes"):
        client(clock, handler).get(URL, limit=3)
    assert len(seen) == 1


def test_an_endless_body_is_not_read_to_its_end(clock: Clock) -> None:
    sent = []

    def body():  # type: ignore[no-untyped-def]
        while True:
            sent.append(1)
            yield bytes(1000)

    with pytest.raises(CollateralError, match="more than 5000"):
        client(clock, lambda _: httpx.Response(200, content=body())).get(URL, limit=5000)
    assert len(sent) < 10


def test_a_slow_body_is_given_up(clock: Clock) -> None:
    def body():  # type: ignore[no-untyped-def]
        for _ in range(1000):
            clock.now += 5
            yield b"x"

    with pytest.raises(CollateralError, match="took more than 60 s"):
        client(clock, lambda _: httpx.Response(200, content=body())).get(URL, limit=5000)


def test_a_compressed_body_is_refused(clock: Clock) -> None:
    handler, _ = answers(httpx.Response(200, headers={"content-encoding": "gzip"}))
    with pytest.raises(CollateralError, match="answered 200"):
        client(clock, handler).get(URL, limit=5000)


@pytest.mark.parametrize("status", [204, 301, 302, 307, 400, 401, 403, 404, 407, 418])
def test_other_statuses_are_final(clock: Clock, status: int) -> None:
    handler, seen = answers(httpx.Response(status, headers={"location": "https://elsewhere.example/"}))
    with pytest.raises(CollateralError, match=str(status)) as caught:
        client(clock, handler).get(URL, limit=5000)
    assert caught.value.remedy
    assert len(seen) == 1


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_retry_after_in_seconds_is_respected(clock: Clock, status: int) -> None:
    handler, seen = answers(
        httpx.Response(status, headers={"retry-after": "17"}), httpx.Response(200, content=b"der")
    )
    assert client(clock, handler).get(URL, limit=3) == b"der"
    assert clock.waits == [17.0]
    assert len(seen) == 2


def test_retry_after_as_a_date_is_respected(clock: Clock) -> None:
    date = format_datetime(NOW + timedelta(seconds=20), usegmt=True)
    handler, _ = answers(
        httpx.Response(429, headers={"retry-after": date}), httpx.Response(200, content=b"der")
    )
    client(clock, handler).get(URL, limit=3)
    assert clock.waits == [20.0]


@pytest.mark.parametrize("value", ["soon", "-5", "", "1.5", "²", "Wed, 99 Foo 2026 00:00:00 GMT"])
def test_a_retry_after_that_makes_no_sense_is_ignored(clock: Clock, value: str) -> None:
    header = {"retry-after": value.encode("utf-8")}
    handler, _ = answers(httpx.Response(429, headers=header), httpx.Response(200, content=b"x"))
    client(clock, handler).get(URL, limit=3)
    assert clock.waits == [1.0]


def test_a_long_retry_after_ends_the_attempt_and_keeps_later_ones_away(clock: Clock) -> None:
    handler, seen = answers(
        httpx.Response(429, headers={"retry-after": "600"}), httpx.Response(200, content=b"der")
    )
    patient = client(clock, handler)
    for _ in range(3):
        with pytest.raises(CollateralError, match=r"another 600 s"):
            patient.get(URL, limit=3)
    assert len(seen) == 1
    assert clock.waits == []
    clock.now += 599
    assert patient.get(URL, limit=3) == b"der"
    assert clock.waits == [1.0]


def test_retry_after_is_capped_at_a_day(clock: Clock) -> None:
    handler, _ = answers(httpx.Response(503, headers={"retry-after": "9" * 40}), httpx.Response(200))
    patient = client(clock, handler)
    with pytest.raises(CollateralError, match="another 86400 s"):
        patient.get(URL, limit=3)
    clock.now += 86401
    assert patient.get(URL, limit=3) == b""


@pytest.mark.parametrize(
    "failure",
    [httpx.Response(503), httpx.ConnectError("no"), httpx.ReadTimeout("no"), httpx.ProxyError("no")],
)
def test_failures_are_retried_with_growing_delays_and_then_final(
    clock: Clock, failure: httpx.Response | Exception
) -> None:
    handler, seen = answers(failure)
    with pytest.raises(CollateralError, match=f"{ATTEMPTS} attempts") as caught:
        client(clock, handler).get(URL, limit=3)
    assert len(seen) == ATTEMPTS
    assert clock.waits == [1.0, 2.0, 4.0, 8.0]
    assert "HTTPS_PROXY" in caught.value.remedy
    assert sum(clock.waits) < kds.TOTAL_TIMEOUT_S


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that records what it is asked and refuses: no packet leaves this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def serve() -> None:
        for _ in range(ATTEMPTS):
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    for name in ("ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(CollateralError, match="ProxyError"):
        _get_fast()
    thread.join(5)
    listener.close()
    assert asked
    assert all(request.startswith(b"CONNECT kdsintf.amd.com:443 HTTP/1.1\r\n") for request in asked)


def _get_fast() -> bytes:
    clock = Clock()
    return KdsClient(sleep=clock.sleep, monotonic=lambda: clock.now).get(URL, limit=3)


def test_a_proxy_address_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://[broken")
    with pytest.raises(CollateralError):
        _get_fast()
