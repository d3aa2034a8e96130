"""LPN parameters per input width: for a level, the least cost within a memory budget.

**Cost** of one row of one (d_out, d) weight, in multiply-adds on 32-bit words: the slots of a sweep
(:mod:`.slots`) over its 64 rows, those of f for d + d_out columns, those of e for d_out, and the bytes
that the sweep reads, :data:`READ_COST` each: 4·k·(d + d_out) of G and the pool and d·d_out of weights. A
larger k needs fewer terms but is more to read, so the best k is below d.

**Memory** per weight element: 4·k/d bytes of pool and 1 byte of weight.

The usual widths are in a table (:mod:`.table`) that a test recomputes; another width takes a second or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, sqrt

from tee_runner.protection.lpn.layout import TILE_ROWS
from tee_runner.protection.lpn.options import DEFAULT_MEMORY, DEFAULT_MIN_BITS
from tee_runner.protection.lpn.security import MARGIN, QuickLevel, security_bits
from tee_runner.protection.lpn.slots import SlotPlan
from tee_runner.protection.lpn.table import CHOSEN

# Output over input width, roughly the mean over the weights of a layer.
OUTPUT_RATIO = 3
# Multiply-adds that take as long as reading a byte of a pool: two cores do 30 G/s and read 20 GB/s.
READ_COST = 1.5
# k is a multiple of this: whole pages of 16 columns.
STEP = 64
# Rows of up to this many values may have a pool of up to as many rows whatever the budget, if nothing
# less reaches the level: it is 4 KiB per output.
_SMALL = 1024


class LpnParametersError(ValueError):
    """No parameters reach the level asked for within the memory. The message names what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LpnParameters:
    """One parameter set of r = e + f·G over Z/2^32 and the level it reaches.

    ``d`` is the input width, ``k`` the rows of G, ``w_f`` and ``w_e`` the nonzero (odd) values of f
    among k and of e among d. ``bits``: log2 of the bit operations of the cheapest known attack, after
    the gain for 2^40 targets.

    Raises:
        ValueError: the weights do not fit.
    """

    d: int
    k: int
    w_f: int
    w_e: int
    bits: float

    def __post_init__(self) -> None:
        if not (0 < self.w_f <= self.k and 0 < self.w_e <= self.d):
            raise ValueError(f"weights {self.w_f} of k = {self.k}, {self.w_e} of d = {self.d} do not fit")

    def bytes_per_parameter(self, weight_bytes: int = 1) -> float:
        """Runner memory, pool and weights, in bytes per weight element: 4·k/d + ``weight_bytes``."""
        return 4 * self.k / self.d + weight_bytes

    def multiply_adds(self, d_out: int) -> int:
        """Multiply-adds on 32-bit words that blind and unblind one row of a (d_out, d) weight."""
        return self.w_f * (self.d + d_out) + self.w_e * d_out


def choose(
    d_in: int, *, min_bits: float = DEFAULT_MIN_BITS, bytes_per_parameter: float = DEFAULT_MEMORY
) -> LpnParameters:
    """The parameters of least cost per row for rows of ``d_in`` values.

    They reach ``min_bits`` + :data:`MARGIN` after the gain for 2^40 targets. ``bytes_per_parameter``
    bounds pool and int8 weights; where it leaves no way to reach the level, k may still be up to 1024
    for widths up to 1024.

    Raises:
        LpnParametersError: the level is out of reach; the message says what to change.
    """
    known = CHOSEN.get(d_in) if min_bits == DEFAULT_MIN_BITS else None
    if known is not None:
        k, w_f, w_e, bits = known
        # One over the default memory is there because no k within it would do.
        needed = 4 * k / d_in + 1
        if needed <= bytes_per_parameter or needed > DEFAULT_MEMORY >= bytes_per_parameter:
            return LpnParameters(d=d_in, k=k, w_f=w_f, w_e=w_e, bits=bits)
    return compute(d_in, min_bits=min_bits, bytes_per_parameter=bytes_per_parameter)


