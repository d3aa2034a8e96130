"""The LPN parameters of one input width."""

from __future__ import annotations

from dataclasses import dataclass


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
