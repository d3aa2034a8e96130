"""The real worker, which lies once when it is told to.

python -m tests.e2e.lying_worker CONTROL ADDRESS

A file CONTROL with a lie's name and a number n makes the n-th offload from then on a lie.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gelo.header import OffloadHeader
from gelo.slab import Doorbell, Slab
from gpu_worker import server as server_module
from gpu_worker.engines import create_engine
from gpu_worker.session import Session, Sessions

Operand = NDArray[np.float16] | NDArray[np.uint32]
Result = NDArray[np.float32] | NDArray[np.uint32]

control: Path


def flip(result: Result, bit: int) -> None:
    """Flip one bit of the largest element; of words, all as good as random, of the first."""
    words = result.dtype == np.uint32
    place = (0, 0) if words else np.unravel_index(np.abs(result).argmax(), result.shape)
    result.view(np.uint32)[place] ^= np.uint32(1 << bit)


def swap_rows(result: Result) -> None:
    result[[0, 1]] = result[[1, 0]]


def zero_column(result: Result) -> None:
    """The column that matters most."""
    result[:, np.square(result.astype(np.float64)).sum(axis=0).argmax()] = 0


def scale(result: Result) -> None:
    """By 1.01; words by 3."""
    result *= result.dtype.type(1.01 if result.dtype == np.float32 else 3)


def negate_row(result: Result) -> None:
    np.negative(result[0], out=result[0])


ALTERED: dict[str, Callable[[Result], None]] = {
    **{f"bit {bit}": lambda result, bit=bit: flip(result, bit) for bit in (31, 30, 26, 23, 22)},
    "swapped rows": swap_rows,
    "zeroed column": zero_column,
    "scaled result": scale,
    "negated row": negate_row,
}
LIES = (*ALTERED, "replayed answer", "wrong weight", "changed operand", "changed after the fact")
# In a float32 the lowest bits are rounding errors; a word is right or wrong.
ALTERED |= {f"bit {bit}": lambda result, bit=bit: flip(result, bit) for bit in (0, 15)}
WORD_LIES = (*LIES, "bit 0", "bit 15")


class LyingSessions(Sessions):
    """Honest until its moment, and afterwards."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._previous: dict[tuple[int, int], Result] = {}
        self._lie = ""
        self._left = 0

    def loop(self, session: Session, slab: Slab, doorbell: Doorbell) -> None:
        """Every offload comes by :meth:`execute`."""

    def execute(
        self, session: Session, header: OffloadHeader, operand: Operand, result: Result
    ) -> OffloadHeader:
        """See :meth:`Sessions.execute`."""
        if control.exists():
            self._lie, _, left = control.read_text().rpartition(" ")
            self._left = int(left)
            control.unlink()
        self._left -= 1
        if not self._lie or self._left > 0:
            answer = super().execute(session, header, operand, result)
            self._previous[header.weight_id, header.rows] = result.copy()
            return answer
        lie, self._lie = self._lie, ""
        if lie == "wrong weight":
            return self._with_wrong_weight(session, header, operand, result)
        if lie == "changed operand":
            changed = operand.copy()
            changed *= changed.dtype.type(0.5 if changed.dtype == np.float16 else 3)
            if operand.flags.writeable:
                operand[...] = changed
            return super().execute(session, header, changed, result)
        answer = super().execute(session, header, operand, result)
        if lie == "replayed answer":
            result[...] = self._previous[header.weight_id, header.rows]
        elif lie == "changed after the fact":
            threading.Thread(target=self._scribble, args=(session, result), daemon=True).start()
        else:
            ALTERED[lie](result)
        return answer

    def _with_wrong_weight(
        self, session: Session, header: OffloadHeader, operand: Operand, result: Result
    ) -> OffloadHeader:
        """The same kind of weight of another layer; the LM head has none, so the next offload lies."""
        other = (header.weight_id + 4) % (len(session.weights) - 1)
        weight = session.weights[other]
        if (weight.d_in, weight.d_out) != (header.d_in, header.d_out):
            self._lie, self._left = "wrong weight", 1
            return super().execute(session, header, operand, result)
        answer = super().execute(session, header._replace(weight_id=other), operand, result)
        return answer._replace(weight_id=header.weight_id)

    def _scribble(self, session: Session, result: Result) -> None:
        """Write into the shared result area, right and wrong by turns, while the session lasts."""
        right = result.copy()
        while session.session_id in self._open:
            result[...] = -right
            result[...] = right


def main() -> None:
    """See the module."""
    global control
    logging.basicConfig(level="INFO")
    control = Path(sys.argv[1])
    server_module.Sessions = LyingSessions  # type: ignore[misc]
    server_module.serve(create_engine("cpu"), server_module.WorkerSettings(address=sys.argv[2]))


if __name__ == "__main__":
    main()
