"""The public matrix G: uniform words from a published seed, one per input width."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.lpn.layout import empty_panels, pack_rows
from tee_runner.protection.rng import SecretStream

# Nothing up the sleeve: the seed says what it is for.
SEED: Final = "GELO LPN public matrix G, version 1"
_ROWS: Final = 256


def public_matrix(d: int, k: int) -> NDArray[np.uint32]:
    """G ``(k, d)`` in panels ``(panels, k', 16)`` uint32, rows from k on zero.

    Row by row the keystream of AES-256 in counter mode, little-endian, under the key
    SHA-256(seed ‖ d as eight bytes): the first rows do not depend on k.
    """
    # The generator is that of the secrets; this key is known to all.
    stream = SecretStream(hashlib.sha256(SEED.encode() + d.to_bytes(8, "little")).digest())
    panels = empty_panels(k, d, np.uint32)
    for first in range(0, k, _ROWS):
        pack_rows(stream.words(min(_ROWS, k - first) * d).reshape(-1, d), panels, first)
    return panels
