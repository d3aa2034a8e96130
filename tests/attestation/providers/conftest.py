"""Stand-ins for the kernel: a directory tree that behaves as configfs, and an ioctl shim."""

from __future__ import annotations

import ctypes
import errno
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from attestation.providers.configfs_tsm import Configfs
from attestation.providers.sev_guest import (
    SNP_GET_EXT_REPORT,
    SNP_GET_REPORT,
    SnpExtReportReq,
    SnpGuestRequestIoctl,
    SnpReportReq,
)
from attestation.simulated import SimulatedPsp

ATTRIBUTES = ("provider", "generation", "privlevel", "privlevel_floor", "inblob", "outblob", "auxblob")


def make_table(objects: dict[uuid.UUID, bytes]) -> bytes:
    """A certificate table as a well-behaved host lays it out."""
    offset = 24 * (len(objects) + 1)
    head, body = b"", b""
    for guid, data in objects.items():
        head += struct.pack("<16sII", guid.bytes_le, offset + len(body), len(data))
        body += data
    return head + bytes(24) + body


@pytest.fixture(scope="session")
def table() -> Callable[[dict[uuid.UUID, bytes]], bytes]:
    """See ``make_table``."""
    return make_table


@dataclass
class _Item:
    inblob: bytes = b""
    written: int = 0
    read: int = 0
    blobs: tuple[bytes, bytes] | None = None


@dataclass
class FakeConfigfs(Configfs):
    """Follows drivers/virt/coco/guest/report.c and sev_report_new() on real files below ``root``.

    ``sign`` answers with a report and a certificate table. ``before`` is called with the operation and
    the attribute's name and may raise an OSError or interfere.
    """

    root: Path
    sign: Callable[[bytes], tuple[bytes, bytes]]
    provider: str = "sev_guest"
    floor: int = 0
    hidden: tuple[str, ...] = ()
    before: Callable[[str, Path], None] = lambda operation, path: None
    items: dict[Path, _Item] = field(default_factory=dict)
    made: list[Path] = field(default_factory=list)

    def mkdir(self, path: Path) -> None:
        self.before("mkdir", path)
        if path.parent != self.root:
            raise OSError(errno.EPERM, "Operation not permitted")
        super().mkdir(path)
        self.items[path] = _Item()
        self.made.append(path)
        for name in ATTRIBUTES:
            if name not in self.hidden:
                (path / name).touch()
        (path / "provider").write_text(self.provider + "\n")
        (path / "privlevel_floor").write_text(f"{self.floor}\n")
        self._count(path)

    def rmdir(self, path: Path) -> None:
        self.before("rmdir", path)
        for attribute in path.iterdir():
            attribute.unlink()
        super().rmdir(path)
        del self.items[path]

    def write(self, path: Path, data: bytes) -> None:
        self.before("write", path)
        super().write(path, data)
        item = self.items[path.parent]
        if path.name == "privlevel":
            if not self.floor <= int(data) <= 3:
                raise OSError(errno.EINVAL, "Invalid argument")
        elif path.name == "inblob":
            if len(data) > 64:
                return  # stored when the file is closed, where a failure is lost
            item.inblob = data
        else:
            raise OSError(errno.EACCES, "Permission denied")
        item.written += 1
        self._count(path.parent)

    def read(self, path: Path, limit: int) -> bytes:
        self.before("read", path)
        if path.name in ("outblob", "auxblob") and path.exists():
            path.write_bytes(self._blob(self.items[path.parent], path.name))
        return super().read(path, limit)

    def disturb(self, path: Path) -> None:
        """What another process of the same guest could do to a request."""
        self.items[path].written += 1
        self.items[path].inblob = b"\xee" * 64
        self._count(path)

    def _blob(self, item: _Item, name: str) -> bytes:
        if len(item.inblob) != 64:
            raise OSError(errno.EINVAL, "Invalid argument")
        if item.blobs is None or item.read != item.written:
            item.blobs = self.sign(item.inblob)
            item.read = item.written
        return item.blobs[name == "auxblob"]

    def _count(self, path: Path) -> None:
        (path / "generation").write_text(f"{self.items[path].written}\n")


@dataclass
class FakeDriver:
    """Follows get_report() and get_ext_report() of drivers/virt/coco/sev-guest/sev-guest.c.

    It reads and writes the caller's memory at the addresses in the argument, as the kernel does.
    ``failures`` are (errno, firmware error, hypervisor error), one per call, None for a success.
    """

    sign: Callable[[bytes], bytes]
    certificates: bytes = b""
    failures: list[tuple[int, int, int] | None] = field(default_factory=list)
    status: int = 0
    report_size: int | None = None
    calls: list[int] = field(default_factory=list)

    def __call__(self, descriptor: int, request: int, argument: SnpGuestRequestIoctl) -> int:
        self.calls.append(request)
        if not argument.msg_version or not argument.req_data or not argument.resp_data:
            return errno.EINVAL
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            error, argument.fw_error, argument.vmm_error = failure
            return error
        if request == SNP_GET_EXT_REPORT:
            return self._extended(argument)
        if request == SNP_GET_REPORT:
            self._respond(argument, SnpReportReq.from_address(argument.req_data))
            return 0
        return errno.ENOTTY

    def _extended(self, argument: SnpGuestRequestIoctl) -> int:
        request = SnpExtReportReq.from_address(argument.req_data)
        if request.certs_len > 0x4000 or request.certs_len % 4096:
            return errno.EINVAL
        if len(self.certificates) > request.certs_len:
            request.certs_len = -(-len(self.certificates) // 4096) * 4096
            argument.fw_error, argument.vmm_error = 0, 1
            return errno.EIO
        padded = self.certificates.ljust(request.certs_len, b"\0")
        ctypes.memmove(request.certs_address, padded, request.certs_len)
        self._respond(argument, request.data)
        return 0

    def _respond(self, argument: SnpGuestRequestIoctl, request: SnpReportReq) -> None:
        assert request.vmpl == 0
        assert not any(request.rsvd)
        report = self.sign(bytes(request.user_data))
        size = len(report) if self.report_size is None else self.report_size
        response = struct.pack("<II24x", self.status, size) + report
        ctypes.memmove(argument.resp_data, response.ljust(4000, b"\0"), 4000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the fake configfs is mounted."""
    path = tmp_path / "report"
    path.mkdir()
    return path


@pytest.fixture
def configfs(root: Path, psp: SimulatedPsp) -> FakeConfigfs:
    """A kernel with configfs-tsm on a machine whose PSP is simulated, with a host that offers nothing."""
    return FakeConfigfs(root, lambda data: (psp.evidence(data).report, b""))


@pytest.fixture
def driver(psp: SimulatedPsp) -> FakeDriver:
    """The driver of /dev/sev-guest on such a machine."""
    return FakeDriver(lambda data: psp.evidence(data).report)
