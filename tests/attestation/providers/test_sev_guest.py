"""/dev/sev-guest through a shim that works on the structures in memory as the driver does."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import pytest

from attestation.errors import EvidenceBusyError, EvidenceUnavailableError
from attestation.providers import sev_guest
from attestation.providers.sev_guest import (
    ATTEMPTS,
    SNP_GET_EXT_REPORT,
    SNP_GET_REPORT,
    SevGuest,
    SnpExtReportReq,
    SnpGuestRequestIoctl,
    SnpReportReq,
    SnpReportResp,
)
from attestation.report import parse_report

DATA = bytes(range(64))
BUSY = (errno.EIO, 0, 2)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "sev-guest"
    path.touch()
    return path


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def source(device: Path, driver: Any, waits: list[float]) -> SevGuest:
    return SevGuest(device, ioctl=driver, sleep=waits.append)


def test_layouts_are_those_of_the_kernel_header() -> None:
    """Values printed by a C program over include/uapi/linux/sev-guest.h on x86-64."""
    assert (SNP_GET_REPORT, SNP_GET_EXT_REPORT) == (0xC0205300, 0xC0205302)
    sizes = [
        ctypes.sizeof(kind) for kind in (SnpGuestRequestIoctl, SnpReportReq, SnpReportResp, SnpExtReportReq)
    ]
    assert sizes == [32, 96, 4000, 112]
    assert SnpGuestRequestIoctl.req_data.offset == 8
    assert SnpGuestRequestIoctl.fw_error.offset == 24
    assert SnpGuestRequestIoctl.vmm_error.offset == 28
    assert SnpExtReportReq.certs_address.offset == 96
    assert SnpExtReportReq.certs_len.offset == 104


def test_a_report_and_its_table(source: SevGuest, driver: Any) -> None:
    driver.certificates = b"table of the host"
    signed = source.signed_report(DATA)
    assert parse_report(signed.report).report_data == DATA
    assert signed.certificate_table.rstrip(b"\0") == b"table of the host"
    assert driver.calls == [SNP_GET_EXT_REPORT]


def test_a_buffer_that_is_too_small_grows(device: Path, driver: Any) -> None:
    driver.certificates = b"c" * 9000
    signed = SevGuest(device, ioctl=driver, certs_size=4096).signed_report(DATA)
    assert signed.certificate_table.rstrip(b"\0") == driver.certificates
    assert driver.calls == [SNP_GET_EXT_REPORT] * 2


def test_a_table_beyond_the_drivers_limit_is_left_out(source: SevGuest, driver: Any) -> None:
    driver.certificates = b"c" * 20000
    signed = source.signed_report(DATA)
    assert parse_report(signed.report).report_data == DATA
    assert signed.certificate_table == b""
    assert driver.calls == [SNP_GET_EXT_REPORT, SNP_GET_REPORT]


def test_a_host_that_asks_for_more_each_time_is_not_followed(device: Path, driver: Any) -> None:
    def greedy(argument: SnpGuestRequestIoctl) -> int:
        request = SnpExtReportReq.from_address(argument.req_data)
        request.certs_len += 4096
        argument.vmm_error = 1
        return errno.EIO

    driver._extended = greedy
    signed = SevGuest(device, ioctl=driver, certs_size=4096).signed_report(DATA)
    assert driver.calls == [SNP_GET_EXT_REPORT, SNP_GET_EXT_REPORT, SNP_GET_REPORT]
    assert signed.certificate_table == b""


@pytest.mark.parametrize(
    "busy", [BUSY, (errno.EAGAIN, 0, 0), (errno.EBUSY, 0, 0), (errno.EINTR, 0, 0), (errno.ETIMEDOUT, 0, 0)]
)
def test_a_busy_platform_is_asked_again(
    source: SevGuest, driver: Any, waits: list[float], busy: tuple[int, int, int]
) -> None:
    driver.failures = [busy, busy]
    assert parse_report(source.signed_report(DATA).report).report_data == DATA
    assert waits == [0.5, 1.0]
    driver.failures = [busy] * 100
    with pytest.raises(EvidenceBusyError, match="busy"):
        source.signed_report(DATA)
    assert len(driver.failures) == 100 - ATTEMPTS


def test_busy_while_the_buffer_grows_and_while_the_table_is_left_out(device: Path, driver: Any) -> None:
    driver.certificates = b"c" * 20000
    driver.failures = [BUSY, None, BUSY, None]
    SevGuest(device, ioctl=driver, certs_size=4096, sleep=lambda _: None).signed_report(DATA)
    assert driver.calls == [SNP_GET_EXT_REPORT] * 2 + [SNP_GET_REPORT] * 2


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ((errno.EIO, 0x16, 0), "firmware error 0x16"),
        ((errno.EIO, 0, 7), "hypervisor error 0x7"),
        ((errno.ENOTTY, 0, 0), "restart of the VM"),
        ((errno.EINVAL, 0, 0), "VMPL 0"),
        ((errno.EFAULT, 0xFF, 0), "kernel's log"),
        ((errno.EPERM, 0, 0), "Operation not permitted"),
    ],
)
def test_failures_say_what_and_what_to_do(
    source: SevGuest, driver: Any, failure: tuple[int, int, int], words: str
) -> None:
    driver.failures = [failure]
    with pytest.raises(EvidenceUnavailableError) as caught:
        source.signed_report(DATA)
    assert words in str(caught.value)
    assert not isinstance(caught.value, EvidenceBusyError)
    assert len(driver.calls) == 1


def test_an_error_of_a_request_that_succeeded_is_ignored(source: SevGuest, driver: Any) -> None:
    """The driver copies exitinfo2 back on failure only."""
    driver.failures = [(0, 0, 2)]
    with pytest.raises(EvidenceUnavailableError, match="has 0 bytes"):
        source.signed_report(DATA)  # the shim succeeded without an answer


@pytest.mark.parametrize("status", [0x16, 0x27, 1])
def test_a_status_of_the_firmware_is_an_error(source: SevGuest, driver: Any, status: int) -> None:
    driver.status = status
    with pytest.raises(EvidenceUnavailableError, match=f"status {status:#x}"):
        source.signed_report(DATA)


@pytest.mark.parametrize("size", [0, 1183, 1185, 4000, 0xFFFFFFFF])
def test_an_answer_of_another_size_is_refused(source: SevGuest, driver: Any, size: int) -> None:
    driver.report_size = size
    with pytest.raises(EvidenceUnavailableError, match="1184"):
        source.signed_report(DATA)


@pytest.mark.parametrize("size", [0, 4095, 4097, 20480, -4096])
def test_the_buffer_is_whole_pages(device: Path, size: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        SevGuest(device, certs_size=size)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_report_data_has_64_bytes(source: SevGuest, length: int) -> None:
    with pytest.raises(EvidenceUnavailableError, match="64 bytes"):
        source.signed_report(bytes(length))


def test_the_device_is_closed(source: SevGuest, driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = [], []
    real_open, real_close = sev_guest.os.open, sev_guest.os.close
    monkeypatch.setattr(sev_guest.os, "open", lambda *a: opened.append(real_open(*a)) or opened[-1])
    monkeypatch.setattr(sev_guest.os, "close", lambda d: closed.append(d) or real_close(d))
    source.signed_report(DATA)
    driver.failures = [(errno.EIO, 1, 0)]
    with pytest.raises(EvidenceUnavailableError):
        source.signed_report(DATA)
    assert len(opened) == 2
    assert opened == closed


def test_a_machine_without_the_device(tmp_path: Path) -> None:
    with pytest.raises(EvidenceUnavailableError, match="No such file"):
        SevGuest(tmp_path / "absent").signed_report(DATA)


def test_the_real_ioctl_on_a_device_that_is_another() -> None:
    with pytest.raises(EvidenceUnavailableError, match="Inappropriate ioctl"):
        SevGuest(Path("/dev/null")).signed_report(DATA)
