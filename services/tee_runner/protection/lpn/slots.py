"""Sparse secrets, laid out so that using them takes the same steps whatever they are.

A batch has 64 rows, each with ``w`` distinct positions among ``bound`` and a uniform odd value for
each. The sweep (:mod:`.sweep_kernels`) walks over the pool in groups of rows that fill at most one
page, and does a fixed number of multiply-adds, the *quota*, for each: the batch's entries in that
group and then entries with value 0. If a group has more entries than its quota, which happens in
less than one batch in 128, the whole sweep is repeated with the rest.

The quota bounds the mean of the 64 hypergeometric counts by Chernoff's inequality, which holds for
them as for the binomial (W. Hoeffding, J. Am. Stat. Assoc. 58(301), 1963, theorem 4).

Draws: a position is ⌊word·bound / 2³²⌋, the words that would bias it rejected (D. Lemire, ACM Trans.
Model. Comput. Simul. 29(1), 2019), and drawn again if the row has it already, which is found in
a map of one bit for each. How many words are rejected says nothing of the set that
results. Positions are uniform and not one per regular block: block structure is what algebraic
attacks use (P. Briaud and M. Øygarden, EUROCRYPT 2023). Values are uniform odd words and not ±1:
with small values, a lattice attack at small d would see a short vector. An odd value never
vanishes modulo a power of two, so the weights are exact in every quotient ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from tee_runner.memory import PAGE, pages
from tee_runner.protection.lpn.layout import LANES, TILE_ROWS, rows_per_page
from tee_runner.protection.rng import SecretStream
from tee_runner.simd import I32, I64, INTEGERS, POINTER, Emitter

UInt32 = NDArray[np.uint32]

# Slots that a group can have: its scratch is one page of places and one of values.
MAX_QUOTA: Final = 1024
# A batch is swept more than once with probability at most 2 to the minus this.
_REPEAT_BITS: Final = 7


def quota(bound: int, w: int, group: int) -> int:
    """Slots of a group of ``group`` rows out of ``bound``, for 64 rows of weight ``w``."""
    if w == bound:
        return TILE_ROWS * min(group, bound)
    n, p = TILE_ROWS * w, group / bound
    limit = -math.log(2.0) * (_REPEAT_BITS + math.log2(math.ceil(bound / group)))
    most = min(n, TILE_ROWS * group)
    for count in range(math.ceil(n * min(p, 1.0)), most):
        q = (count + 1) / n
        if q >= 1.0 or p >= 1.0:
            break
        exponent = -n * (q * math.log(q / p) + (1.0 - q) * math.log((1.0 - q) / (1.0 - p)))
        if q > p and exponent <= limit:
            return count
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """How the entries of 64 rows of weight ``w`` among ``bound`` are laid out.

    ``group`` rows of ``1 << row_shift`` bytes make a group, there are ``groups``, each of ``quota``
    slots.
    """

    bound: int
    w: int
    group: int
    groups: int
    quota: int
    row_shift: int

    @classmethod
    def of(cls, bound: int, w: int, item_bytes: int) -> SlotPlan:
        """The plan with the largest groups, for panels of 16 elements of ``item_bytes``."""
        group = rows_per_page(item_bytes)
        while group > 1 and quota(bound, w, group) > MAX_QUOTA:
            group //= 2
        row_shift = (LANES * item_bytes).bit_length() - 1
        return cls(
            bound=bound, w=w, group=group, groups=-(-bound // group), quota=quota(bound, w, group),
            row_shift=row_shift,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """Slots of a tile."""
        return self.groups * self.quota


class SlotDraw:
    """Draws the secrets of one plan and lays them out. Reused; wiped after each batch."""

    def __init__(self, plan: SlotPlan) -> None:
        self.plan = plan
        entries = TILE_ROWS * plan.w
        self.positions: UInt32 = np.zeros((TILE_ROWS, plan.w), dtype=np.uint32)
        self.values: UInt32 = np.zeros((TILE_ROWS, plan.w), dtype=np.uint32)
        self._words: UInt32 = np.zeros(_expected_words(plan), dtype=np.uint32)
        self._known: NDArray[np.uint64] = pages((-(-plan.bound // (8 * PAGE)), PAGE // 8), np.uint64)
        self._groups: UInt32 = np.zeros(entries, dtype=np.uint32)
        self._places: UInt32 = np.zeros(entries, dtype=np.uint32)
        # Two pages: places and values of the group that is being laid out.
        self._page: UInt32 = pages((2, MAX_QUOTA), np.uint32)

    def draw(self, stream: SecretStream) -> None:
        """Fresh positions and values."""
        plan = self.plan
        stream.fill(self.values)
        self.values |= np.uint32(1)
        if plan.w == plan.bound:
            self.positions[...] = np.arange(plan.bound, dtype=np.uint32)
        else:
            row = 0
            while row < TILE_ROWS:
                stream.fill(self._words)
                row = _draw_positions(self._words, plan.bound, self.positions, self._known, row)
        _describe(self.positions, plan.group, plan.row_shift, self._groups, self._places)

    def lay_out(self, sweep: int, places: UInt32, values: UInt32) -> int:
        """The slots ``(groups, quota)`` of sweep number ``sweep``; returns the sweeps that are needed."""
        quota_ = self.plan.quota
        most = _lay_out(
            self._groups, self._places, self.values.reshape(-1), sweep * quota_, self._page, places, values
        )
        return max(1, -(-int(most) // quota_))

    def wipe(self) -> None:
        """Overwrite the secrets."""
        for array in (
            self.positions, self.values, self._words, self._known, self._groups, self._places, self._page
        ):  # fmt: skip
            array.fill(0)


def _expected_words(plan: SlotPlan) -> int:
    """Words that 64 rows need, with a margin; the drawing goes on with more if they do not do."""
    return 64 + int(
        1.1 * TILE_ROWS * sum(plan.bound / (plan.bound - i) for i in range(min(plan.w, plan.bound - 1)))
    )


@numba.njit(nogil=True, cache=True)
def _draw_positions(words: Any, bound: int, positions: Any, known: Any, row: int) -> int:
    """Rows ``row`` and following of distinct positions; returns the first row the words did not do for.

    ``known`` ``(pages, 512)`` uint64 has a bit for each position; of all its pages one word is read and
    written for each draw.
    """
    wide = np.uint64(bound)
    least = np.uint64((1 << 32) % bound)
    used = 0
    while row < positions.shape[0]:
        count = 0
        for page in range(known.shape[0]):
            known[page] = np.uint64(0)
        while count < positions.shape[1]:
            if used == words.shape[0]:
                return row
            product = np.uint64(words[used]) * wide
            used += 1
            position = np.uint32(product >> np.uint64(32))
            place = np.int64(position) >> 6 & 511
            fair = (product & np.uint64(0xFFFFFFFF)) >= least
            fresh = False
            for page in range(known.shape[0]):
                own = np.uint64(fair and page == np.int64(position) >> 15) << np.uint64(
                    position & np.uint32(63)
                )
                before = known[page, place]
                known[page, place] = before | own
                fresh |= (own & ~before) != np.uint64(0)
            if fresh:
                positions[row, count] = position
                count += 1
        row += 1
    return row


@numba.njit(nogil=True, cache=True)
def _describe(positions: Any, group: int, row_shift: int, groups: Any, places: Any) -> None:
    """Of each entry: its group, and where in the group (bytes) and in the tile (bytes times 2^16)."""
    w = positions.shape[1]
    mask = np.uint32(group - 1)
    size = np.uint32(0)
    while (1 << size) < group:
        size += np.uint32(1)
    for row in range(positions.shape[0]):
        tile = np.uint32(row) << np.uint32(22)
        for i in range(w):
            position = positions[row, i]
            groups[row * w + i] = position >> size
            places[row * w + i] = (position & mask) << np.uint32(row_shift) | tile


def _vector(builder: Any, address: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, POINTER), typ=INTEGERS)
    loaded.align = 4
    return loaded


@intrinsic
def _members(typing_context: Any, groups: Any, group: Any) -> Any:
    """Which of the 16 words at ``groups`` are ``group``, as bits."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wanted = Emitter(builder).splat_integer(builder.trunc(arguments[1], I32))
        equal = builder.icmp_unsigned("==", _vector(builder, arguments[0]), wanted)
        return builder.zext(builder.bitcast(equal, ir.IntType(LANES)), I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _gather_members(typing_context: Any, source: Any, members: Any, target: Any) -> Any:
    """Those of the 16 words at ``source`` that ``members`` names, one after the other, to ``target``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, members, target = arguments
        bits = ir.VectorType(ir.IntType(1), LANES)
        mask = builder.bitcast(builder.trunc(members, ir.IntType(LANES)), bits)
        kind = ir.FunctionType(ir.VoidType(), [INTEGERS, POINTER, bits])
        name = f"llvm.masked.compressstore.v{LANES}i32"
        store = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(store, [_vector(builder, source), builder.inttoptr(target, POINTER), mask])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@numba.njit(nogil=True, cache=True)
def _count(bits: int) -> int:
    """Ones among 16 bits."""
    bits -= bits >> 1 & 0x5555
    bits = (bits & 0x3333) + (bits >> 2 & 0x3333)
    bits = bits + (bits >> 4) & 0x0F0F
    return bits + (bits >> 8) & 0x1F


@numba.njit(nogil=True, cache=True)
def _lay_out(
    groups: Any, places: Any, values: Any, skipped: int, page: Any, slot_places: Any, slot_values: Any
) -> int:
    """Slots ``(groups, quota)``, without the first ``skipped`` entries of each group.

    All entries are looked at for every group, 16 at a time, and all that is written goes to ``page``
    and from there to the slots in order. Returns the entries of the fullest group.
    """
    count, quota_ = slot_places.shape
    most = 0
    for g in range(count):
        # Slots without an entry add 0 to the tile's rows in turn, so that no sum waits for the last.
        for s in range(quota_):
            page[0, s] = np.uint32(s & 63) << np.uint32(22)
            page[1, s] = np.uint32(0)
        seen = -skipped
        for first in range(0, groups.shape[0], LANES):
            members = _members(groups.ctypes.data + 4 * first, g)
            following = seen + _count(members)
            if seen >= 0 and following <= quota_:
                _gather_members(places.ctypes.data + 4 * first, members, page.ctypes.data + 4 * seen)
                _gather_members(values.ctypes.data + 4 * first, members, page[1].ctypes.data + 4 * seen)
            else:  # only where a group exceeds its quota
                place = seen
                for lane in range(LANES):
                    if members >> lane & 1:
                        if 0 <= place < quota_:
                            page[0, place] = places[first + lane]
                            page[1, place] = values[first + lane]
                        place += 1
            seen = following
        for s in range(quota_):
            slot_places[g, s] = page[0, s]
            slot_values[g, s] = page[1, s]
        most = max(most, seen + skipped)
    return most
