"""A worker in memory that multiplies exactly, and float64 references of what the masks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct
from scipy.linalg import hadamard

from tee_runner.protection.base import ForwardSession, Linear, Protection
from tee_runner.protection.gelo.auto import Auto
from tee_runner.protection.gelo.base import GeloProtection, Mask
from tee_runner.protection.gelo.dct4 import Dct4, Dct4Mask
from tee_runner.protection.gelo.haar import DenseMask, Haar
from tee_runner.protection.gelo.hd3 import Hd3, Hd3Mask
from tee_runner.protection.plain import Plain
from tee_runner.protection.rng import SecretKey
from tee_runner.protection.schemes import SCHEMES
from tee_runner.worker.transport import Transport

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]

# Those that send float16; the others are in lpn/.
HALF_SCHEMES = {name: kind for name, kind in SCHEMES.items() if kind.rounded_results}
GELO_SCHEMES: tuple[type[GeloProtection], ...] = (Haar, Hd3, Dct4, Auto)
# Half a unit in the last place of float16 relative to the value, and absolute below 2⁻¹⁴.
HALF_ROUNDING = 2.0**-11
HALF_FLOOR = 2.0**-25
SINGLE_ROUNDING = 2.0**-24


class ExactTransport(Transport):
    """Multiplies in float64 and rounds once to float32; keeps what it saw.

    ``tamper`` may change a result before it is handed over, as a hostile worker would.
    """

    def __init__(self, weights: Sequence[NDArray[np.floating]] = (), *, keep: bool = True) -> None:
        super().__init__()
        self.weights = [weight.astype(np.float64) for weight in weights]
        self.operands: list[NDArray[np.float16]] = []
        self.tamper: Callable[[Float32], None] | None = None
        self.closed = False
        self._keep = keep
        self._operand = np.empty((0, 0), np.float16)

    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        # Poisoned, so that an element that is never written shows.
        self._operand = np.full((rows, d_in), np.nan, np.float16)
        return self._operand

    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> Float32:
        weight = self.weights[weight_id]
        assert self._operand.shape == (rows, d_in)
        assert weight.shape == (d_out, d_in)
        if self._keep:
            self.operands.append(self._operand.copy())
        self.meanwhile()
        self.stats.offloads += 1
        result = (self._operand.astype(np.float64) @ weight.T).astype(np.float32)
        if self.tamper is not None:
            self.tamper(result)
        return result

    def operand_words(self, rows: int, d_in: int) -> NDArray[np.uint32]:
        raise AssertionError("these schemes send float16")

    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.uint32]:
        raise AssertionError("these schemes send float16")

    def close(self) -> None:
        self.closed = True


def key_of(number: int) -> SecretKey:
    """A fixed key, so that a statistical test has one outcome."""
    return SecretKey(number.to_bytes(32, "big"))


def linear_of(weight: NDArray[np.floating], weight_id: int = 0) -> Linear:
    """The handle of ``weight``."""
    return Linear(weight_id=weight_id, name=f"w{weight_id}", d_in=weight.shape[1], d_out=weight.shape[0])


def half_weight(generator: np.random.Generator, d_out: int, d_in: int) -> NDArray[np.float16]:
    """A random weight in float16 that leaves the size of rows about as it is."""
    return (generator.standard_normal((d_out, d_in)) / np.sqrt(d_in)).astype(np.float16)


def protect(scheme: type[Protection], transport: Transport, key: int = 1) -> Protection:
    """``scheme`` with a fixed key where it has one."""
    if issubclass(scheme, GeloProtection):
        return scheme(transport, key=key_of(key))
    return Plain(transport)


def run(
    session: ForwardSession, weight: NDArray[np.floating], rows: Float32, counts: Sequence[int]
) -> Float32:
    """``session.linear`` into a poisoned output."""
    out = np.full((len(rows), weight.shape[0]), np.nan, np.float32)
    session.linear(linear_of(weight), rows, counts, out)
    return out


def matrix_of(mask: Mask) -> Float64:
    """The full A ``(s, s)`` of a mask, in float64 from its secret parameters."""
    if isinstance(mask, DenseMask):
        return mask._mask[: mask.s].astype(np.float64)
    if isinstance(mask, Dct4Mask):
        return dct4_reference(mask._signs, np.eye(mask.s))
    assert isinstance(mask, Hd3Mask)
    H = hadamard(mask.s, dtype=np.float64) / np.sqrt(mask.s)
    A = np.eye(mask.s)
    for signs in mask._signs:
        A = signs.astype(np.float64)[:, None] * (H @ A)
    return A


def dct4_reference(signs: Float32, columns: Float64) -> Float64:
    """D₃·C·D₂·C·D₁·C·columns in float64."""
    mixed = columns
    for diagonal in signs.astype(np.float64):
        mixed = diagonal[:, None] * dct(mixed, type=4, norm="ortho", axis=0)
    return mixed


def scales_of(rows: NDArray[np.floating]) -> tuple[Float64, float]:
    """Powers of two that bring row norms into [1, 2), 1 for zero rows; the mean scaled norm."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    safe = np.where(norms > 0.0, norms, 1.0)
    scales = np.where(norms > 0.0, 2.0 ** -np.floor(np.log2(safe)), 1.0)
    return scales, float(np.mean(norms * scales))


def box_muller(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> tuple[Float64, Float64]:
    """Pairs of normals in float64 from the float32 roundings of two uniform words."""
    u = first.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    u = np.minimum(u, np.float32(1.0 - 2.0**-24)).astype(np.float64)
    angle = np.pi * (second.astype(np.int32).astype(np.float32) * np.float32(2.0**-31)).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log(u))
    return radius * np.cos(angle), radius * np.sin(angle)


def shield_of(normals: Float32, n: int, s: int, d: int) -> Float64:
    """Shield rows ``(s - n, d)`` of deviation 1, as they are laid out: rows of whole vectors."""
    return normals.reshape(s - n, -1)[:, :d].astype(np.float64)
