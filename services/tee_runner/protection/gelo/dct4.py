"""`gelo-dct4`: A = D₃·C·D₂·C·D₁·C with secret sign flips and the orthonormal DCT-IV C."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import Float32
from tee_runner.protection.gelo.base import SERIAL_ELEMENTS, SHIELD_ROWS, GeloProtection, Mask
from tee_runner.protection.gelo.dct4_kernels import (
    dct4_apply,
    dct4_apply_parallel,
    dct4_floats,
    dct4_unapply,
    dct4_unapply_parallel,
)
from tee_runner.protection.gelo.dct4_plan import public_plan, secret_twists
from tee_runner.protection.gelo.haar import DenseMask
from tee_runner.protection.gelo.hd3 import draw_signs

# Up to this s the product with A is cheaper than three fast transforms.
DENSE_ROWS = 48


@functools.lru_cache(maxsize=DENSE_ROWS)
def dct4_matrix(s: int) -> NDArray[np.float64]:
    """C ``(s, s)``: √(2/s)·cos(π/s·(j + ½)(k + ½)), symmetric and its own inverse."""
    half = np.arange(s) + 0.5
    return np.asarray(np.sqrt(2.0 / s) * np.cos(np.pi / s * np.outer(half, half)))


def cascade_matrix(signs: Float32) -> Float32:
    """A ``(s, s)`` for the diagonals ``signs`` (3, s)."""
    C = dct4_matrix(signs.shape[1])
    first, second, third = signs.astype(np.float64)
    return np.asarray(third[:, None] * (C @ (second[:, None] * (C @ (first[:, None] * C)))), dtype=np.float32)


class Dct4DenseMask(DenseMask):
    """A multiplied out, for small s."""

    def __init__(self, protection: GeloProtection, n: int) -> None:
        signs = draw_signs(protection.mask_stream, Dct4.block_rows(n))
        matrix = cascade_matrix(signs)
        super().__init__(protection, n, matrix)
        signs.fill(0.0)
        matrix.fill(0.0)


class Dct4Mask(Mask):
    """The three sign diagonals, s = n + 8, applied by fast transforms."""

    def __init__(self, protection: GeloProtection, n: int) -> None:
        self.n = n
        self.s = Dct4.block_rows(n)
        self._scratch = protection.scratch
        self._signs = draw_signs(protection.mask_stream, self.s)
        self._twists = secret_twists(self._signs)
        public = public_plan(self.s)
        self._public = (*public.passes, *public[1:])
        self._floats = dct4_floats(self.s, public.passes)

    def apply(
        self, rows: Float32, scales: Float32, normals: Float32, sigma: Any, scale: Any,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """See :meth:`Mask.apply`."""
        if operand.size <= SERIAL_ELEMENTS:
            kernel, scratch = dct4_apply, self._scratch.take(self._floats)
        else:
            kernel, scratch = dct4_apply_parallel, self._scratch.tiles(self._floats)
        kernel(rows, scales, normals, sigma, self._signs, self._twists, self._public, scale, operand, scratch)

    def unapply(self, result: Float32, scales: Float32, inverse: Any, out: Float32) -> bool:
        """See :meth:`Mask.unapply`."""
        if result.size <= SERIAL_ELEMENTS:
            kernel, scratch = dct4_unapply, self._scratch.take(self._floats)
        else:
            kernel, scratch = dct4_unapply_parallel, self._scratch.tiles(self._floats)
        return bool(kernel(result, self._signs, self._twists, self._public, scales, inverse, out, scratch))

    def wipe(self) -> None:
        """See :meth:`Mask.wipe`."""
        self._signs.fill(0.0)
        self._twists.fill(0.0)


def dct4_mask(protection: GeloProtection, n: int) -> Mask:
    """A fresh mask of the cheaper of the two kinds."""
    small = Dct4.block_rows(n) <= DENSE_ROWS
    return Dct4DenseMask(protection, n) if small else Dct4Mask(protection, n)


class Dct4(GeloProtection):
    """O(s log s) per column for smooth s, O(s) secret bits, no padding beyond the 8 shield rows."""

    name = "gelo-dct4"

    @classmethod
    def block_rows(cls, n: int) -> int:
        """n + 8."""
        return n + SHIELD_ROWS

    def new_mask(self, n: int) -> Mask:
        """See :meth:`GeloProtection.new_mask`."""
        return dct4_mask(self, n)
