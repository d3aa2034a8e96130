"""Verified certificates, kept for a bounded time.

A cached entry saves the judgement of the evidence *inside the certificate* on the next connection
with the same certificate. It never stands in for the fresh evidence of a connection: a stolen TLS
key has the same certificate, and only the fresh evidence tells the thief from the guest.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from attestation.errors import InvalidPolicyError

if TYPE_CHECKING:
    from attestation.peer import VerifiedCertificate

DEFAULT_MAX_AGE = timedelta(minutes=10)
MAX_MAX_AGE = timedelta(hours=24)
MAX_ENTRIES = 64


class VerdictCache:
    """Certificates that passed under one policy, by the SHA-256 of their DER bytes. Thread-safe.

    An entry is used for ``max_age`` after it was verified and never after its certificate has
    expired. Zero keeps nothing. The oldest of ``max_entries`` makes room for a new one.

    Raises:
        InvalidPolicyError: ``max_age`` is negative or above 24 hours.
    """

    def __init__(self, *, max_age: timedelta = DEFAULT_MAX_AGE, max_entries: int = MAX_ENTRIES) -> None:
        if not timedelta(0) <= max_age <= MAX_MAX_AGE:
            raise InvalidPolicyError("A verdict may be kept for 0 seconds to 24 hours.")
        self.max_age = max_age
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, tuple[datetime, VerifiedCertificate]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, der: bytes, now: datetime) -> VerifiedCertificate | None:
        """What was verified about this certificate, or None if it must be verified (again)."""
        key = hashlib.sha256(der).digest()
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            verified_at, verified = found
            # A clock that was set back makes an entry older than it looks: verify again then, too.
            if verified_at <= now < min(verified_at + self.max_age, verified.expires):
                return verified
            del self._entries[key]
            return None

    def put(self, der: bytes, verified: VerifiedCertificate, now: datetime) -> None:
        """Remember a certificate that passed every check at ``now``."""
        with self._lock:
            self._entries[hashlib.sha256(der).digest()] = (now, verified)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
