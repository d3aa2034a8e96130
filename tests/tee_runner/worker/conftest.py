"""Weights and sizes shared by the tests of the worker client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gelo.slab import SlabSizes
from tee_runner.worker.client import RemoteWeight, weight_digest

HANG_GUARD_S = 120.0
SIZES = SlabSizes(operand=1 << 20, result=4 << 20)


def integers(seed: int, *shape: int) -> NDArray[np.float16]:
    """Small enough that every product of them here is exact in f32, in any order."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float16)


def remote(values: NDArray[np.float16], name: str = "w") -> RemoteWeight:
    """A weight to provision."""
    d_out, d_in = values.shape
    return RemoteWeight(name=name, d_in=d_in, d_out=d_out, sha256=weight_digest(values), load=lambda: values)
