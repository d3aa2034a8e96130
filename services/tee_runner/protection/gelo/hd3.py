"""`gelo-hd3`: A = D₃·Ĥ·D₂·Ĥ·D₁·Ĥ with secret sign flips and normalised Walsh–Hadamard Ĥ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import Float32
from tee_runner.protection.gelo.base import SERIAL_ELEMENTS, SHIELD_ROWS, GeloProtection, Mask, Words
from tee_runner.protection.gelo.hd3_kernels import (
    hd3_apply,
    hd3_apply_parallel,
    hd3_unapply,
    hd3_unapply_parallel,
)
from tee_runner.protection.gelo.hd3_plan import tile_floats
from tee_runner.protection.gelo.hd3_rows import data_columns, rows_unapply
from tee_runner.protection.gelo.row_offload import ask_hd3
from tee_runner.protection.gelo.tiles import LANES, tile_width
from tee_runner.protection.rng import SecretStream

# A data column of A may have no entry above this.
#
# With s = 16 the cascade maps a unit vector to a unit vector when D₁ is a bent sign pattern and
# D₂ matches its transform: one row of the operand is then a data row, verbatim. An entry of
# magnitude a leaves a row of the operand in which the data has a²/(16·(1 - a²)) of the shield's
# energy, 0.08 at this limit. Over all 2³² pairs D₁, D₂ a column exceeds it with probability
# REJECTED exactly (test_hd3.py counts them), so draws are as good as uniform and rarely repeated.
# Larger s are not checked: at s = 32 no column is a unit vector (bent patterns exist for even log₂s
# only, and entries stay below 0.89), at s = 64 one is with probability below 2⁻⁸⁸.
LARGEST_ENTRY = 0.75
REJECTED = 6107136 / 2**32
_CHECKED_ROWS = LANES
# Up to this many data rows, their rows of Aᵀ are cheaper to apply than three transforms.
_FEW_ROWS = 2


def draw_signs(stream: SecretStream, s: int) -> Float32:
    """Three diagonals ``(3, s)`` of independent fair signs, float32."""
    bits = stream.words(3 * -(-s // 32))
    unpacked = np.unpackbits(bits.view(np.uint8)).reshape(3, -1)[:, :s]
    bits.fill(0)
    return (1.0 - 2.0 * unpacked).astype(np.float32)


class Hd3Mask(Mask):
    """The three sign diagonals; s is a power of two, s - n of its rows are shield rows."""

    def __init__(self, protection: GeloProtection, n: int) -> None:
        self.n = n
        self.s = Hd3.block_rows(n)
        self._scratch = protection.scratch
        self._normal = float(self.s) ** -1.5
        self._floats = tile_floats(self.s, tile_width(self.s))
        self._inverse: Float32 | None = None
        self._inverse_row: Float32 | None = None
        self._signs = draw_signs(protection.mask_stream, self.s)
        if self.s > _CHECKED_ROWS:
            return
        columns = np.empty((self.s, n), dtype=np.float32)
        while data_columns(self._signs, columns) * self._normal > LARGEST_ENTRY:
            self._signs.fill(0.0)
            self._signs = draw_signs(protection.mask_stream, self.s)
        if n <= _FEW_ROWS:
            self._inverse = columns.T.copy()
            self._inverse_row = self._inverse[0]
        columns.fill(0.0)

    def apply(
        self, rows: Float32, scales: Float32, normals: Float32, sigma: Any, scale: Any,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """See :meth:`Mask.apply`."""
        if operand.size <= SERIAL_ELEMENTS:
            kernel, scratch = hd3_apply, self._scratch.take(self._floats)
        else:
            kernel, scratch = hd3_apply_parallel, self._scratch.tiles(self._floats)
        kernel(rows, scales, normals, sigma, self._signs, np.float32(scale * self._normal), operand, scratch)

    def unapply(self, result: Float32, scales: Float32, inverse: Any, out: Float32) -> bool:
        """See :meth:`Mask.unapply`."""
        factor = np.float32(inverse * self._normal)
        if self._inverse is not None:
            return bool(rows_unapply(result, self._inverse, scales, factor, out))
        if result.size <= SERIAL_ELEMENTS:
            kernel, scratch = hd3_unapply, self._scratch.take(self._floats)
        else:
            kernel, scratch = hd3_unapply_parallel, self._scratch.tiles(self._floats)
        return bool(kernel(result, self._signs, scales, factor, out, scratch))

    def ask(
        self, rows: Float32, normals: Float32, link: Words, bell: Words, begin: int, tally: Words
    ) -> tuple[float, bool]:
        """See :meth:`Mask.ask`."""
        factor, asleep = ask_hd3(rows, normals, self._signs, link, bell, begin, tally)
        return factor, asleep

    @property
    def inverse_row(self) -> Float32:
        """See :meth:`Mask.inverse_row`."""
        if self._inverse_row is None:
            raise ValueError("a mask of many rows does not have its rows of the inverse")
        return self._inverse_row

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
