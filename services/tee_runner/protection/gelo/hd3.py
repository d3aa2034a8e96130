"""`gelo-hd3`: A = D₃·Ĥ·D₂·Ĥ·D₁·Ĥ with secret sign flips and normalised Walsh–Hadamard Ĥ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import Float32
from tee_runner.protection.gelo.base import (
    SERIAL_ELEMENTS,
    SHIELD_ROWS,
    GeloProtection,
    Mask,
    padded_rows,
)
from tee_runner.protection.gelo.kernels import (
    TILE_FLOATS,
    dense_unapply,
    hd3_apply,
    hd3_apply_parallel,
    hd3_unapply,
    hd3_unapply_parallel,
    tile_width,
)
from tee_runner.vector import walsh_hadamard

_LANES = 16


class Hd3Mask(Mask):
    """The three sign diagonals; s is a power of two, s - n of its rows are shield rows."""

    def __init__(self, protection: GeloProtection, n: int) -> None:
        self.n = n
        self.s = Hd3.block_rows(n)
        self._scratch = protection.scratch
        bits = protection.mask_stream.words(3 * -(-self.s // 32))
        unpacked = np.unpackbits(bits.view(np.uint8)).reshape(3, -1)[:, : self.s]
        self._signs = (1.0 - 2.0 * unpacked).astype(np.float32)
        self._normal = float(self.s) ** -1.5
        # With few data rows, their rows of Aᵀ are cheaper to apply than three transforms.
        self._inverse = self._inverse_rows() if 2 * n <= self.s.bit_length() else None

    def _inverse_rows(self) -> Float32:
        """The first n rows of Aᵀ (unnormalised): A applied to unit vectors."""
        width = -(-self.n // _LANES) * _LANES
        tile = np.zeros((self.s, width), dtype=np.float32)
        tile[range(self.n), range(self.n)] = 1.0
        for stage in range(3):
            walsh_hadamard(tile.ctypes.data, self.s, width)
            tile *= self._signs[stage][:, None]
        return padded_rows(tile[:, : self.n].T)

    def apply(
        self, rows: Float32, scales: Float32, normals: Float32, sigma: Any, scale: Any,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """See :meth:`Mask.apply`."""
        kernel = hd3_apply if operand.size <= SERIAL_ELEMENTS else hd3_apply_parallel
        scratch = self._scratch.take(max(TILE_FLOATS, self.s * tile_width(self.s)))
        kernel(rows, scales, normals, sigma, self._signs, np.float32(scale * self._normal), operand, scratch)

    def unapply(self, result: Float32, scales: Float32, inverse: Any, out: Float32) -> bool:
        """See :meth:`Mask.unapply`."""
        factor = np.float32(inverse * self._normal)
        scratch = self._scratch.take(max(TILE_FLOATS, self.s * tile_width(self.s)))
        if self._inverse is not None:
            return bool(dense_unapply(result, self._inverse, scales, factor, out, scratch))
        kernel = hd3_unapply if result.size <= SERIAL_ELEMENTS else hd3_unapply_parallel
        return bool(kernel(result, self._signs, scales, factor, out, scratch))

    def wipe(self) -> None:
        """See :meth:`Mask.wipe`."""
        self._signs.fill(0.0)
        if self._inverse is not None:
            self._inverse.fill(0.0)


class Hd3(GeloProtection):
    """O(s log s) per column, O(s) secret bits; shield rows pad s to a power of two."""

    name = "gelo-hd3"

    @classmethod
    def block_rows(cls, n: int) -> int:
        """next_pow2(n + 8)."""
        return 1 << (n + SHIELD_ROWS - 1).bit_length()

    def new_mask(self, n: int) -> Mask:
        """See :meth:`GeloProtection.new_mask`."""
        return Hd3Mask(self, n)
