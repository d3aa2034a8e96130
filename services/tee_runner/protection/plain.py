"""No protection: the rows themselves. The baseline for speed and the control for attacks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tee_runner.protection.base import (
    Float32,
    ForwardSession,
    Linear,
    MaskOptions,
    Protection,
    require_finite,
)
from tee_runner.protection.gelo.kernels import row_scales, to_half, to_half_serial, unscale_rows
from tee_runner.protection.gelo.row_offload import RowLink, RowOffloads, ask_plain
from tee_runner.worker.transport import Transport

_SERIAL_ELEMENTS = 1 << 15
# Row norms are brought into [1, 2): far from both ends of f16.
_ONE = np.float32(1.0)
_UNMIXED = np.ones(1, np.float32)


class _PlainSession(ForwardSession):
    def __init__(self, protection: Plain) -> None:
        self._protection = protection

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        n, protection = len(rows), self._protection
        if n == 1:
            link = protection.single.link(protection.integrity, weight, 1)
            if link is not None:
                self._row(link, rows, out)
                return
        scales = np.empty(n, dtype=np.float32)
        row_scales(rows, scales)
        operand = protection.operand(weight, n)
        convert = to_half_serial if rows.size <= _SERIAL_ELEMENTS else to_half
        convert(rows, scales, operand)
        result = protection.exchange(weight, n)
        require_finite(unscale_rows(result, scales, _ONE, out), weight)

    def _row(self, link: RowLink, rows: Float32, out: Float32) -> None:
        protection = self._protection
        begin = time.perf_counter_ns()
        factor, asleep = ask_plain(rows, link.words, link.bell, begin, protection.single.tally)
        if asleep:
            protection.single.wake()
        protection.single.hear(link, protection.integrity, _UNMIXED, factor, out, 0)

    def wipe(self) -> None:
        self._protection.single.settle(self._protection.profile)


class Plain(Protection):
    """The worker sees everything. Never for real prompts."""

    name = "plain"
    warning = "plain: the worker sees every activation in clear. For measurements only."

    def __init__(self, transport: Transport, *, masks: MaskOptions | None = None) -> None:
        super().__init__(transport, masks=masks)
        self.single = RowOffloads(transport)

    @classmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """See :meth:`Protection.operand_rows`."""
        return sum(counts)

    def forward_session(self) -> ForwardSession:
        """See :meth:`Protection.forward_session`."""
        return _PlainSession(self)
