"""Reports through the kernel's configfs-tsm, ``/sys/kernel/config/tsm/report`` (Linux 6.7 and later).

Source: Linux, Documentation/ABI/testing/configfs-tsm-report. A directory that a process makes below
the root is a request of its own: it writes ``inblob``, reads ``outblob`` (the report) and ``auxblob``
(the certificate table), and removes the directory. Every write advances ``generation``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from attestation.errors import EvidenceBusyError, EvidenceUnavailableError
from attestation.providers.base import SignedReport
from attestation.providers.certificate_table import MAX_TABLE_SIZE
from attestation.report import REPORT_SIZE

logger = logging.getLogger(__name__)

REPORT_ROOT = Path("/sys/kernel/config/tsm/report")

PROVIDER = "sev_guest"
"""What ``provider`` says in an SEV-SNP guest; TDX says ``tdx_guest``."""

VMPL = 0
"""The level the report is asked for: the one where the service runs and that policies require."""

ATTEMPTS = 5
_FIRST_DELAY_S = 0.1
_MAX_TEXT = 256
_BUSY = frozenset({errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})


class _RetryError(Exception):
    """This request came to nothing; a new one may succeed."""


class Configfs:
    """The four operations of a request, on a mounted configfs."""

    def mkdir(self, path: Path) -> None:
        """Make a request."""
        path.mkdir(mode=0o700)

    def rmdir(self, path: Path) -> None:
        """Remove a request; its attributes go with it."""
        path.rmdir()

    def write(self, path: Path, data: bytes) -> None:
        """Write an attribute, at once."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
        if written != len(data):
            raise OSError(errno.EIO, "short write")

    def read(self, path: Path, limit: int) -> bytes:
        """An attribute of at most ``limit`` bytes; one byte more if it is longer."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = b""
            while len(data) <= limit and (chunk := os.read(descriptor, limit + 1 - len(data))):
                data += chunk
        finally:
            os.close(descriptor)
        return data


class ConfigfsTsm:
    """A ``ReportSource``. Every request has a directory of its own, removed on every path.

    ``root`` is where the reports' configfs is mounted, ``configfs`` how it is accessed, ``sleep``
    what waits between attempts.
    """

    def __init__(
        self,
        root: Path = REPORT_ROOT,
        *,
        configfs: Configfs | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root = root
        self._configfs = configfs or Configfs()
        self._sleep = sleep

    def signed_report(self, report_data: bytes) -> SignedReport:
        """See ``ReportSource``: up to 5 attempts within 2 seconds, each in a new directory."""
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))
            try:
                return self._request(report_data)
            except _RetryError as error:
                reason = str(error)
        raise EvidenceBusyError(f"No report from {self._root} in {ATTEMPTS} attempts: {reason}.")

    def _request(self, report_data: bytes) -> SignedReport:
        with self._directory() as directory:
            provider = self._text(directory / "provider")
            if provider != PROVIDER:
                raise EvidenceUnavailableError(
                    f"{self._root} is served by {provider!r}, not by {PROVIDER!r}.",
                    remedy="This is not an SEV-SNP guest; other kinds of confidential VMs are not supported.",
                )
            start = self._generation(directory)
            self._set_level(directory)
            self._write(directory / "inblob", report_data)
            # The kernel swallows a failure to take inblob (it is stored when the file is closed), so that
            # the count also shows whether our own writes arrived.
            written = self._generation(directory)
            if written != start + 2:
                raise _RetryError("the request was not taken as it was written")
            report = self._read(directory / "outblob", REPORT_SIZE)
            if len(report) != REPORT_SIZE:
                raise EvidenceUnavailableError(
                    f"The report does not have {REPORT_SIZE} bytes, as SEV-SNP's have.",
                    remedy="The firmware or kernel may be newer than this software.",
                )
            table = self._table(directory)
            if self._generation(directory) != written:
                raise _RetryError("another process changed the request while it was answered")
            return SignedReport(report, table)

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        path = self._root / f"gelo-{os.getpid()}-{secrets.token_hex(8)}"
        with self._errors("make a request in", self._root):
            self._configfs.mkdir(path)
        try:
            yield path
        finally:
            try:
                self._configfs.rmdir(path)
            except OSError as error:
                logger.warning("Could not remove %s (%s).", path, error.strerror)

    def _set_level(self, directory: Path) -> None:
        try:
            self._configfs.write(directory / "privlevel", str(VMPL).encode())
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise EvidenceUnavailableError(
                    f"This guest runs at a lesser privilege than VMPL {VMPL}, under an SVSM or paravisor.",
                    remedy="Launch it without one: policies accept reports of VMPL 0 only.",
                ) from None
            raise self._translated(error, "write", directory / "privlevel") from None

    def _table(self, directory: Path) -> bytes:
        try:
            table = self._configfs.read(directory / "auxblob", MAX_TABLE_SIZE)
        except FileNotFoundError:
            return b""  # the attribute is optional
        except OSError as error:
            raise self._translated(error, "read", directory / "auxblob") from None
        if len(table) > MAX_TABLE_SIZE:
            logger.warning(
                "Ignoring the certificates that the host offers: more than %d bytes.", MAX_TABLE_SIZE
            )
            return b""
        return table

    def _generation(self, directory: Path) -> int:
        text = self._text(directory / "generation")
        if not (text.isascii() and text.isdigit()):
            raise EvidenceUnavailableError(f"The generation of a request is not a number: {text[:32]!r}.")
        return int(text)

    def _text(self, path: Path) -> str:
        return self._read(path, _MAX_TEXT).decode("ascii", "replace").strip()

    def _read(self, path: Path, limit: int) -> bytes:
        with self._errors("read", path):
            return self._configfs.read(path, limit)

    def _write(self, path: Path, data: bytes) -> None:
        with self._errors("write", path):
            self._configfs.write(path, data)

    @contextlib.contextmanager
    def _errors(self, doing: str, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translated(error, doing, path) from None

    def _translated(self, error: OSError, doing: str, path: Path) -> Exception:
        if error.errno in _BUSY:
            return _RetryError(f"{os.strerror(error.errno or 0)} at {path.name}")
        remedies = {
            errno.ENOENT: "In an SNP guest, mount configfs and load the modules tsm_report and sev_guest.",
            errno.EACCES: "Run the service as a user that may make directories there.",
            errno.EPERM: "Run the service as a user that may make directories there.",
            errno.ENXIO: "Load the module sev_guest: configfs-tsm has no provider.",
            errno.ENOTTY: "The driver has given up its key to the firmware; only a restart of the VM helps.",
        }
        return EvidenceUnavailableError(
            f"Cannot {doing} {path} ({error.strerror}).",
            remedy=remedies.get(error.errno or 0, "See the kernel's log for the driver's own message."),
        )
