"""Weights as the runner keeps them, and their pools P = G·Wᵀ: public, made by the worker, verified.

The worker multiplies the rows of G once per weight; the product is checked against 48 probes before
it is used. Modulo 2^32 a probe is weak where an error is divisible by a large power of two: an error
2^31 is seen only by the lowest bit of v. So each uniform probe is passed by a wrong pool with
probability at most 1/2, whatever the error, and 48 of them with 2^-48: of a wrong row E ≠ 0 take j
with E_j = 2^t·odd, t < 32; given the rest, E_j·v_j is uniform over multiples of 2^t modulo 2^32, at
least two values.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import IntegrityError
from tee_runner.protection.base import Linear
from tee_runner.protection.lpn.fold_kernels import WIDTH, fold
from tee_runner.protection.lpn.layout import (
    LANES,
    empty_panels,
    pack_rows,
    pack_transposed,
    panels_of,
    unpack_rows,
)
from tee_runner.protection.lpn.matrix import SEED
from tee_runner.protection.lpn.quantise import Float32, QuantisedWeight
from tee_runner.protection.rng import SecretStream
from tee_runner.worker.transport import Transport

log = logging.getLogger(__name__)

UInt32 = NDArray[np.uint32]

# Rows of G in one offload: what the buffers hold for every weight.
CHUNK_ROWS: Final = 64


@dataclass(slots=True)
class RingWeight:
    """A weight in runner memory, public.

    ``panels`` ``(panels, d_in', 16)`` int8 or int16 of the transposed weight; ``scales`` ``(d_out,)``
    float32; ``levels`` the largest magnitude of an activation; ``pool`` ``(panels, k', 16)`` uint32,
    None until it is made.
    """

    linear: Linear
    panels: NDArray[np.int8] | NDArray[np.int16]
    scales: Float32
    levels: int
    pool: UInt32 | None = None

    @classmethod
    def of(cls, linear: Linear, weight: QuantisedWeight) -> RingWeight:
        """Pack ``weight``."""
        panels = empty_panels_of(linear, weight.values.dtype)
        pack_transposed(weight.values, panels, 0)
        return cls(linear=linear, panels=panels, scales=weight.scales, levels=weight.levels)


def empty_panels_of(linear: Linear, dtype: np.dtype[np.int8] | np.dtype[np.int16]) -> NDArray[np.int8]:
    """Zero panels for the transposed weight of ``linear``."""
    return empty_panels(linear.d_in, linear.d_out, dtype)


def make_pool(transport: Transport, weight: RingWeight, matrix: UInt32, k: int) -> UInt32:
    """P = G·Wᵀ ``(k, d_out)`` in panels, from the worker; to be verified before use.

    Raises:
        WorkerError: the worker failed.
    """
    linear = weight.linear
    pool = empty_panels(k, linear.d_out, np.uint32)
    for first in range(0, k, CHUNK_ROWS):
        rows = min(CHUNK_ROWS, k - first)
        unpack_rows(matrix, first, transport.operand_words(rows, linear.d_in))
        pack_rows(transport.exchange_words(linear.weight_id, rows, linear.d_in, linear.d_out), pool, first)
    return pool


def is_pool(pool: UInt32, weight: RingWeight, matrix: UInt32, k: int, stream: SecretStream) -> bool:
    """Whether ``pool`` is G·Wᵀ. True for a wrong one with probability at most 2^-48."""
    linear = weight.linear
    if pool[:, k:].any() or pool[-1, :, (linear.d_out - 1) % LANES + 1 :].any():
        return False
    v = np.zeros((panels_of(linear.d_out) * LANES, WIDTH), dtype=np.uint32)
    stream.fill(v[: linear.d_out])
    sums = np.zeros((k, WIDTH), dtype=np.uint32)
    fold(pool, v, sums)
    projected = np.zeros((panels_of(linear.d_in) * LANES, WIDTH), dtype=np.uint32)
    fold(weight.panels, v, projected[: linear.d_in])
    expected = np.zeros((k, WIDTH), dtype=np.uint32)
    fold(matrix, projected, expected)
    return np.array_equal(sums, expected)


@dataclass(slots=True)
class PoolCache:
    """Pools on disk. Their bytes are as untrusted as the worker's: whoever loads one verifies it."""

    directory: Path | None
    hits: int = field(default=0, init=False)

    def path(self, weight: RingWeight, k: int) -> Path | None:
        """Where the pool of ``weight`` is, or None without a directory."""
        if self.directory is None:
            return None
        linear = weight.linear
        digest = hashlib.sha256(SEED.encode())
        for number in (linear.d_in, linear.d_out, k, weight.panels.itemsize):
            digest.update(number.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(weight.panels).view(np.uint8).data)
        return self.directory / f"{digest.hexdigest()}.pool"

    def load(self, path: Path, k: int, d_out: int) -> UInt32 | None:
        """The bytes at ``path`` in memory of our own, if they are as many as they should be."""
        pool = empty_panels(k, d_out, np.uint32)
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != pool.nbytes:
                    return None
                if file.readinto(pool.reshape(-1).view(np.uint8).data) != pool.nbytes:
                    return None
        except OSError:
            return None
        return pool

    def store(self, path: Path, pool: UInt32) -> None:
        """Write a pool; a full disk is only logged."""
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(pool.reshape(-1).view(np.uint8).data)
            partial.replace(path)
        except OSError as error:
            log.warning("a pool cannot be kept on disk: %s", error.strerror)
            with contextlib.suppress(OSError):
                partial.unlink()


def provide_pool(
    transport: Transport, weight: RingWeight, matrix: UInt32, k: int, cache: PoolCache, stream: SecretStream
) -> None:
    """Set ``weight.pool``, from the cache or the worker, verified.

    Raises:
        IntegrityError: the worker's pool is wrong.
        WorkerError: the worker failed.
    """
    path = cache.path(weight, k)
    if path is not None:
        cached = cache.load(path, k, weight.linear.d_out)
        if cached is not None and is_pool(cached, weight, matrix, k, stream):
            cache.hits += 1
            weight.pool = cached
            return
    pool = make_pool(transport, weight, matrix, k)
    if not is_pool(pool, weight, matrix, k, stream):
        raise IntegrityError(
            f"The worker's pool for {weight.linear.name} is not the product it was asked for.",
            remedy="Nothing of it was used. The worker is faulty or lying.",
        )
    weight.pool = pool
    if path is not None:
        cache.store(path, pool)
