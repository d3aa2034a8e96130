"""Leverage of the vocabulary's rows, relative to what text gives anyway. V vocabulary, d width."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from evals.attacks.kept import kept
from evals.attacks.public import PublicModel
from evals.attacks.subspace import Float32, Float64, unit_scaled, wire_values

Int32 = NDArray[np.int32]
# Of a Gram matrix of mean 1 before it is inverted.
_RIDGE = 1e-3


def relative_leverages(model: PublicModel, operand: NDArray[np.generic], typical: Int32) -> Float32:
    """Scores ``(V,)`` of the vocabulary where an operand has at least as many rows as columns.

    hᵀ(UᵀU)⁻¹h is small where a row is in the operand: h, scaled to a norm in [1, 2) as the scheme does,
    takes part in UᵀU. Relative to what typical text gives, since common directions are small anyway;
    ``typical`` ``(N, T)`` are its sentences' tokens, padded with -1.
    """
    rows = unit_scaled(model.dictionary)
    usual = kept(model, ("usual leverage", typical.shape), lambda: _usual(rows, typical))
    u = wire_values(operand)
    ratio = _log_leverage(rows, u.T @ u) - usual
    # Any common factor will do: the smallest is plausible by definition.
    scores: Float32 = np.exp(ratio - ratio.min()).astype(np.float32)
    return scores


def _usual(rows: Float32, typical: Int32) -> Float64:
    """What rows have that are as frequent as in ``typical`` text."""
    counts = np.bincount(typical[typical >= 0], minlength=len(rows)).astype(np.float32)
    return _log_leverage(rows, ((rows * counts[:, None]).T @ rows).astype(np.float64))


def _log_leverage(rows: Float32, gram: Float64) -> Float64:
    """log hᵀ(G + λI)⁻¹h of ``rows`` ``(V, d)``, G scaled to a mean of 1."""
    gram = gram * (rows.shape[1] / np.trace(gram))
    factor = np.linalg.cholesky(gram + np.eye(len(gram)) * _RIDGE)
    solved = solve_triangular(factor.astype(np.float32), rows.T, lower=True, check_finite=False)
    logs: Float64 = np.log(np.einsum("dv,dv->v", solved, solved).astype(np.float64) + 1e-12)
    return logs
