"""The only source of secret randomness: AES-256-CTR keyed by HKDF from the session key.

One stream per purpose and pass, so that no two uses share keystream. AES-CTR (NIST SP
800-38A) runs at several GB/s on any CPU with AES instructions.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

KEY_BYTES: Final = 32
_BLOCK: Final = 16
_PIECE: Final = 1 << 18
_ZEROS: Final = memoryview(bytes(_PIECE))


def _cipher(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(_BLOCK))).encryptor()


class SecretStream:
    """Keystream of one purpose. Not thread-safe."""

    __slots__ = ("_cipher",)

    def __init__(self, key: bytes) -> None:
        self._cipher = _cipher(key)

    def fill(self, words: NDArray[np.uint32]) -> None:
        """Overwrite ``words`` (C-contiguous, any shape) with uniform random words."""
        if not words.size:
            return
        # A view, or a TypeError: a copy would be filled and thrown away.
        target = memoryview(words.data).cast("B")
        for start in range(0, len(target), _PIECE):
            piece = target[start : start + _PIECE]
            self._cipher.update_into(_ZEROS[: len(piece)], piece)

    def ratchet(self) -> None:
        """Replace the key by keystream: what was drawn so far cannot be drawn again.

        Fast key erasure: whoever reads this process's memory later learns no earlier secret.
        """
        key = self.words(KEY_BYTES // 4)
        self._cipher = _cipher(key.tobytes())
        key.fill(0)

    def fork(self, count: int) -> list[SecretStream]:
        """``count`` streams that are independent of each other and of what this one gives later.

        Their keys are keystream of this one; it is then ratcheted, so that they cannot be made again.
        """
        keys = np.empty((count, KEY_BYTES // 4), dtype=np.uint32)
        self.fill(keys)
        streams = [SecretStream(key.tobytes()) for key in keys]
        keys.fill(0)
        self.ratchet()
        return streams

    def words(self, count: int) -> NDArray[np.uint32]:
        """``count`` fresh uniform words."""
        result = np.empty(count, dtype=np.uint32)
        self.fill(result)
        return result


class SecretKey:
    """A 256-bit session key and the streams derived from it.

    Every call of :meth:`stream` gives another one: a counter goes into the derivation.
    """

    __slots__ = ("_counter", "_key")

    def __init__(self, key: bytes | None = None) -> None:
        """``key`` is for tests; without it the key comes from the kernel's CSPRNG."""
        self._key = os.urandom(KEY_BYTES) if key is None else key
        if len(self._key) != KEY_BYTES:
            raise ValueError(f"a session key has {KEY_BYTES} bytes")
        self._counter = 0

    def stream(self, purpose: str) -> SecretStream:
        """A fresh stream for ``purpose``."""
        self._counter += 1
        info = b"gelo/v1/" + purpose.encode() + b"/" + self._counter.to_bytes(8, "big")
        return SecretStream(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._key))

    def __repr__(self) -> str:
        return "SecretKey(...)"
