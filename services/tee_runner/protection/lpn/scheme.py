"""`lpn`: quantised rows plus a mask that is pseudorandom under LPN with a public matrix.

A row x of small integers goes out as y = x + r modulo 2^32, r = e + f·G, with G public and e, f sparse,
secret and used once. The product comes back as y·Wᵀ, of which R = r·Wᵀ = e·Wᵀ + f·P is taken off; P = G·Wᵀ
is public and made once. See docs/lpn.md.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from typing import ClassVar

import numba

from tee_runner.errors import UnsupportedModelError
from tee_runner.protection.base import Linear, MaskOptions, SchemeOptions
from tee_runner.protection.lpn import parameters as lpn_parameters
from tee_runner.protection.lpn.bank import Bank, Banks, Blinding, Source, Tools
from tee_runner.protection.lpn.matrix import SEED, public_matrix
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.lpn.parameters import LpnParameters
from tee_runner.protection.lpn.pool import CHUNK_ROWS, PoolCache, provide_pool
from tee_runner.protection.lpn.ring import RingProtection, RingStore
from tee_runner.protection.rng import SecretKey
from tee_runner.worker.transport import Transport

log = logging.getLogger(__name__)

# Column panels of one piece of idle work: below a millisecond on one core.
_IDLE_PANELS = 64
# Column panels for each thread between two looks for the worker's answer: some 25 µs.
_PANELS_MEANWHILE = 2


class Lpn(RingProtection):
    """Every operand is pseudorandom: the worker learns nothing it could not compute alone."""

    name = "lpn"
    blinded: ClassVar[bool] = True
    provision_rows: ClassVar[int] = CHUNK_ROWS

    def __init__(
        self, transport: Transport, *, masks: MaskOptions | None = None, options: LpnOptions | None = None,
        store: RingStore | None = None, key: SecretKey | None = None, chosen: Collection[LpnParameters] = (),
    ) -> None:  # fmt: skip
        """``key`` and ``chosen``, parameters for some widths, are for tests and measurements."""
        super().__init__(transport, masks=masks, options=options, store=store, key=key)
        self._chosen = {parameters.d: parameters for parameters in chosen}
        self._tools = Tools(self.key.stream("lpn"))
        self.banks = Banks()
        self._panels_meanwhile = _PANELS_MEANWHILE * numba.get_num_threads()

    @classmethod
    def parameters_for(cls, widths: Collection[int], options: SchemeOptions) -> dict[str, int | float | str]:
        """See :meth:`Protection.parameters_for`: seed, the least level, and (k, w_f, w_e) by width.

        Raises:
            UnsupportedModelError: a width cannot reach the level asked for.
        """
        chosen = [parameters_for(d, options.lpn) for d in sorted(set(widths))]
        return {
            **super().parameters_for(widths, options),
            "matrix_seed": SEED,
            # Rounded down: never more than there is.
            "security_bits": math.floor(10 * min(p.bits for p in chosen)) / 10,
            **{f"width_{p.d}": f"k {p.k}, w_f {p.w_f}, w_e {p.w_e}" for p in chosen},
        }

    @property
    def tools(self) -> Tools:
        """Counters of sweeps."""
        return self._tools

    @classmethod
    def held_bytes(cls, shapes: Sequence[tuple[int, int]], options: SchemeOptions) -> int:
        """See :meth:`Protection.held_bytes`: weights, pools, public matrices and banks."""
        k = {d_in: parameters_for(d_in, options.lpn).k for d_in, _ in shapes}
        pools = sum(4 * k[d_in] * d_out for d_in, d_out in shapes)
        matrices = sum(4 * rows * d_in for d_in, rows in k.items())
        banks = 4 * options.lpn.bank_rows * sum(map(sum, shapes))
        return super().held_bytes(shapes, options) + pools + matrices + banks

    def provision(self, weights: Sequence[Linear], *, probes: int = 0) -> None:
        """See :meth:`Protection.provision`; pools come from the disk or the worker, and are verified."""
        super().provision(weights, probes=probes)
        begin = time.perf_counter()
        cache = PoolCache(self.options.pool_directory)
        stream = self.key.stream("pool")
        total = sum(4 * self._parameters(w.d_in).k * w.d_out for w in weights)
        done = 0
        for linear in weights:
            parameters = self._parameters(linear.d_in)
            matrix = self.store.matrices.get(linear.d_in)
            if matrix is None:
                matrix = self.store.matrices[linear.d_in] = public_matrix(linear.d_in, parameters.k)
            weight = self.weights[linear.weight_id]
            if weight.pool is None:
                provide_pool(self.transport, weight, matrix, parameters.k, cache, stream)
            source = Source(weight, matrix, parameters, self._tools)
            self.banks.add(linear.weight_id, Bank(source, self.options.bank_rows))
            done += 4 * parameters.k * linear.d_out
            self.progress("pools", done, total)
        log.info(
            "pools: %d MB in %.1f s, %d of %d from disk; blinding made ahead: %d MB",
            total // 1_000_000,
            time.perf_counter() - begin,
            cache.hits,
            len(weights),
            sum(bank.nbytes for bank in self.banks) // 1_000_000,
        )

    def masks_for(self, weight: Linear, rows: int) -> list[Blinding]:
        """See :meth:`RingProtection.masks_for`."""
        return self.banks.take(weight.weight_id, rows)

    def meanwhile(self) -> None:
        """See :meth:`RingProtection.meanwhile`: sweeps that are due, until the answer is there.

        Only beside a worker with processors of its own. How much is done depends on the worker's speed
        and on shapes.
        """
        super().meanwhile()
        if not self.transport.worker_apart:
            return
        begin = time.perf_counter_ns()
        while not self.transport.answered() and self.banks.work(self._panels_meanwhile):
            pass
        self.profile.add("shield", time.perf_counter_ns() - begin)

    def end_pass(self) -> None:
        """See :meth:`RingProtection.end_pass`: pays for the next sweeps."""
        begin = time.perf_counter_ns()
        self.banks.end_pass()
        self.profile.add("shield", time.perf_counter_ns() - begin)

    def idle(self) -> bool:
        """See :meth:`Protection.idle`."""
        return self.banks.idle(_IDLE_PANELS)

    def close(self) -> None:
        """See :meth:`Protection.close`."""
        super().close()
        self.banks.wipe()
        self._tools.close()

    def _parameters(self, d_in: int) -> LpnParameters:
        known = self._chosen.get(d_in)
        if known is None:
            known = self._chosen[d_in] = parameters_for(d_in, self.options)
        return known


def parameters_for(d_in: int, options: LpnOptions) -> LpnParameters:
    """The parameters of one input width.

    Raises:
        UnsupportedModelError: none reaches the level asked for within the memory.
    """
    try:
        return lpn_parameters.choose(
            d_in, min_bits=options.min_bits, bytes_per_parameter=options.bytes_per_parameter
        )
    except ValueError as error:
        raise UnsupportedModelError(
            f"No LPN parameters of {options.min_bits:g} bits for rows of {d_in} values: {error}.",
            remedy="Allow more memory with --lpn-memory.",
        ) from error
