"""Exact integrity of one offload: the product of integers, checked with secret probes.

u = x·Wᵀ over the integers is checked as u·v = x·w modulo 2^64, w = Wᵀ·v made beforehand, for secret v of
uniform 32-bit integers. A wrong answer gives u with E = u - x·Wᵀ ≠ 0 and |E_j| < 2^32, since u is read
as 32 signed bits and |x·Wᵀ| < 2^30 (:mod:`.quantise`). Take j with E_j ≠ 0 and all of v but v_j as
fixed: v_j and v_j' can both pass only if E_j·(v_j - v_j') = 0 modulo 2^64, and that product is below
2^64 in magnitude, so v_j = v_j'. One probe is therefore passed with probability at most 2^-32, k
independent probes with 2^-32k, whatever power of two divides the error (R. Freivalds, MFCS 1979, for
fields).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import IntegrityError
from tee_runner.memory import on_lines
from tee_runner.protection.integrity import MAX_PROBES
from tee_runner.protection.lpn.fold_kernels import project
from tee_runner.protection.rng import SecretStream

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

# Soundness of one probe: 2 to the minus this.
PROBE_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Probe:
    """Secret: v ``(k, d_out)`` int32 and w = Wᵀ·v ``(k, d_in)`` int64."""

    v: Int32
    w: Int64


class Probes:
    """The probes of one worker session."""

    def __init__(self, count: int, stream: SecretStream) -> None:
        """``count`` probes for every weight; 0 checks nothing.

        Raises:
            ValueError: ``count`` is out of range.
        """
        if not 0 <= count <= MAX_PROBES:
            raise ValueError(f"the check takes up to {MAX_PROBES} probes")
        self.count = count
        self._stream = stream
        self._probes: dict[int, Probe] = {}

    def add(
        self, weight_id: int, panels: NDArray[np.int8] | NDArray[np.int16], d_in: int, d_out: int
    ) -> None:
        """Draw v for a weight, given as panels of its transpose, and project the weight onto it."""
        v = on_lines((self.count, d_out), np.int32)
        self._stream.fill(v.view(np.uint32))
        w = on_lines((self.count, d_in), np.int64)
        w.fill(0)
        if self.count:
            project(panels, v, w)
        self._probes[weight_id] = Probe(v, w)
        self._stream.ratchet()

    def of(self, weight_id: int) -> Probe:
        """The probe of a weight.

        Raises:
            IntegrityError: the session is over.
        """
        probe = self._probes.get(weight_id)
        if probe is None:
            raise IntegrityError("A result cannot be checked: this worker session is over.")
        return probe

    def reject(self, name: str) -> IntegrityError:
        """Overwrite all probes, about which a failed check tells the worker something; what to raise."""
        self.wipe()
        return IntegrityError(
            f"The worker's result for {name} is not the product it was asked for.",
            remedy="Nothing of it was used and its session is closed. The worker is faulty or lying.",
        )

    def wipe(self) -> None:
        """Overwrite the probes. Nothing can be checked afterwards."""
        for probe in self._probes.values():
            probe.v.fill(0)
            probe.w.fill(0)
        self._probes.clear()
