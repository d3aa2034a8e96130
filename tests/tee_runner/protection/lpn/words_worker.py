"""A worker in memory that multiplies modulo 2^32, and integer references of what `lpn` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tee_runner.protection.base import Linear
from tee_runner.protection.lpn.parameters import LpnParameters
from tee_runner.protection.lpn.quantise import quantise
from tee_runner.protection.rng import SecretKey
from tee_runner.worker.transport import Transport

UInt32 = NDArray[np.uint32]
Int64 = NDArray[np.int64]


class WordsTransport(Transport):
    """Multiplies uint32 operands with int8 or int16 weights ``(d_out, d_in)``; keeps what it saw.

    ``tamper`` may change a result before it is handed over, as a hostile worker would.
    """

    def __init__(self, weights: Sequence[NDArray[np.signedinteger]]) -> None:
        super().__init__()
        self.weights = [weight.astype(np.uint32) for weight in weights]
        self.operands: list[UInt32] = []
        self.tamper: Callable[[UInt32], None] | None = None
        self.closed = False
        self._operand: UInt32 = np.empty((0, 0), np.uint32)

    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        raise AssertionError("no scheme on words sends float16")

    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.float32]:
        raise AssertionError("no scheme on words sends float16")

    def operand_words(self, rows: int, d_in: int) -> UInt32:
        self._operand = np.full((rows, d_in), 0xDEADBEEF, np.uint32)
        return self._operand

    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> UInt32:
        weight = self.weights[weight_id]
        assert self._operand.shape == (rows, d_in)
        assert weight.shape == (d_out, d_in)
        self.operands.append(self._operand.copy())
        self.meanwhile()
        self.stats.offloads += 1
        result = self._operand @ weight.T
        if self.tamper is not None:
            self.tamper(result)
        return result

    def close(self) -> None:
        self.closed = True


def key_of(number: int) -> SecretKey:
    """A fixed key, so that a statistical test has one outcome."""
    return SecretKey(number.to_bytes(32, "big"))


def weight_of(seed: int, d_out: int, d_in: int) -> NDArray[np.float16]:
    """A weight with channels of different sizes."""
    generator = np.random.default_rng(seed)
    sizes = np.exp(generator.standard_normal((d_out, 1)))
    return (generator.standard_normal((d_out, d_in)) * sizes).astype(np.float16)


def linear_of(weight: NDArray[np.float16], weight_id: int = 0) -> Linear:
    """The handle of ``weight``."""
    return Linear(
        weight_id=weight_id, name=f"w{weight_id}", d_in=weight.shape[1], d_out=weight.shape[0],
        load=lambda: weight,
    )  # fmt: skip


def transport_for(*weights: NDArray[np.float16], wide: bool = False) -> WordsTransport:
    """A worker that holds the quantised ``weights``."""
    return WordsTransport([quantise(weight, wide=wide).values for weight in weights])


def small_parameters(d: int, k: int = 96, w_f: int = 9, w_e: int = 7) -> LpnParameters:
    """Parameters far below any security, for shapes that are fast."""
    return LpnParameters(d=d, k=k, w_f=min(w_f, k), w_e=min(w_e, d), bits=0.0)
