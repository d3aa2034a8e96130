"""An attacker's own run of a scheme: operands of rows that he chose, under masks that he drew.

Code and parameters of a scheme are public, so he has as many as he can use.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct
from scipy.linalg import hadamard

from evals.attacks.drivers.nearest import Float32

Parameters = Mapping[str, int | float | str]


def can_simulate(scheme: str, parameters: Parameters) -> bool:
    """Whether :func:`simulate` knows the scheme: plain rows, or A·[H; S]."""
    return scheme == "plain" or scheme.startswith("gelo-") or "condition_number" in parameters


def simulate(
    rows: Float32,
    s: int,
    scheme: str,
    parameters: Parameters,
    rng: np.random.Generator,
) -> Float32:
    """The operand ``(s, d)`` of ``rows`` ``(n, d)``, s ≥ n, as f16 leaves it.

    Rows are scaled by powers of two to norms in [1, 2); s - n Gaussian shield rows of norm
    ``shield_energy`` (4) times the mean are added; A is Haar, or the scheme's product of sign
    diagonals and a fixed transform; with ``condition_number`` κ its singular values run from 1 to κ.

    Raises:
        ValueError: the scheme is not known here.
    """
    if not can_simulate(scheme, parameters):
        raise ValueError(f"No simulation of {scheme!r}")
    norms = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    data = rows * np.exp2(-np.floor(np.log2(norms)))
    if scheme != "plain":
        n, d = data.shape
        energy = float(parameters.get("shield_energy", 4.0))
        sigma = energy * float(np.linalg.norm(data, axis=1).mean()) / np.sqrt(d)
        shield = sigma * rng.standard_normal((s - n, d), dtype=np.float32)
        data = _mask(s, scheme, parameters, rng) @ np.concatenate([data, shield])
    return np.asarray(data, dtype=np.float16).astype(np.float32)


def _mask(s: int, scheme: str, parameters: Parameters, rng: np.random.Generator) -> Float32:
    if scheme == "gelo-hd3" and s & (s - 1) == 0:
        return _signed_product(hadamard(s) / np.sqrt(s), rng)
    if scheme == "gelo-dct4":
        return _signed_product(dct(np.eye(s), type=4, norm="ortho", axis=0), rng)
    mask = _haar(s, rng)
    condition = float(parameters.get("condition_number", 1.0))
    if condition > 1.0:
        spread = np.geomspace(1.0, condition, s)
        mask = (mask * spread) @ _haar(s, rng)
    return mask.astype(np.float32)


def _haar(s: int, rng: np.random.Generator) -> NDArray[np.float64]:
    q, r = np.linalg.qr(rng.standard_normal((s, s)))
    haar: NDArray[np.float64] = q * np.where(np.diagonal(r) < 0.0, -1.0, 1.0)
    return haar


def _signed_product(transform: NDArray[np.float64], rng: np.random.Generator) -> Float32:
    """D₃·T·D₂·T·D₁·T with random signs."""
    mask = transform
    for step in range(3):
        mask = rng.choice([-1.0, 1.0], size=(len(mask), 1)) * mask
        if step < 2:
            mask = transform @ mask
    return mask.astype(np.float32)
