"""`gelo-haar`: A uniform (Haar) on the orthogonal group, as in the GELO paper."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import Float32
from tee_runner.protection.gaussian import standard_normals
from tee_runner.protection.gelo.base import (
    SERIAL_ELEMENTS,
    SHIELD_ROWS,
    GeloProtection,
    Mask,
    Words,
    padded_rows,
)
from tee_runner.protection.gelo.dense_kernels import (
    dense_apply,
    dense_apply_parallel,
    dense_floats,
    dense_unapply,
    dense_unapply_parallel,
)
from tee_runner.protection.gelo.row_offload import ask_dense
from tee_runner.protection.gelo.tiles import tile_width


class DenseMask(Mask):
    """A as an s×s matrix of float32."""

    def __init__(self, protection: GeloProtection, n: int, matrix: Float32) -> None:
        self.n = n
        self.s = len(matrix)
        self._scratch = protection.scratch
        self._floats = dense_floats(self.s, tile_width(self.s))
        self._mask = padded_rows(matrix)
        self._inverse = padded_rows(matrix.T[:n])
        self._inverse_row: Float32 = self._inverse[0]

    def apply(
        self, rows: Float32, scales: Float32, normals: Float32, sigma: Any, scale: Any,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """See :meth:`Mask.apply`."""
        if operand.size <= SERIAL_ELEMENTS:
            kernel, scratch = dense_apply, self._scratch.take(self._floats)
        else:
            kernel, scratch = dense_apply_parallel, self._scratch.tiles(self._floats)
        kernel(rows, scales, normals, sigma, self._mask, scale, operand, scratch)

    def unapply(self, result: Float32, scales: Float32, inverse: Any, out: Float32) -> bool:
        """See :meth:`Mask.unapply`."""
        if result.size <= SERIAL_ELEMENTS:
            kernel, scratch = dense_unapply, self._scratch.take(self._floats)
        else:
            kernel, scratch = dense_unapply_parallel, self._scratch.tiles(self._floats)
        return bool(kernel(result, self._inverse, scales, inverse, out, scratch))

    def ask(
        self, rows: Float32, normals: Float32, link: Words, bell: Words, begin: int, tally: Words
    ) -> tuple[float, bool]:
        """See :meth:`Mask.ask`."""
        scratch = self._scratch.take(self._floats)
        factor, asleep = ask_dense(rows, normals, self._mask, scratch, link, bell, begin, tally)
        return factor, asleep

    @property
    def inverse_row(self) -> Float32:
        """See :meth:`Mask.inverse_row`."""
        return self._inverse_row

    def wipe(self) -> None:
        """See :meth:`Mask.wipe`."""
        self._mask.fill(0.0)
        self._inverse.fill(0.0)


class HaarMask(DenseMask):
    """A dense s×s matrix, s = n + 8."""

    def __init__(self, protection: GeloProtection, n: int) -> None:
        s = Haar.block_rows(n)
        mask = haar_matrix(standard_normals(protection.mask_stream, s * s), s)
        super().__init__(protection, n, mask)
        mask.fill(0.0)


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
