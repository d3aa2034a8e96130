"""What a weight's bytes are on the wire, and what it is multiplied by."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from gelo.header import OperandKind


class WeightFormat(IntEnum):
    """As ``WeightRef.format`` of the protocol: ``(d_out, d_in)`` values, little-endian, row-major."""

    FLOAT16 = 0
    INT8 = 1
    INT16 = 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return _DTYPES[self]

    @property
    def item_bytes(self) -> int:
        """Size of a value."""
        return _DTYPES[self].itemsize

    @property
    def kind(self) -> OperandKind:
        """Of the operands that a weight of this format takes."""
        return OperandKind.HALF if self == WeightFormat.FLOAT16 else OperandKind.WORDS

    @classmethod
    def of(cls, dtype: np.dtype[Any]) -> WeightFormat:
        """The format of arrays of ``dtype``.

        Raises:
            ValueError: there is none.
        """
        for known in cls:
            if known.dtype == dtype:
                return known
        raise ValueError(f"weights are float16, int8 or int16, not {dtype}")


_DTYPES = {
    WeightFormat.FLOAT16: np.dtype(np.float16),
    WeightFormat.INT8: np.dtype(np.int8),
    WeightFormat.INT16: np.dtype(np.int16),
}
