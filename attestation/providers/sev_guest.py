"""Reports through ``/dev/sev-guest``, for kernels without configfs-tsm.

Sources: Linux, include/uapi/linux/sev-guest.h and Documentation/virt/coco/sev-guest.rst; AMD
publication 56860, tables MSG_REPORT_REQ and MSG_REPORT_RSP.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from attestation.errors import EvidenceBusyError, EvidenceUnavailableError
from attestation.providers.base import SignedReport
from attestation.report import REPORT_SIZE

logger = logging.getLogger(__name__)

DEVICE = Path("/dev/sev-guest")

VMPL = 0
ATTEMPTS = 4
_FIRST_DELAY_S = 0.5

PAGE_SIZE = 4096
MAX_CERTS_SIZE = 4 * PAGE_SIZE
"""SEV_FW_BLOB_MAX_SIZE: the driver refuses a larger buffer."""

VMM_ERR_INVALID_LEN = 1
VMM_ERR_BUSY = 2
_BUSY = frozenset({errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})

_RESPONSE_SIZE = 4000
_RESPONSE_HEAD = 0x20
_MESSAGE_VERSION = 1


class SnpReportReq(ctypes.Structure):
    """struct snp_report_req"""

    _fields_ = (
        ("user_data", ctypes.c_uint8 * 64),
        ("vmpl", ctypes.c_uint32),
        ("rsvd", ctypes.c_uint8 * 28),
    )


class SnpExtReportReq(ctypes.Structure):
    """struct snp_ext_report_req"""

    _fields_ = (
        ("data", SnpReportReq),
        ("certs_address", ctypes.c_uint64),
        ("certs_len", ctypes.c_uint32),
    )


class SnpGuestRequestIoctl(ctypes.Structure):
    """struct snp_guest_request_ioctl, with the two halves of exitinfo2."""

    _fields_ = (
        ("msg_version", ctypes.c_uint8),
        ("req_data", ctypes.c_uint64),
        ("resp_data", ctypes.c_uint64),
        ("fw_error", ctypes.c_uint32),
        ("vmm_error", ctypes.c_uint32),
    )


class SnpReportResp(ctypes.Structure):
    """struct snp_report_resp, whose data is MSG_REPORT_RSP."""

    _fields_ = (("data", ctypes.c_uint8 * _RESPONSE_SIZE),)


def _iowr(number: int) -> int:
    """_IOWR('S', number, struct snp_guest_request_ioctl) on x86."""
    return 3 << 30 | ctypes.sizeof(SnpGuestRequestIoctl) << 16 | ord("S") << 8 | number


SNP_GET_REPORT = _iowr(0)
SNP_GET_EXT_REPORT = _iowr(2)

Ioctl: TypeAlias = Callable[[int, int, SnpGuestRequestIoctl], int]
"""(descriptor, request, argument) to 0 or an errno. The argument is updated either way."""


def libc_ioctl(descriptor: int, request: int, argument: SnpGuestRequestIoctl) -> int:
    """ioctl(2). ``fcntl.ioctl`` does not promise to give back what a failed request wrote."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
    result: int = libc.ioctl(descriptor, request, ctypes.byref(argument))
    return ctypes.get_errno() if result < 0 else 0


@dataclass(frozen=True, slots=True)
class _Answer:
    """How one request ended. ``needed`` is the size of the certificate buffer the host asks for."""

    errno: int
    fw_error: int
    vmm_error: int
    response: bytes
    certificates: bytes
    needed: int

    @property
    def busy(self) -> bool:
        return self.errno in _BUSY or (self.errno != 0 and self.vmm_error == VMM_ERR_BUSY)

    @property
    def too_small(self) -> bool:
        return self.errno == errno.EIO and self.vmm_error == VMM_ERR_INVALID_LEN


