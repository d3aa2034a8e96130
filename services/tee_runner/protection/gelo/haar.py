"""`gelo-haar`: A uniform (Haar) on the orthogonal group, as in the GELO paper."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import Float32
from tee_runner.protection.gelo.base import SHIELD_ROWS, GeloProtection, Mask
from tee_runner.protection.gelo.kernels import (
    TILE_FLOATS,
    dense_apply,
    dense_unapply,
    fill_block,
    to_half,
    unscale_rows,
)
from tee_runner.protection.gaussian import standard_normals

# Up to here the fused kernel beats assembling the block and calling BLAS.
_DENSE_ROWS = 32
_DENSE_DATA_ROWS = 4


class HaarMask(Mask):
    """A dense s×s matrix, s = n + 8."""

    def __init__(self, protection: GeloProtection, n: int) -> None:
        self.n = n
        self.s = Haar.block_rows(n)
        self._scratch = protection.scratch
        self._mask = haar_matrix(standard_normals(protection.mask_stream, self.s * self.s), self.s)
        self._columns = np.ascontiguousarray(self._mask[:, :n])

    def apply(
        self, rows: Float32, scales: Float32, words: NDArray[np.uint32], sigma: Any, scale: Any,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """See :meth:`Mask.apply`."""
        s, d = operand.shape
        if s <= _DENSE_ROWS:
            scratch = self._scratch.take(TILE_FLOATS)
            dense_apply(rows, scales, words, sigma, self._mask, scale, operand, scratch)
            return
        block, mixed = self._scratch.take(2 * s * d).reshape(2, s, d)
        fill_block(rows, scales, words, sigma, block)
        np.matmul(self._mask, block, out=mixed)
        to_half(mixed, np.full(s, scale, dtype=np.float32), operand)

    def unapply(self, result: Float32, scales: Float32, inverse: Any, out: Float32) -> bool:
        """See :meth:`Mask.unapply`."""
        n, d = out.shape
        if n <= _DENSE_DATA_ROWS:
            scratch = self._scratch.take(TILE_FLOATS)
            return bool(dense_unapply(result, self._columns, scales, inverse, out, scratch))
        # The worker can still write the result: one private copy, then only that is used.
        copied = self._scratch.take((self.s + n) * d)
        private = copied[: self.s * d].reshape(self.s, d)
        np.copyto(private, result)
        data = copied[self.s * d :].reshape(n, d)
        np.matmul(self._columns.T, private, out=data)
        return bool(unscale_rows(data, scales, inverse, out))

    def wipe(self) -> None:
        """See :meth:`Mask.wipe`."""
        self._mask.fill(0.0)
        self._columns.fill(0.0)


class Haar(GeloProtection):
    """O(s²) per column and an O(s³) draw: the reference, slow for long prompts."""

    name = "gelo-haar"

    @classmethod
    def block_rows(cls, n: int) -> int:
        """n + 8."""
        return n + SHIELD_ROWS

    def new_mask(self, n: int) -> Mask:
        """See :meth:`GeloProtection.new_mask`."""
        return HaarMask(self, n)


def haar_matrix(normals: Float32, s: int) -> Float32:
    """A Haar-distributed orthogonal ``(s, s)`` from s² standard normals.

    Householder QR of a Gaussian matrix, with the signs of R's diagonal moved into Q: without
    that Q is not uniform (Mezzadri 2007, "How to generate random matrices from the classical
    compact groups").
    """
    q, r = np.linalg.qr(normals.reshape(s, s).astype(np.float64))
    return np.ascontiguousarray(q * np.where(np.diagonal(r) < 0.0, -1.0, 1.0), dtype=np.float32)
