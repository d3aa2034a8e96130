"""Security level of the LPN blinding.

**Assumption.** The worker sees y = x + e + f·G over Z/2^32 for every row and offload. G (k × d) is uniform
and public; e has w_e nonzeros among d and f has w_f among k, at uniform positions, with uniform odd
values, all fresh per row. We assume that nobody can tell y from uniform for any of ``targets`` rows, x
chosen by the attacker, in fewer than 2^bits bit operations: exact-noise LPN over Z/2^32 with sparse
secret, or decoding of weight w_f + w_e in a random code of length k + d and dimension k.

**What is estimated.** Reduced mod 2 the code stays uniform and the errors become their supports: binary
syndrome decoding of known weight w_f in one part and w_e in the other. It is taken for the whole
problem; no attack is known that gains from the upper 31 bits, and every binary attack applies.
Costed are Prange, Stern/Dumer, MMT/BJMM (``decoding``, ``lists``), dual words (``statistical``) and
counting; memory is free, bits are computed only as far as needed (early abort). Nothing is rounded in
our favour.

**Many targets.** All rows share G. From the cost of an attack on one row we take off log2(targets)/2
bits: a bound on what decoding one out of many gains (Sendrier, PQCrypto 2011; no variant is known
to reach it against every algorithm). Telling the collection of rows from uniform by shared low-weight dual
words is costed as such.

**Counting.** Where the supports outnumber the 2^d syndromes mod 2 (small d), decoding mod 2 has false
solutions and the value bits must be used as well; ISD formulas say little there. As a floor for
any search over supports we take their number to the power 0.283, the exponent of the best known
algorithm for random subset sums (Bonnetain, Bricout, Schrottenloher and Shen, ASIACRYPT 2020). It
binds for widths of a few hundred and less.

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

**Margin.** :mod:`.parameters` asks for :data:`MARGIN` bits more than it is told. Known to be missing: trees
of depth 3 and nearest-neighbour search (see ``lists``: 0 to 2.4 bits at published sets, least at
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

from dataclasses import dataclass
from functools import lru_cache
from math import inf, log2

from tee_runner.protection.lpn.decoding import IMPOSSIBLE, Cost, Instance, log2_binomial, prange
from tee_runner.protection.lpn.lists import bjmm, follow, stern
from tee_runner.protection.lpn.statistical import collection, statistical_decoding

# Bits asked for beyond the wanted level; see the module's docstring.
MARGIN = 6.0
TARGETS = 2.0**40
# Exponent of the best known algorithm for random subset sums, in the number of candidates.
_SUBSET_SUM = 0.283
_FOLLOWED = "bjmm, early abort"
_COLLECTION = "dual words, all rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is known of one parameter set. ``w_f`` is None for a dense secret, f uniform over Z/2^32.

    ``costs`` holds every attack, against one target but for "dual words, all rows", which is
    against the collection of them.
    """

    d: int
    k: int
    w_f: int | None
    w_e: int
    targets: float
    costs: dict[str, Cost]

    def level(self, attack: str) -> float:
        """log2 of the bit operations of one attack, after what many targets gain it."""
        gain = 0.0 if attack == _COLLECTION else log2(self.targets) / 2
        return max(0.0, self.costs[attack].bits - gain)

    @property
    def weakest(self) -> str:
        """The attack that costs least."""
        return min(self.costs, key=self.level)

    @property
    def bits(self) -> float:
        """The security level: that of the cheapest attack."""
        return self.level(self.weakest)

    @property
    def log2_solutions_mod_2(self) -> float:
        """log2 of the expected number of false solutions mod 2; positive: decoding is not unique."""
        return _supports(self.d, self.k, self.w_f, self.w_e) - self.d

    def table(self) -> list[tuple[str, float, float, str]]:
        """Rows of a table, cheapest first: attack, level, log2 bits of memory, parameters."""
        rows = []
        for name in sorted(self.costs, key=self.level):
            cost = self.costs[name]
            parameters = ", ".join(f"{key}={value}" for key, value in cost.parameters.items())
            rows.append((name, self.level(name), cost.memory, parameters))
        return rows


