"""Blinding made ahead: rows r = e + f·G and R = r·Wᵀ, ready to be used once.

A bank is a ring of rows of one weight, filled 64 at a time by a sweep. While nothing runs, all banks
are filled. Once they run low, each pass pays for a part of the sweeps that are due, the emptiest
bank's first, so that they are spread over the tokens of a long answer: while the worker computes, if it
has processors of its own, and what is left at the end of the pass. What a long prompt needs beyond its
bank is swept in one go into memory shared by all weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.memory import pages
from tee_runner.protection.lpn.layout import LANES, TILE_ROWS, panels_of
from tee_runner.protection.lpn.parameters import LpnParameters
from tee_runner.protection.lpn.pool import RingWeight
from tee_runner.protection.lpn.slots import SlotDraw, SlotPlan
from tee_runner.protection.lpn.sweep_kernels import sweep
from tee_runner.protection.rng import SecretStream

UInt32 = NDArray[np.uint32]

# A pass with more rows of a sequence than this is a prompt's.
_DECODE_ROWS = 32
# Rows that should be left when the sweeps that are due are done.
_SPARE_ROWS = 2


@dataclass(frozen=True, slots=True)
class Blinding:
    """``count`` rows from ``first`` on of r ``(m, >= d_in)`` and R ``(m, >= d_out)``, for one use."""

    r: UInt32
    R: UInt32
    first: int
    count: int


@dataclass(slots=True)
class Slots:
    """The secrets of some tiles, laid out for one sweep."""

    f_places: UInt32
    f_values: UInt32
    e_places: UInt32
    e_values: UInt32

    @classmethod
    def empty(cls, tiles: int, f: SlotPlan, e: SlotPlan) -> Slots:
        """All zero."""
        first, second = (tiles, f.groups, f.quota), (tiles, e.groups, e.quota)
        return cls(
            pages(first, np.uint32),
            pages(first, np.uint32),
            pages(second, np.uint32),
            pages(second, np.uint32),
        )

    def wipe(self) -> None:
        """Overwrite them."""
        for array in (self.f_places, self.f_values, self.e_places, self.e_values):
            array.fill(0)


class Source:
    """Where the blinding of one weight comes from: its public data, and how secrets are drawn."""

    def __init__(self, weight: RingWeight, matrix: UInt32, parameters: LpnParameters, tools: Tools) -> None:
        if weight.pool is None:
            raise ValueError(f"{weight.linear.name} has no pool")
        self.weight = weight
        self.matrix = matrix
        self.pool = weight.pool
        self.tools = tools
        self.f = tools.draw(SlotPlan.of(parameters.k, parameters.w_f, 4))
        self.e = tools.draw(SlotPlan.of(parameters.d, parameters.w_e, weight.panels.itemsize))
        self.panels = len(matrix) + len(weight.panels)

    @property
    def widths(self) -> tuple[int, int]:
        """Words of a row of r and of R, in whole panels."""
        linear = self.weight.linear
        return panels_of(linear.d_in) * LANES, panels_of(linear.d_out) * LANES


class Tools:
    """What all banks of a session share: the stream, and scratch by plan. One thread uses it."""

    def __init__(self, stream: SecretStream) -> None:
        self.stream = stream
        self._draws: dict[SlotPlan, SlotDraw] = {}
        # Rows of long prompts, for one offload at a time.
        self._burst: list[UInt32] = [pages((0,), np.uint32), pages((0,), np.uint32)]
        self.tiles: UInt32 = pages((numba.get_num_threads(), TILE_ROWS, LANES), np.uint32)
        self._slots: dict[tuple[int, SlotPlan, SlotPlan], list[Slots]] = {}
        self.sweeps = 0
        self.repeated = 0

    def draw(self, plan: SlotPlan) -> SlotDraw:
        """The drawer of ``plan``."""
        if plan not in self._draws:
            self._draws[plan] = SlotDraw(plan)
        return self._draws[plan]

    def slots(self, tiles: int, f: SlotPlan, e: SlotPlan) -> Slots:
        """Zero slots for ``tiles`` tiles; to be given back with :meth:`recycle`."""
        spare = self._slots.setdefault((tiles, f, e), [])
        return spare.pop() if spare else Slots.empty(tiles, f, e)

    def recycle(self, slots: Slots, f: SlotPlan, e: SlotPlan) -> None:
        """Overwrite and keep slots for another sweep."""
        slots.wipe()
        self._slots[len(slots.f_places), f, e].append(slots)

    def burst(self, widths: tuple[int, int], rows: int) -> tuple[UInt32, UInt32]:
        """Memory for ``rows`` rows of r and R of these widths, valid until the next call."""
        for index, width in enumerate(widths):
            if self._burst[index].size < rows * width:
                self._burst[index].fill(0)
                self._burst[index] = pages((rows * width,), np.uint32)
        r, R = (
            memory[: rows * width].reshape(rows, width)
            for memory, width in zip(self._burst, widths, strict=True)
        )
        return r, R

    def wipe(self) -> None:
        """Overwrite scratch and step the stream, so that no used secret can be drawn again."""
        for draw in self._draws.values():
            draw.wipe()
        self.tiles.fill(0)
        self.stream.ratchet()

    def close(self) -> None:
        """:meth:`wipe`, and what an interrupted offload may have left."""
        self.wipe()
        for memory in self._burst:
            memory.fill(0)


class Sweep:
    """One sweep in progress: fresh secrets, and how many column panels are done."""

    def __init__(self, source: Source, r: UInt32, R: UInt32) -> None:
        """``r`` and ``R``, a multiple of 64 rows each, are what to overwrite."""
        self._source = source
        self._r, self._R = r, R
        self._next = 0
        plans = source.f.plan, source.e.plan
        tiles = len(r) // TILE_ROWS
        self._slots = source.tools.slots(tiles, *plans)
        # What did not fit the quotas, by tile: hardly ever anything.
        self._rest: list[tuple[int, Slots]] = []
        stream = source.tools.stream
        for tile in range(tiles):
            source.f.draw(stream)
            source.e.draw(stream)
            needed = _lay_out(source, 0, self._slots, tile)
            for number in range(1, needed):
                more = source.tools.slots(1, *plans)
                _lay_out(source, number, more, 0)
                self._rest.append((tile, more))
        source.tools.sweeps += 1
        source.tools.repeated += len(self._rest) > 0
        source.tools.wipe()

    @property
    def panels_left(self) -> int:
        """Column panels that are still to be swept."""
        return self._source.panels - self._next

    def run(self, panels: int | None = None) -> bool:
        """Sweep the next ``panels`` column panels, or all. True when the rows are ready.

        The secrets are overwritten then.
        """
        source = self._source
        first = self._next
        last = self._next = source.panels if panels is None else min(source.panels, first + panels)
        self._sweep(first, last, self._slots, self._r, self._R, again=False)
        for tile, slots in self._rest:
            rows = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
            self._sweep(first, last, slots, self._r[rows], self._R[rows], again=True)
        if last < source.panels:
            return False
        self.wipe()
        return True

    def _sweep(self, first: int, last: int, slots: Slots, r: UInt32, R: UInt32, *, again: bool) -> None:
        source = self._source
        sweep(
            first, last, source.matrix, source.pool, source.weight.panels, source.f.plan.group,
            slots.f_places, slots.f_values, source.e.plan.group, slots.e_places, slots.e_values,
            source.tools.tiles, r, R, again,
        )  # fmt: skip

    def wipe(self) -> None:
        """Overwrite the secrets."""
        plans = self._source.f.plan, self._source.e.plan
        for slots in (self._slots, *(rest for _, rest in self._rest)):
            self._source.tools.recycle(slots, *plans)
        self._rest.clear()


def _lay_out(source: Source, number: int, slots: Slots, tile: int) -> int:
    f = source.f.lay_out(number, slots.f_places[tile], slots.f_values[tile])
    e = source.e.lay_out(number, slots.e_places[tile], slots.e_values[tile])
    return max(f, e)


class Bank:
    """Ready rows of one weight, first in, first out."""

    def __init__(self, source: Source, capacity: int) -> None:
        """``capacity`` rows, a multiple of 64 and at least 128.

        Raises:
            ValueError: another capacity.
        """
        if capacity % TILE_ROWS or capacity < 2 * TILE_ROWS:
            raise ValueError(f"a bank holds a multiple of {TILE_ROWS} rows, at least {2 * TILE_ROWS}")
        self._source = source
        self._capacity = capacity
        self._r, self._R = (pages((capacity, width), np.uint32) for width in source.widths)
        # Rows taken and rows filled since the start; a place of the ring is one modulo the capacity.
        self._taken = self._filled = 0
        # Rows taken last, whose R is still needed.
        self._held = 0
        self._sweep: Sweep | None = None
        self._sweeping = 0

    @property
    def ready(self) -> int:
        """Rows that can be taken."""
        return self._filled - self._taken

    @property
    def room(self) -> int:
        """Rows that can be filled, a multiple of 64."""
        return (self._capacity - self.ready - self._held) // TILE_ROWS * TILE_ROWS

    def fill(self, rows: int = 0) -> None:
        """Finish the sweep in progress, or sweep ``rows`` rows, all that there is room for if 0."""
        self._begin(rows)
        if self._sweep is not None and self._sweep.run():
            self._finish()

    @property
    def nbytes(self) -> int:
        """Memory of the rows."""
        return self._r.nbytes + self._R.nbytes

    @property
    def low(self) -> bool:
        """Whether the next sweep is due."""
        return self.ready < TILE_ROWS

    @property
    def panels_due(self) -> int:
        """Column panels to sweep until there are 64 more rows."""
        return self._source.panels if self._sweep is None else self._sweep.panels_left

    def advance(self, panels: int) -> int:
        """Sweep at most ``panels`` column panels; how many it were, 0 if there is no room for more rows."""
        self._begin(TILE_ROWS)
        if self._sweep is None:
            return 0
        panels = min(panels, self._sweep.panels_left)
        if self._sweep.run(panels):
            self._finish()
        return panels

    def take(self, n: int) -> list[Blinding]:
        """``n`` rows, never to be given again.

        They are valid until the next :meth:`take` of any bank, or until :meth:`release`.
        """
        taken: list[Blinding] = []
        self.release()
        if n > self.ready and n >= TILE_ROWS:
            taken.append(self._swept(n // TILE_ROWS * TILE_ROWS))
            n %= TILE_ROWS
        if n > self.ready:
            self.fill(TILE_ROWS)
        while n:
            first = self._taken % self._capacity
            count = min(n, self._capacity - first)
            self._taken += count
            self._held += count
            n -= count
            taken.append(Blinding(self._r, self._R, first, count))
        return taken

    def release(self) -> None:
        """What was taken is no longer needed: it can be overwritten."""
        self._held = 0

    def _swept(self, rows: int) -> Blinding:
        r, R = self._source.tools.burst(self._source.widths, rows)
        Sweep(self._source, r, R).run()
        return Blinding(r, R, 0, rows)

    def wipe(self) -> None:
        """Overwrite everything. Nothing can be taken until it is filled again."""
        if self._sweep is not None:
            self._sweep.wipe()
            self._sweep = None
        self._r.fill(0)
        self._R.fill(0)
        self._taken = self._filled = self._held = 0

    def _begin(self, rows: int) -> None:
        if self._sweep is not None or not self.room:
            return
        first = self._filled % self._capacity
        rows = min(rows or self.room, self.room, self._capacity - first)
        self._sweeping = rows
        self._sweep = Sweep(self._source, self._r[first : first + rows], self._R[first : first + rows])

    def _finish(self) -> None:
        self._filled += self._sweeping
        self._sweep = None


class Banks:
    """The banks of a session, by weight."""

    def __init__(self) -> None:
        self._banks: dict[int, Bank] = {}
        # The most rows that a weight took in this pass.
        self._rows = 0
        # Column panels that are due, and whose.
        self._owed = 0
        self._low: list[Bank] = []

    def __iter__(self) -> Iterator[Bank]:
        return iter(self._banks.values())

    def add(self, weight_id: int, bank: Bank) -> None:
        """Have a bank."""
        self._banks[weight_id] = bank

    def take(self, weight_id: int, rows: int) -> list[Blinding]:
        """See :meth:`Bank.take`."""
        self._rows = max(self._rows, rows)
        return self._banks[weight_id].take(rows)

    def end_pass(self) -> None:
        """Finish what is owed. Owe what keeps up with passes like this one; nothing after a prompt."""
        for bank in self:
            bank.release()
        while self.work(self._owed):
            pass
        rows, self._rows = self._rows, 0
        self._low = sorted((bank for bank in self if bank.low), key=lambda bank: bank.ready)
        if not self._low or not 0 < rows <= _DECODE_ROWS:
            return
        # Owed until the end of the next pass.
        rows_left = max(rows, self._low[0].ready - rows - _SPARE_ROWS)
        self._owed = math.ceil(rows * sum(bank.panels_due for bank in self._low) / rows_left)

    def work(self, panels: int) -> bool:
        """Do at most ``panels`` column panels of what is owed; False when there was nothing."""
        panels = min(panels, self._owed)
        for bank in self._low:
            # None where rows that are in use leave no room.
            if panels > 0 and bank.low and (done := bank.advance(panels)):
                self._owed -= done
                return True
        self._owed = 0
        return False

    def idle(self, panels: int) -> bool:
        """Sweep at most ``panels`` column panels of the emptiest bank; False when all are full."""
        return any(bank.advance(panels) for bank in sorted(self, key=lambda bank: bank.ready))

    def wipe(self) -> None:
        """Overwrite everything."""
        for bank in self:
            bank.wipe()
        self._banks.clear()
