"""Public objects on disk, found by their address and named by their hash.

The hashes catch damage. They do not stop whoever can write to the disk, which in a confidential VM
may be the host: what is read here must be verified like what comes from the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from attestation.errors import CollateralError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cached:
    """An object, and when it was stored."""

    data: bytes = field(repr=False)
    stored: datetime


class DiskCache:
    """Files ``<SHA-256 of the address>.<SHA-256 of the content>`` in one directory of mode 0700.

    Safe with several processes: files appear whole, under their final name.

    Raises:
        CollateralError: the directory cannot be made, is somebody else's or is open to others.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with self._errors():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = directory.stat()
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise CollateralError(
                f"{directory} belongs to another user or is open to others.",
                remedy="Remove it or give it to this user with mode 0700.",
            )

    def load(self, address: str, *, limit: int) -> Cached | None:
        """What was stored last under ``address``. Files that do not fit their name are removed."""
        with self._errors():
            for path in sorted(self._paths(address), key=_modified, reverse=True):
                if (cached := _read(path, limit)) is not None:
                    return cached
                logger.warning("Removing a damaged file from the cache: %s", path.name)
                path.unlink(missing_ok=True)
        return None

    def store(self, address: str, data: bytes, at: datetime) -> None:
        """Keep ``data`` as the only object under ``address``; ``at`` is the time (timezone-aware)."""
        name = f"{_sha256(address.encode())}.{_sha256(data)}"
        with self._errors():
            older = [path for path in self._paths(address) if path.name != name]
            descriptor, temporary = tempfile.mkstemp(dir=self._directory)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                os.utime(temporary, (at.timestamp(), at.timestamp()))
                Path(temporary).replace(self._directory / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            for path in older:
                path.unlink(missing_ok=True)

    def _paths(self, address: str) -> list[Path]:
        return list(self._directory.glob(f"{_sha256(address.encode())}.*"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CollateralError(
                f"The cache directory {self._directory} cannot be used ({error.strerror}).",
                remedy="Set XDG_CACHE_HOME to a directory that can be written.",
            ) from None


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/gelo/amd-kds``, below ``~/.cache`` if that variable is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gelo" / "amd-kds"


def _read(path: Path, limit: int) -> Cached | None:
    """The file's content; None if it is a link, too large or not what its name says."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        stored = os.fstat(file.fileno()).st_mtime
        try:
            data = file.read(limit + 1)
        except OSError:
            return None
    if len(data) > limit or _sha256(data) != path.name.partition(".")[2]:
        return None
    return Cached(data, datetime.fromtimestamp(stored, UTC))


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