def security_bits(d: int, k: int, w_f: int, w_e: int, *, targets: float = TARGETS) -> float:
    """log2 of the bit operations of the cheapest attack on any of ``targets`` rows.

    Raises:
        ValueError: the weights do not fit.
    """
    # A cost without early abort is never below the one with it.
    return _estimate(d, k, w_f, w_e, targets, every=False).bits


def _supports(d: int, k: int, w_f: int | None, w_e: int) -> float:
    """log2 of the number of (e, f) mod 2."""
    return log2_binomial(d, w_e) + (k if w_f is None else log2_binomial(k, w_f))


def instance(d: int, k: int, w_f: int | None, w_e: int) -> Instance:
    """The binary decoding instance of a parameter set.

    A dense f is uniform mod 2 and says nothing: what is left is the code that G spans, of length
    ``d``, with e as its error.

    Raises:
        ValueError: no instance has these numbers, as with a dense secret of k ≥ d.
    """
    if not (0 <= w_e <= d and (w_f is None or 0 <= w_f <= k)):
        raise ValueError(f"weights {w_f} of k = {k}, {w_e} of d = {d} do not fit")
    # More than half the positions: the attacker adds the all-ones word, and the others are the errors.
    w_e = min(w_e, d - w_e)
    if w_f is None:
        return Instance(dimension=k, lengths=(d, 0), weights=(w_e, 0))
    return Instance(dimension=k, lengths=(k, d), weights=(min(w_f, k - w_f), w_e))


def estimate(d: int, k: int, w_f: int | None, w_e: int, *, targets: float = TARGETS) -> Estimate:
    """Cost of every attack on a parameter set.

    Raises:
        ValueError: the weights do not fit, or there is no code (dense secret with k ≥ d).
    """
    return _estimate(d, k, w_f, w_e, targets, every=True)


@lru_cache(maxsize=1024)
def _estimate(d: int, k: int, w_f: int | None, w_e: int, targets: float, *, every: bool) -> Estimate:
    decoding = instance(d, k, w_f, w_e)
    supports = _supports(d, k, w_f, w_e)
    costs = {
        "counting": Cost(_SUBSET_SUM * supports, _SUBSET_SUM * supports),
        "statistical decoding 2.0": statistical_decoding(decoding),
        _COLLECTION: collection(decoding, targets),
        "prange": prange(decoding),
        "stern, early abort": stern(decoding, early_abort=True),
        _FOLLOWED: bjmm(decoding, early_abort=True),
    }
    if every:
        costs |= {"stern": stern(decoding), "bjmm": bjmm(decoding)}
    costs = {name: cost if cost.bits < IMPOSSIBLE else Cost(inf, inf) for name, cost in costs.items()}
    return Estimate(d=d, k=k, w_f=w_f, w_e=w_e, targets=targets, costs=costs)


class QuickLevel:
    """A guess at :func:`security_bits` for many weights of one (d, k), each in milliseconds, for searches.

    The least of counting, statistical decoding and early-abort BJMM, followed from the best attacks
    on the weights it was anchored at, less what any other attack was below that at the last anchor.
    """

    def __init__(self, d: int, k: int) -> None:
        self.d, self.k = d, k
        self.known: list[Cost] = []
        self.gap = 0.0

    def anchor(self, w_f: int, w_e: int) -> Estimate:
        """Estimate these weights in full, and go on from that."""
        full = _estimate(self.d, self.k, w_f, w_e, TARGETS, every=False)
        if full.costs[_FOLLOWED].parameters:
            self.known = [*self.known[-1:], full.costs[_FOLLOWED]]
        self.gap = 0.0
        self.gap = max(0.0, self(w_f, w_e) - full.bits)
        return full

    def __call__(self, w_f: int, w_e: int) -> float:
        decoding = instance(self.d, self.k, w_f, w_e)
        bits = _SUBSET_SUM * _supports(self.d, self.k, w_f, w_e)
        for i, known in enumerate(self.known):
            found = follow(decoding, known)
            if found.bits < IMPOSSIBLE:
                self.known[i] = found
            bits = min(bits, found.bits)
        bits = min(bits, statistical_decoding(decoding).bits)
        return bits - log2(TARGETS) / 2 - self.gap
