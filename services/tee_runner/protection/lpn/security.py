"""Security level of the LPN blinding, and the choice of its parameters per input width.

**Assumption.** The worker sees y = x + e + f·G over Z/2^32 for every row and offload. G (k × d) is uniform
and public; e has w_e nonzeros among d and f has w_f among k, at uniform positions, with uniform odd
values, all fresh per row. We assume that nobody can tell y from uniform for any of ``targets`` rows, x
chosen by the attacker, in fewer than 2^bits bit operations: exact-noise LPN over Z/2^32 with sparse
secret, or decoding of weight w_f + w_e in a random code of length k + d and dimension k.

**What is estimated.** Reduced mod 2 the code stays uniform and the errors become their supports: binary
syndrome decoding of known weight w_f in one part and w_e in the other. It is taken for the whole
problem; no attack is known that gains from the upper 31 bits, and every binary attack applies.
Costed are Prange, Stern/Dumer, MMT/BJMM (``decoding``), statistical decoding 2.0 (``statistical``) and
counting; memory is free, bits are computed only as far as needed (early abort). Nothing is rounded in
our favour. From the cheapest we take off log2(targets)/2 bits: a bound on what decoding one out of
many gains (Sendrier, PQCrypto 2011; no variant is known to reach it against every algorithm), as all
rows share G.

**Counting.** Where the supports outnumber the 2^d syndromes mod 2 (small d), decoding mod 2 has false
solutions and the value bits must be used as well; ISD formulas say little there. As a floor for
any search over supports we take their number to the power 0.283, the exponent of the best known
algorithm for random subset sums (Bonnetain, Bricout, Schrottenloher and Shen, ASIACRYPT 2020). It
binds for small widths only.

**Why odd values.** An even value vanishes mod 2, so values uniform over all nonzero elements would halve
the weight (Liu et al., EUROCRYPT 2024, section on Z/2^λ). Why not ±1: (e, f) would then be a very short
vector of a lattice of volume 2^(32·d) and dimension d + k. At d ≥ k that is LWE with a modulus of 2^32 and a
sparse ternary secret and error, within reach of lattice reduction for many of our widths. Uniform
odd values make (e, f) no shorter than any other solution.

**Why uniform positions.** One position per block would make generation and sweeps cheaper, but gives the
attacker quadratic equations, one error per block. They are what the algebraic attacks use: Briaud and
Øygarden, EUROCRYPT 2023 (AGB); AGB 2.0, ePrint 2025/1476; the hybrid of guessing and algebra,
ePrint 2025/1284; and ISD for regular errors, Esser and Santini, ePrint 2023/1568. None is known to
gain anything against uniform positions.

**Margin.** :func:`choose` asks for :data:`MARGIN` bits more than it is told. Known to be missing: trees of
depth 3 and nearest-neighbour search (see ``decoding``: 0 to 2.4 bits at published sets, least at
sparse errors), the parity of the two known weights (two
more equations, 0.5 bit), double RLPN and its successors (Carrier et al., EUROCRYPT 2024), better
than ISD only at low rates near the Gilbert-Varshamov weight. The rest is for algebraic and hybrid
attacks yet to be found on exact noise.

**Not covered.** Quantum attacks (Grover roughly halves the exponent of Prange's tries). Precomputation
on the public G worth more than the attack itself. Rows whose (e, f) are reused, biased or leak through
the access pattern. Anything that does not depend on the operands' values: shapes, timing,
number of offloads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log2

from tee_runner.protection.lpn.decoding import (
    IMPOSSIBLE,
    Cost,
    Instance,
    bjmm,
    log2_binomial,
    log2_elimination,
    prange,
    stern,
)
from tee_runner.protection.lpn.statistical import statistical_decoding

# Bits asked for beyond the wanted level; see the module's docstring.
MARGIN = 6.0
TARGETS = 2**40
# Exponent of the best known algorithm for random subset sums, in the number of candidates.
_SUBSET_SUM = 0.283
# k is a multiple of this, so that sweeps of the pool need no remainder.
_STEP = 16
# Where the budget does not allow the level (small widths), k may grow up to this.
_LARGEST_K = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is known of one parameter set; ``costs`` holds every attack against one target.

    ``w_f`` is None for a dense secret, f uniform over Z/2^32.
    """

    width: int
    k: int
    w_f: int | None
    w_e: int
    targets: int
    costs: dict[str, Cost]

    @property
    def weakest(self) -> str:
        """The attack that costs least."""
        return min(self.costs, key=lambda name: self.costs[name].bits)

    @property
    def multi_target_gain(self) -> float:
        """Bits taken off for many targets."""
        return log2(self.targets) / 2

    @property
    def bits(self) -> float:
        """The security level: log2 of bit operations of the weakest attack, less the gain."""
        return max(0.0, self.costs[self.weakest].bits - self.multi_target_gain)

    @property
    def log2_solutions_mod_2(self) -> float:
        """log2 of the expected number of false solutions mod 2; positive: decoding is not unique."""
        return _supports(self.width, self.k, self.w_f, self.w_e) - self.width

    def table(self) -> list[tuple[str, float, float, str]]:
        """Rows of a table: attack, log2 bit operations, log2 bits of memory, parameters."""
        rows = []
        for name, cost in sorted(self.costs.items(), key=lambda item: item[1].bits):
            parameters = ", ".join(f"{key}={value}" for key, value in cost.parameters.items())
            rows.append((name, cost.bits, cost.memory, parameters))
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LpnParameters:
    """Parameters for one input width and the level they reach, margin included."""

    width: int
    k: int
    w_f: int
    w_e: int
    bits: float
    weakest: str
    # Pool and weights in runner memory, bytes per weight element: 4·k / width + 1.
    bytes_per_parameter: float
    over_budget: bool

    def words_per_row(self, output_width: int) -> int:
        """Multiply-adds on 32-bit words for one row of one offload: blinding and unblinding."""
        return self.w_f * (self.width + output_width) + self.w_e * output_width


