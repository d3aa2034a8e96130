"""What `lpn` and `plain-int8` share: integers on the wire, exact products, exact checks."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.errors import GeloError
from tee_runner.memory import on_lines
from tee_runner.protection.base import (
    Float32,
    ForwardSession,
    Linear,
    MaskOptions,
    Protection,
    SchemeOptions,
)
from tee_runner.protection.lpn import online_kernels as kernels
from tee_runner.protection.lpn.bank import Blinding
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.lpn.pool import RingWeight
from tee_runner.protection.lpn.probes import Probe, Probes
from tee_runner.protection.lpn.quantise import quantise
from tee_runner.protection.rng import SecretKey
from tee_runner.worker.transport import Transport

# From this many rows on, kernels run on all threads.
PARALLEL_ROWS = 16
# Shapes of offloads whose views are kept: prompts have many lengths.
_MAX_VIEWS = 1 << 12
_NOTHING: NDArray[np.uint32] = np.zeros((0, 1), dtype=np.uint32)


class RingStore:
    """Public data of one model, made once and shared by the sessions that follow each other."""

    def __init__(self) -> None:
        self.weights: dict[int, RingWeight] = {}
        self.matrices: dict[int, NDArray[np.uint32]] = {}

    def weight(self, linear: Linear, *, wide: bool) -> RingWeight:
        """The quantised, packed weight of ``linear``.

        Raises:
            ValueError: the runner has no values of it.
        """
        known = self.weights.get(linear.weight_id)
        if known is None:
            if linear.load is None:
                raise ValueError(f"{linear.name} cannot be used without its values")
            known = RingWeight.of(linear, quantise(linear.load(), wide=wide))
            self.weights[linear.weight_id] = known
        return known


@dataclass(slots=True)
class _Offload:
    """One shape of offload: its weight's data and views of private memory."""

    levels: np.float32
    scales: Float32
    probe: Probe
    x: NDArray[np.int32]
    row_scales: Float32
    expected: NDArray[np.int64]
    sums: NDArray[np.int64]


