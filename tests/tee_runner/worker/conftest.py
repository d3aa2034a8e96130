"""Weights and sizes shared by the tests of the worker client."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.slab import SlabSizes
from tee_runner.worker.client import RemoteWeight, weight_digest

HANG_GUARD_S = 120.0
SIZES = SlabSizes(operand=1 << 20, result=4 << 20)


def integers(seed: int, *shape: int) -> NDArray[np.float16]:
    """Small enough that every product of them here is exact in f32, in any order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float16)


def quantised(seed: int, d_out: int, d_in: int, dtype: type[np.int8 | np.int16] = np.int8) -> NDArray[Any]:
    """A weight for products modulo 2^32."""
    limit = 127 if dtype == np.int8 else 32639
    return np.random.default_rng(seed).integers(-limit, limit + 1, (d_out, d_in), dtype=dtype)


def words(seed: int, *shape: int) -> NDArray[np.uint32]:
    """An operand for it."""
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)


def remote(values: NDArray[Any], name: str = "w") -> RemoteWeight:
    """A weight to provision."""
    d_out, d_in = values.shape
    return RemoteWeight(
        name=name, d_in=d_in, d_out=d_out, sha256=weight_digest(values), load=lambda: values,
        format=WeightFormat.of(values.dtype),
    )  # fmt: skip