def _supports(width: int, k: int, w_f: int | None, w_e: int) -> float:
    """log2 of the number of (e, f) mod 2."""
    return log2_binomial(width, w_e) + (k if w_f is None else log2_binomial(k, w_f))


def instance(width: int, k: int, w_f: int | None, w_e: int) -> Instance:
    """The binary decoding instance of a parameter set.

    A dense f is uniform mod 2 and says nothing: what is left is the code that G spans, of length
    ``width``, with e as its error.

    Raises:
        ValueError: no instance has these numbers, as with a dense secret of k ≥ width.
    """
    if w_f is None:
        return Instance(dimension=k, lengths=(width, 0), weights=(w_e, 0))
    return Instance(dimension=k, lengths=(k, width), weights=(w_f, w_e))


@lru_cache(maxsize=4096)
def _level(width: int, k: int, w_f: int, w_e: int, wanted: float) -> tuple[float, str]:
    """The cheapest attack on one target, or the first found that costs less than ``wanted``.

    Costs without early abort are left out, never being below those with.
    """
    decoding = instance(width, k, w_f, w_e)
    best = _SUBSET_SUM * _supports(width, k, w_f, w_e), "counting"
    attacks: list[tuple[str, Callable[[], Cost]]] = [
        ("statistical decoding 2.0", lambda: statistical_decoding(decoding)),
        ("prange", lambda: prange(decoding)),
        ("bjmm, early abort", lambda: bjmm(decoding, early_abort=True)),
        ("stern, early abort", lambda: stern(decoding, early_abort=True)),
    ]
    for name, attack in attacks:
        if best[0] < wanted:
            break
        best = min(best, (attack().bits, name))
    return best


@lru_cache(maxsize=256)
def estimate(width: int, k: int, w_f: int | None, w_e: int, *, targets: int = TARGETS) -> Estimate:
    """Cost of every attack on a parameter set.

    Raises:
        ValueError: the weights do not fit, or there is no code (dense secret with k ≥ width).
    """
    decoding = instance(width, k, w_f, w_e)
    supports = _supports(width, k, w_f, w_e)
    costs = {
        "counting": Cost(_SUBSET_SUM * supports, _SUBSET_SUM * supports),
        "statistical decoding 2.0": statistical_decoding(decoding),
        "prange": prange(decoding),
        "stern": stern(decoding),
        "stern, early abort": stern(decoding, early_abort=True),
        "bjmm": bjmm(decoding),
        "bjmm, early abort": bjmm(decoding, early_abort=True),
    }
    costs = {name: cost if cost.bits < IMPOSSIBLE else Cost(inf, inf) for name, cost in costs.items()}
    return Estimate(width=width, k=k, w_f=w_f, w_e=w_e, targets=targets, costs=costs)


@lru_cache(maxsize=256)
def choose(
    width: int,
    *,
    targets: int = TARGETS,
    bits: float = 128.0,
    memory_bytes_per_parameter: float = 5.0,
    output_ratio: float = 2.0,
    margin: float = MARGIN,
) -> LpnParameters:
    """The parameters of least cost per row that reach ``bits`` + ``margin`` within a memory budget.

    ``output_ratio``: output width over input width, averaged over the offloads of this input
    width. ``memory_bytes_per_parameter``: bytes of pool (4·k per output) and of int8 weights (width per
    output) for one weight element. Cost falls with k at every weight, so k is the largest that
    fits. Where no weights reach the level with it, as for widths of a few hundred, k grows beyond
    the budget (``over_budget``). If that is not enough either, the strongest parameters found are
    returned: check ``bits``.

    A dense secret is not considered: mod 2 it is as hard as k/2 odd values, at twice the cost.

    Raises:
        ValueError: the width, the budget or the ratio is too small to make sense.
    """
    if width < 8 or memory_bytes_per_parameter <= 1 or output_ratio <= 0:
        raise ValueError("width, memory budget (over 1 byte for the weights) or output ratio too small")
    wanted = bits + margin + log2(targets) / 2
    budget = int(width * (memory_bytes_per_parameter - 1) / 4) // _STEP * _STEP
    k = max(_STEP, budget)
    while not _reachable(width, k, wanted) and k < _LARGEST_K:
        k = min(_LARGEST_K, 2 * k)
    w_f, w_e = _lightest(width, k, wanted, output_ratio)
    level, weakest = _level(width, k, w_f, w_e, 0.0)
    return LpnParameters(
        width=width,
        k=k,
        w_f=w_f,
        w_e=w_e,
        bits=max(0.0, level - log2(targets) / 2),
        weakest=weakest,
        bytes_per_parameter=4 * k / width + 1,
        over_budget=k > budget,
    )