class RingProtection(Protection):
    """Quantised rows, products modulo 2^32, results checked exactly. The operand is up to the scheme."""

    operand_item_bytes: ClassVar[int] = 4
    rounded_results: ClassVar[bool] = False
    # Whether the operand is the rows plus a mask.
    blinded: ClassVar[bool]

    def __init__(
        self, transport: Transport, *, masks: MaskOptions | None = None, options: LpnOptions | None = None,
        store: RingStore | None = None, key: SecretKey | None = None,
    ) -> None:  # fmt: skip
        """``key`` is for tests."""
        super().__init__(transport, masks=masks)
        self.options = options or LpnOptions()
        self.store = store or RingStore()
        self.key = key or SecretKey()
        self.weights: dict[int, RingWeight] = {}
        self.probes = Probes(0, self.key.stream("probes"))
        self._offloads: dict[tuple[int, int], _Offload] = {}
        self._x: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._u: NDArray[np.int32] = np.zeros((numba.get_num_threads(), kernels.CHUNK), dtype=np.int32)
        self._x_used = 0
        # By row: scales, and what probes expect and find.
        self._row_scales = np.zeros(0, dtype=np.float32)
        self._checks: NDArray[np.int64] = np.zeros((2, 0, 0), dtype=np.int64)
        self._current: _Offload | None = None
        transport.meanwhile = self.meanwhile

    @classmethod
    def open(cls, transport: Transport, options: SchemeOptions, store: object = None) -> Protection:
        """See :meth:`Protection.open`."""
        opened = cls(transport, masks=options.masks)
        opened.options = options.lpn
        if isinstance(store, RingStore):
            opened.store = store
        return opened

    @classmethod
    def new_store(cls) -> object:
        """See :meth:`Protection.new_store`."""
        return RingStore()

    @classmethod
    def wire_weight(cls, weight: NDArray[np.float16], options: SchemeOptions) -> NDArray[Any]:
        """See :meth:`Protection.wire_weight`."""
        return quantise(weight, wide=options.lpn.wide_weights).values

    @classmethod
    def parameters_for(cls, widths: Collection[int], options: SchemeOptions) -> dict[str, int | float | str]:
        """See :meth:`Protection.parameters_for`: the bytes of a weight's value."""
        return {"weight_bytes": 2 if options.lpn.wide_weights else 1}

    @classmethod
    def held_bytes(cls, shapes: Sequence[tuple[int, int]], options: SchemeOptions) -> int:
        """See :meth:`Protection.held_bytes`: the integers of the weights."""
        item_bytes = 2 if options.lpn.wide_weights else 1
        return sum(d_in * d_out * item_bytes for d_in, d_out in shapes)

    @classmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """See :meth:`Protection.operand_rows`."""
        return sum(counts)

    def provision(self, weights: Sequence[Linear], *, probes: int = 0) -> None:
        """See :meth:`Protection.provision`."""
        self.probes = Probes(probes, self.key.stream("probes"))
        for linear in weights:
            weight = self.store.weight(linear, wide=self.options.wide_weights)
            self.weights[linear.weight_id] = weight
            self.probes.add(linear.weight_id, weight.panels, linear.d_in, linear.d_out)

    def forward_session(self) -> ForwardSession:
        """See :meth:`Protection.forward_session`."""
        return _RingSession(self)

    def masks_for(self, weight: Linear, rows: int) -> list[Blinding]:
        """What to add to ``rows`` rows, and to take from their products."""
        return [Blinding(_NOTHING, _NOTHING, 0, rows)]

    def linear(self, weight: Linear, rows: Float32, out: Float32) -> None:
        """One offload; see :meth:`ForwardSession.linear`."""
        n = len(rows)
        profile = self.profile
        begin = time.perf_counter_ns()
        masks = self.masks_for(weight, n)
        ready = time.perf_counter_ns()
        profile.add("shield", ready - begin)
        offload = self._offload(weight, n)
        operand = self.transport.operand_words(n, weight.d_in)
        bad = False
        row = 0
        for mask in masks:
            span = slice(row, row + mask.count)
            row += mask.count
            kernel = kernels.blind if mask.count < PARALLEL_ROWS else kernels.blind_parallel
            bad |= kernel(
                rows[span], offload.levels, self.blinded, mask.r, mask.first, offload.x[span],
                offload.row_scales[span], operand[span],
            )  # fmt: skip
        if bad:
            raise GeloError(f"An activation for {weight.name} is not finite.")
        profile.add("mask apply", time.perf_counter_ns() - ready)
        self._current = offload
        result = self.profiled(self.transport.exchange_words, weight, n)
        self.expect()
        begin = time.perf_counter_ns()
        wrong = row = 0
        for mask in masks:
            span = slice(row, row + mask.count)
            row += mask.count
            kernel = kernels.unblind if mask.count < PARALLEL_ROWS else kernels.unblind_parallel
            wrong += kernel(
                result[span], self.blinded, mask.R, mask.first, offload.probe.v, offload.expected[span],
                offload.row_scales[span], offload.scales, self._u, offload.sums[span], out[span],
            )  # fmt: skip
        profile.add("check" if self.probes.count else "unapply", time.perf_counter_ns() - begin)
        if wrong:
            # With them go the shapes that hold overwritten probes.
            self._offloads.clear()
            raise self.probes.reject(weight.name)

    def meanwhile(self) -> None:
        """What is done while the worker computes."""
        self.expect()

    def expect(self) -> None:
        """Compute what the answer must be under the probes. Once per offload; more is idle."""
        offload, self._current = self._current, None
        if offload is None or not self.probes.count:
            return
        begin = time.perf_counter_ns()
        kernel = kernels.expect if len(offload.x) < PARALLEL_ROWS else kernels.expect_parallel
        kernel(offload.x, offload.probe.w, offload.expected)
        self.profile.add("check", time.perf_counter_ns() - begin)

    def _offload(self, weight: Linear, rows: int) -> _Offload:
        known = self._offloads.get((weight.weight_id, rows))
        self._x_used = max(self._x_used, rows * weight.d_in)
        if known is not None:
            return known
        ring = self.weights[weight.weight_id]
        probe = self.probes.of(weight.weight_id)
        size = rows * weight.d_in
        if self._x.size < size or len(self._row_scales) < rows:
            self.wipe()
            self._x_used = size
            self._x = on_lines(max(size, self._x.size), np.int32)
            self._x.fill(0)
            self._row_scales = np.zeros(max(rows, len(self._row_scales)), dtype=np.float32)
            shape = (2, len(self._row_scales), self.probes.count)
            self._checks = np.zeros(shape, dtype=np.int64)
            self._offloads.clear()
        if len(self._offloads) >= _MAX_VIEWS:
            self._offloads.clear()
        expected, sums = self._checks
        known = self._offloads[weight.weight_id, rows] = _Offload(
            levels=np.float32(ring.levels), scales=ring.scales, probe=probe,
            x=self._x[:size].reshape(rows, weight.d_in), row_scales=self._row_scales[:rows],
            expected=expected[:rows], sums=sums[:rows],
        )  # fmt: skip
        return known

    def wipe(self) -> None:
        """Overwrite what the last pass left in working memory."""
        self._x[: self._x_used] = 0
        self._x_used = 0
        for array in (self._u, self._row_scales, self._checks):
            array.fill(0)

    def end_pass(self) -> None:
        """Work that belongs to a pass and can wait until its end."""

    def close(self) -> None:
        """See :meth:`Protection.close`."""
        super().close()
        self.wipe()
        self.probes.wipe()
        self._offloads.clear()


class _RingSession(ForwardSession):
    def __init__(self, protection: RingProtection) -> None:
        self._protection = protection

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        self._protection.linear(weight, rows, out)

    def wipe(self) -> None:
        self._protection.wipe()
        self._protection.end_pass()


class PlainInt8(RingProtection):
    """The quantised rows themselves. The bit-exact control of `lpn`; never for real prompts."""

    name = "plain-int8"
    warning = "plain-int8: the worker sees every activation in clear. For measurements only."
    blinded = False