class SevGuest:
    """A ``ReportSource`` over the device.

    ``certs_size`` is the first size of the certificate buffer, whole pages up to 16 KiB.
    """

    def __init__(
        self,
        device: Path = DEVICE,
        *,
        ioctl: Ioctl = libc_ioctl,
        certs_size: int = MAX_CERTS_SIZE,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < certs_size <= MAX_CERTS_SIZE or certs_size % PAGE_SIZE:
            raise ValueError(f"certs_size must be whole pages, up to {MAX_CERTS_SIZE} bytes.")
        self._device, self._ioctl, self._certs_size, self._sleep = device, ioctl, certs_size, sleep

    def signed_report(self, report_data: bytes) -> SignedReport:
        """See ``ReportSource``. A busy platform is asked up to 4 times within 4 seconds.

        If the host has more certificates than the driver can pass on, the report comes without any.
        """
        with self._opened() as descriptor:
            answer = self._patiently(lambda: self._extended(descriptor, report_data, self._certs_size))
            if answer.too_small and self._certs_size < answer.needed <= MAX_CERTS_SIZE:
                size = -(-answer.needed // PAGE_SIZE) * PAGE_SIZE
                answer = self._patiently(lambda: self._extended(descriptor, report_data, size))
            if answer.too_small:
                logger.warning("The host has %d bytes of certificates; taking none.", answer.needed)
                answer = self._patiently(lambda: self._plain(descriptor, report_data))
            if answer.errno:
                raise self._failure(answer)
        return SignedReport(_report(answer.response), answer.certificates)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            descriptor = os.open(self._device, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EvidenceUnavailableError(
                f"Cannot open {self._device} ({error.strerror}).",
                remedy="Load the module sev_guest inside an SNP guest, and let the service's user open it.",
            ) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _patiently(self, request: Callable[[], _Answer]) -> _Answer:
        for attempt in range(ATTEMPTS):
            if attempt:
                self._sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))
            if not (answer := request()).busy:
                return answer
        raise EvidenceBusyError(f"{self._device} stayed busy through {ATTEMPTS} requests.")

    def _extended(self, descriptor: int, report_data: bytes, certs_size: int) -> _Answer:
        certificates = ctypes.create_string_buffer(certs_size)
        request = SnpExtReportReq(
            _report_request(report_data), ctypes.addressof(certificates), ctypes.sizeof(certificates)
        )
        return self._call(descriptor, SNP_GET_EXT_REPORT, request, certificates)

    def _plain(self, descriptor: int, report_data: bytes) -> _Answer:
        return self._call(descriptor, SNP_GET_REPORT, _report_request(report_data), None)

    def _call(
        self,
        descriptor: int,
        number: int,
        request: SnpReportReq | SnpExtReportReq,
        certificates: ctypes.Array[ctypes.c_char] | None,
    ) -> _Answer:
        response = SnpReportResp()
        argument = SnpGuestRequestIoctl(
            _MESSAGE_VERSION, ctypes.addressof(request), ctypes.addressof(response), 0, 0
        )
        error = self._ioctl(descriptor, number, argument)
        return _Answer(
            errno=error,
            fw_error=argument.fw_error,
            vmm_error=argument.vmm_error,
            response=bytes(response.data),
            certificates=b"" if certificates is None else certificates.raw,
            needed=request.certs_len if isinstance(request, SnpExtReportReq) else 0,
        )

    def _failure(self, answer: _Answer) -> EvidenceUnavailableError:
        remedies = {
            errno.ENOTTY: "The driver has given up its key to the firmware; only a restart of the VM helps.",
            errno.EINVAL: f"The guest may run at a lesser privilege than VMPL {VMPL}; policies require that.",
        }
        return EvidenceUnavailableError(
            f"{self._device} gave no report ({os.strerror(answer.errno)}; firmware error "
            f"{answer.fw_error:#x}, hypervisor error {answer.vmm_error:#x}).",
            remedy=remedies.get(answer.errno, "See the kernel's log for the driver's own message."),
        )


def _report_request(report_data: bytes) -> SnpReportReq:
    if len(report_data) != 64:
        raise EvidenceUnavailableError(f"REPORT_DATA has 64 bytes, not {len(report_data)}.")
    return SnpReportReq((ctypes.c_uint8 * 64)(*report_data), VMPL)


def _report(response: bytes) -> bytes:
    """The report inside MSG_REPORT_RSP: status, size, 24 reserved bytes, report."""
    status, size = (int.from_bytes(response[at : at + 4], "little") for at in (0, 4))
    if status:
        raise EvidenceUnavailableError(
            f"The firmware refused to sign a report (status {status:#x}).",
            remedy=f"0x16 means that this guest may not ask for VMPL {VMPL}, 0x27 that a key is missing.",
        )
    if size != REPORT_SIZE:
        raise EvidenceUnavailableError(
            f"The report has {size} bytes, not {REPORT_SIZE}.",
            remedy="The firmware may be newer than this software.",
        )
    return response[_RESPONSE_HEAD : _RESPONSE_HEAD + size]
