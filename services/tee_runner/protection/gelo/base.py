"""What the GELO masks share: cadence, shield energy, scaling, wiping.

One secret A per forward pass and sequence block, shield rows fresh per offload. Data rows are
first scaled by secret powers of two to norms in [1, 2) (undone on the way back, exact), so
that no row hides another below the f16 rounding of the mix; shield rows are Gaussian with
expected norm 4·mean‖h‖ over the block's scaled rows.

Known limit of every mask of this kind: A·[H; S] keeps the row space of [H; S], and with public
weights that is enough to test candidates for the prompt. See docs/security.md.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import (
    Float32,
    ForwardSession,
    Linear,
    MaskOptions,
    Protection,
    Scratch,
    require_finite,
)
from tee_runner.protection.gelo.kernels import SHIELD_ENERGY, block_scales
from tee_runner.protection.gelo.row_offload import RowLink, RowOffloads
from tee_runner.protection.gelo.shield import ShieldStock
from tee_runner.protection.gelo.tiles import shield_size
from tee_runner.protection.integrity import Integrity
from tee_runner.protection.rng import SecretKey
from tee_runner.worker.transport import Transport

SHIELD_ROWS = 8

Words = NDArray[np.int64]

_shield_size = lru_cache(maxsize=1 << 12)(shield_size)

# Elements of a weight that keep a worker busy for longer than the shields of a few offloads take:
# they are made then, in one go, and not while it does a shorter product.
_LONG_PRODUCT = 1 << 19

# Below this many elements one thread is done before others would have woken up.
SERIAL_ELEMENTS = 1 << 17


def padded_rows(matrix: Float32) -> Float32:
    """A C-contiguous float32 copy with zero rows added to a multiple of 4, as kernels want it."""
    rows, columns = matrix.shape
    padded = np.zeros((-(-rows // 4) * 4, columns), dtype=np.float32)
    padded[:rows] = matrix
    return padded


class Mask:
    """The secret A of one block of n data rows and s - n shield rows."""

    n: int
    s: int

    @abstractmethod
    def apply(
        self, rows: Float32, scales: Float32, normals: Float32, sigma: Any, scale: Any,
        operand: NDArray[np.uint16],
    ) -> None:  # fmt: skip
        """``operand = f16(scale · A · [rows · scales; σ · Gaussian])``."""

    @abstractmethod
    def unapply(self, result: Float32, scales: Float32, inverse: Any, out: Float32) -> bool:
        """``out = (Aᵀ · result)[:n] · inverse / scales``; True if a value is not finite."""

    def ask(
        self, rows: Float32, normals: Float32, link: Words, bell: Words, begin: int, tally: Words
    ) -> tuple[float, bool]:
        """Send ``f16(scale · A · [row · own scale; σ · Gaussian])``, scales chosen here, for n = 1.

        See :mod:`tee_runner.protection.gelo.row_offload`. Returns what undoes the scales, with
        :attr:`inverse_row`, on the way back, and whether the worker sleeps.
        """
        raise NotImplementedError

    @property
    def inverse_row(self) -> Float32:
        """The first column of A ``(s,)``, maybe not normalised, for n = 1."""
        raise NotImplementedError

    @abstractmethod
    def wipe(self) -> None:
        """Overwrite A."""


class GeloProtection(Protection):
    """A family of masks. ``new_mask`` draws one."""

    warning: ClassVar[str] = (
        "masks keep the row space of what they hide: with public weights the prompt can be "
        "recovered by testing candidates (docs/attacks.md)."
    )

    def __init__(
        self, transport: Transport, *, masks: MaskOptions | None = None, key: SecretKey | None = None
    ) -> None:
        super().__init__(transport, masks=masks)
        key = key or SecretKey()
        self.mask_stream = key.stream("mask")
        self.shield = ShieldStock(key.stream("shield"))
        self.scratch = Scratch()
        self.single = RowOffloads(transport)
        transport.meanwhile = self._meanwhile

    @classmethod
    def parameters(cls) -> dict[str, int | float | str]:
        """Shield rows and energy."""
        return {"shield_rows": SHIELD_ROWS, "shield_energy": SHIELD_ENERGY}

    @classmethod
    @abstractmethod
    def block_rows(cls, n: int) -> int:
        """s for n data rows."""

    @classmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """See :meth:`Protection.operand_rows`."""
        return sum(cls.block_rows(n) for n in counts if n)

    @abstractmethod
    def new_mask(self, n: int) -> Mask:
        """A fresh secret mask for n data rows."""

    def forward_session(self) -> ForwardSession:
        """See :meth:`Protection.forward_session`."""
        return _GeloSession(self)

    def _meanwhile(self) -> None:
        self.refill(self.product_elements)

    def refill(self, elements: int) -> int:
        """Make shields beside a product with a weight of so many; what it took, nanoseconds."""
        long = elements >= _LONG_PRODUCT
        if not long and not self.shield.low:
            return 0
        begin = time.perf_counter_ns()
        if long:
            self.shield.refill()
        else:
            self.shield.top_up()
        took = time.perf_counter_ns() - begin
        self.profile.add("shield", took)
        return took

    def idle(self) -> bool:
        """See :meth:`Protection.idle`."""
        return self.shield.top_up()

    def wipe(self) -> None:
        """Overwrite working memory and step the streams, so that no used secret can be remade."""
        self.scratch.wipe()
        self.single.settle(self.profile)
        self.mask_stream.ratchet()
        self.shield.wipe()


@dataclass(frozen=True, slots=True)
class _Block:
    """A mask, and where its data rows and its operand rows are."""

    mask: Mask
    data: slice
    span: slice


class _GeloSession(ForwardSession):
    def __init__(self, protection: GeloProtection) -> None:
        self._protection = protection
        self._masks: dict[tuple[int, int], Mask] = {}
        # By the rows of each sequence: its blocks, and the operand's rows.
        self._layouts: dict[tuple[int, ...], tuple[list[_Block], int]] = {}

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        protection = self._protection
        begin = time.perf_counter_ns()
        blocks, total = self._layouts.get(tuple(counts)) or self._layout(counts)
        mask = blocks[0].mask
        integrity = protection.integrity
        link = protection.single.link(integrity, weight, mask.s) if len(blocks) == 1 == mask.n else None
        if link is not None:
            self._row(link, integrity, mask, rows, out, begin)
        else:
            self._blocks(weight, blocks, total, rows, out, begin)
        if protection.masks.per_offload:
            self._wipe_masks()

    def _row(
        self, link: RowLink, integrity: Integrity | None, mask: Mask, rows: Float32, out: Float32, begin: int
    ) -> None:
        protection, weight = self._protection, link.weight
        normals = protection.shield.take(_shield_size(1, mask.s, weight.d_in))
        factor, asleep = mask.ask(rows, normals, link.words, link.bell, begin, protection.single.tally)
        if asleep:
            protection.single.wake()
        busy = protection.refill(weight.d_in * weight.d_out)
        protection.single.hear(link, integrity, mask.inverse_row, factor, out, busy)

    def _blocks(
        self, weight: Linear, blocks: list[_Block], total: int, rows: Float32, out: Float32, begin: int
    ) -> None:
        protection = self._protection
        operand = protection.operand(weight, total)
        scales = np.empty(len(rows), dtype=np.float32)
        inverses = []
        for block in blocks:
            mask, data, own = block.mask, rows[block.data], scales[block.data]
            sigma, scale = block_scales(data, own, mask.s - mask.n)
            normals = protection.shield.take(_shield_size(mask.n, mask.s, weight.d_in))
            mask.apply(data, own, normals, np.float32(sigma), np.float32(scale), operand[block.span])
            inverses.append(np.float32(1.0 / scale))
        protection.profile.add("mask apply", time.perf_counter_ns() - begin)
        result = protection.exchange(weight, total)
        begin = time.perf_counter_ns()
        for block, inverse in zip(blocks, inverses, strict=True):
            bad = block.mask.unapply(result[block.span], scales[block.data], inverse, out[block.data])
            require_finite(bad, weight)
        protection.profile.add("unapply", time.perf_counter_ns() - begin)

    def _layout(self, counts: Sequence[int]) -> tuple[list[_Block], int]:
        blocks = []
        row = place = 0
        for first, n in mask_blocks(counts, shared_decode=self._protection.masks.shared_decode):
            mask = self._masks.get((first, n))
            if mask is None:
                mask = self._masks[first, n] = self._protection.new_mask(n)
            blocks.append(_Block(mask, slice(row, row + n), slice(place, place + mask.s)))
            row += n
            place += mask.s
        self._layouts[tuple(counts)] = blocks, place
        return blocks, place

    def wipe(self) -> None:
        self._wipe_masks()
        self._protection.wipe()

    def _wipe_masks(self) -> None:
        for mask in self._masks.values():
            mask.wipe()
        self._masks.clear()
        self._layouts.clear()


def mask_blocks(counts: Sequence[int], *, shared_decode: bool) -> list[tuple[int, int]]:
    """Which rows share a mask: ``(first sequence, rows)`` of each block, in order.

    One block per sequence that has rows; with ``shared_decode`` neighbouring sequences of one row
    each (a decode step's) form one block.
    """
    blocks: list[tuple[int, int]] = []
    single = False
    for sequence, n in enumerate(counts):
        if not n:
            continue
        if shared_decode and n == 1 and single:
            first, rows = blocks[-1]
            blocks[-1] = (first, rows + 1)
        else:
            blocks.append((sequence, n))
        single = n == 1
    return blocks
