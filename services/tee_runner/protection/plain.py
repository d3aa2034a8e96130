"""No protection: the rows themselves. The baseline for speed and the control for attacks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tee_runner.protection.base import (
    Float32,
    ForwardSession,
    Linear,
    Protection,
    require_finite,
)
from tee_runner.protection.gelo.kernels import row_scales, to_half, to_half_serial, unscale_rows

_SERIAL_ELEMENTS = 1 << 15
# Row norms are brought into [1, 2): far from both ends of f16.
_ONE = np.float32(1.0)


class _PlainSession(ForwardSession):
    def __init__(self, protection: Plain) -> None:
        self._protection = protection

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        n = len(rows)
        scales = np.empty(n, dtype=np.float32)
        row_scales(rows, scales)
        operand = self._protection.operand(weight, n)
        convert = to_half_serial if rows.size <= _SERIAL_ELEMENTS else to_half
        convert(rows, scales, operand)
        result = self._protection.exchange(weight, n)
        require_finite(unscale_rows(result, scales, _ONE, out), weight)


class Plain(Protection):
    """The worker sees everything. Never for real prompts."""

    name = "plain"
    warning = "plain: the worker sees every activation in clear. For measurements only."

    @classmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """See :meth:`Protection.operand_rows`."""
        return sum(counts)

    def forward_session(self) -> ForwardSession:
        """See :meth:`Protection.forward_session`."""
        return _PlainSession(self)