@lru_cache(maxsize=256)
def compute(d_in: int, *, min_bits: float, bytes_per_parameter: float) -> LpnParameters:
    """:func:`choose` without its table.

    Raises:
        LpnParametersError: see :func:`choose`.
    """
    if d_in < 8:
        raise LpnParametersError(f"rows of {d_in} values are too short to be blinded")
    wanted = min_bits + MARGIN
    budget = int((bytes_per_parameter - 1) * d_in / 4) // STEP * STEP
    beyond = (_SMALL // 2, _SMALL) if d_in <= _SMALL else ()
    for k in (min(budget, best_k(d_in)), budget, *beyond):
        found = _Search(d_in, k, wanted).lightest() if k >= STEP else None
        if found is not None:
            return found[1]
    k = best_k(d_in)
    if budget < k and _Search(d_in, k, wanted).reachable():
        raise LpnParametersError(
            f"{min_bits:g} bits for rows of {d_in} values are out of reach with "
            f"{bytes_per_parameter:g} bytes per parameter; {4 * k / d_in + 1:.1f} are enough"
        )
    raise LpnParametersError(f"{min_bits:g} bits are out of reach for rows of {d_in} values")


def best_k(d_in: int) -> int:
    """Rows of G for the least cost: near 30·√d, where the cost is flat, for widths that models have."""
    return max(_SMALL // 2, round(30 * sqrt(d_in) / STEP) * STEP)


class _Search:
    """Looks for the lightest weights that reach ``wanted`` bits, for rows of ``d`` values and one k."""

    def __init__(self, d: int, k: int, wanted: float) -> None:
        self.d, self.k, self.wanted = d, k, wanted
        self.most = max(1, k // 2), max(1, d // 2)
        self.quick = QuickLevel(d, k)

    def reachable(self) -> bool:
        """Whether the heaviest weights, half of f and of e, reach the level."""
        return security_bits(self.d, self.k, *self.most) >= self.wanted

    def lightest(self) -> tuple[float, LpnParameters] | None:
        """The cost and the parameters, confirmed by the full estimate; None if the level is out of reach."""
        if not self.reachable():
            return None
        best = self.most
        self.quick.anchor(min(self.most[0], 90), min(self.most[1], 140))
        seen = set()
        for _ in range(6):
            found = self.lightest_quick()
            if found in seen:
                break
            seen.add(found)
            bits = self.quick.anchor(*found).bits
            while bits < self.wanted and (found[0] < self.most[0] or found[1] < self.most[1]):
                found = min(found[0] + 1, self.most[0]), min(found[1] + 1, self.most[1])
                bits = security_bits(self.d, self.k, *found)
            if self.cost(*found) < self.cost(*best):
                best = found
            if bits < self.wanted + 0.5:
                break
        w_f, w_e = self.trimmed(*best)
        bits = security_bits(self.d, self.k, w_f, w_e)
        return self.cost(w_f, w_e), LpnParameters(d=self.d, k=self.k, w_f=w_f, w_e=w_e, bits=bits)

    def trimmed(self, w_f: int, w_e: int) -> tuple[int, int]:
        """Without the terms that the level does not need."""
        for less_f, less_e in ((4, 4), (2, 0), (0, 2), (1, 0), (0, 1)):
            while w_f > less_f and w_e > less_e:
                if security_bits(self.d, self.k, w_f - less_f, w_e - less_e) < self.wanted:
                    break
                w_f, w_e = w_f - less_f, w_e - less_e
        return w_f, w_e

    def cost(self, w_f: int, w_e: int) -> float:
        return row_cost(self.d, self.k, w_f, w_e, OUTPUT_RATIO * self.d)

    def least_e(self, w_f: int, near: int) -> int | None:
        """The least w_e that reaches the level by the quick guess, looked for around ``near``."""
        most = self.most[1]

        def reaches(w_e: int) -> bool:
            return self.quick(w_f, w_e) >= self.wanted

        step, high = 2, min(max(near, 1), most)
        while not reaches(high):
            if high == most:
                return None
            high, step = min(high + step, most), 2 * step
        low, step = high - 1, 2
        while low > 0 and reaches(low):
            high, low, step = low, low - step, 2 * step
        low = max(low, 0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return high

    def lightest_quick(self) -> tuple[int, int]:
        """(w_f, w_e) of least cost by the quick guess: over w_f from heavy to light, then in small steps."""
        tried: dict[int, tuple[float, int]] = {}

        def attempt(w_f: int, near: int) -> tuple[float, int]:
            if w_f not in tried:
                w_e = self.least_e(w_f, near)
                tried[w_f] = (inf, near) if w_e is None else (self.cost(w_f, w_e), w_e)
            return tried[w_f]

        least, best, near = inf, self.most, 1
        # What models need is below this, unless nothing light reaches the level.
        w_f = min(self.most[0], 130)
        if attempt(w_f, near)[0] == inf:
            w_f = self.most[0]
        while w_f >= 1:
            cost, near = attempt(w_f, near)
            if cost < least:
                least, best = cost, (w_f, near)
            elif cost > 1.15 * least or cost == inf:
                break
            w_f = min(w_f - 1, int(w_f / 1.25))
        for step in (8, 4, 2, 1):
            improved = True
            while improved:
                improved = False
                for w_f in (best[0] - step, best[0] + step):
                    if 1 <= w_f <= self.most[0] and attempt(w_f, best[1])[0] < least:
                        (least, w_e), improved = tried[w_f], True
                        best = w_f, w_e
                        break
        return best


def row_cost(d: int, k: int, w_f: int, w_e: int, d_out: int, weight_bytes: int = 1) -> float:
    """Cost per row of a (d_out, d) weight, in multiply-adds; see the module's docstring."""
    words = SlotPlan.of(k, w_f, 4).slots * (d + d_out) + SlotPlan.of(d, w_e, weight_bytes).slots * d_out
    read = 4 * k * (d + d_out) + weight_bytes * d * d_out
    return (words + READ_COST * read) / TILE_ROWS