def _reachable(width: int, k: int, wanted: float) -> bool:
    """Whether the heaviest weights reach ``wanted`` bits: half of f and of e."""
    return _level(width, k, k // 2, width // 2, wanted)[0] >= wanted


def _lightest(width: int, k: int, wanted: float, ratio: float) -> tuple[int, int]:
    """The (w_f, w_e) of least cost that reach ``wanted`` bits, or the heaviest if none do.

    A quick estimate, Prange or counting less what the full estimate was below it at the last
    candidate, finds the next candidate. From the best, single steps down as long as they reach.
    """
    heaviest = k // 2, width // 2
    if not _reachable(width, k, wanted):
        return heaviest

    def reaches(w_f: int, w_e: int) -> bool:
        return _level(width, k, w_f, w_e, wanted)[0] >= wanted

    gap, candidate, best = 24.0, heaviest, heaviest
    for _ in range(6):
        found = _lightest_quick(width, k, wanted, ratio, gap)
        if found is None or found == candidate:
            break
        candidate = found
        level, weakest = _level(width, k, *candidate, wanted)
        if level >= wanted and _cost(candidate, ratio) < _cost(best, ratio):
            best = candidate
        if weakest == "counting":
            break
        gap = max(0.0, min(_quick_prange(width, k, *candidate) - level, 100.0))
    w_f, w_e = best if best != heaviest else candidate
    while not reaches(w_f, w_e):
        w_f, w_e = (w_f, w_e + 1) if w_e < width // 2 else (w_f + 1, w_e)
    for scale in (32, 8, 2, 1):
        moves = [(a * scale, b * scale) for a, b in ((0, -1), (-1, 0), (-1, 1), (1, -2))]
        improved = True
        while improved:
            improved = False
            for more, less in moves:
                near = w_f + more, w_e + less
                inside = 0 <= near[0] <= k // 2 and 0 <= near[1] <= width // 2
                if inside and _cost(near, ratio) < _cost((w_f, w_e), ratio) and reaches(*near):
                    (w_f, w_e), improved = near, True
                    break
    return w_f, w_e


def _cost(weights: tuple[int, int], ratio: float) -> float:
    """Words per row over the input width."""
    return weights[0] * (1 + ratio) + weights[1] * ratio


def _quick_prange(width: int, k: int, w_f: int, w_e: int) -> float:
    """Prange's cost with its errors outside the information set at equal rates; inf if it cannot be."""
    outside = min(k, max(round(width * w_f / max(1, w_f + w_e)), w_f))
    success = log2_binomial(outside, w_f) + log2_binomial(width - outside, w_e)
    tries = _supports(width, k, w_f, w_e) - success
    return tries + log2_elimination(width + k, k) + log2(width + k)


def _quick(width: int, k: int, w_f: int, w_e: int, gap: float) -> float:
    """Roughly the level: Prange's less ``gap``, or counting if that is lower."""
    counting = _SUBSET_SUM * _supports(width, k, w_f, w_e)
    return counting if counting < 40 else min(counting, _quick_prange(width, k, w_f, w_e) - gap)


def _lightest_quick(width: int, k: int, wanted: float, ratio: float, gap: float) -> tuple[int, int] | None:
    """The (w_f, w_e) of least cost by the quick estimate; None if it never reaches ``wanted``."""
    best, least = None, inf
    coarse = max(1, k // 256)
    candidates = list(range(0, k // 2 + 1, coarse))
    for pass_ in range(2):
        for w_f in candidates:
            # w_e must be below this to be cheaper than the best so far.
            high = int(min(width // 2, (least - w_f * (1 + ratio)) / ratio)) if least < inf else width // 2
            if high < 0 or _quick(width, k, w_f, high, gap) < wanted:
                continue
            low = -1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if _quick(width, k, w_f, middle, gap) >= wanted else (middle, high)
            if _cost((w_f, high), ratio) < least:
                best, least = (w_f, high), _cost((w_f, high), ratio)
        if best is None or coarse == 1 or pass_:
            break
        candidates = list(range(max(0, best[0] - coarse), min(k // 2, best[0] + coarse) + 1))
    return best
