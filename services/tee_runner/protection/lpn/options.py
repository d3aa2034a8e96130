"""How the schemes on quantised rows run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Bytes of pool and weights per weight element that a runner spends unless told otherwise.
DEFAULT_MEMORY: Final = 6.0
DEFAULT_MIN_BITS: Final = 128.0
DEFAULT_BANK_ROWS: Final = 192


@dataclass(frozen=True, slots=True, kw_only=True)
class LpnOptions:
    """Options of `lpn`; `plain-int8` has only ``wide_weights`` of them.

    ``bytes_per_parameter`` bounds the runner's memory for pools and weights, ``min_bits`` is the
    security level below which nothing starts, ``wide_weights`` keeps weights in 16 instead of 8 bits,
    ``bank_rows`` is how many rows are made ahead for each weight, a multiple of 64 and at least 128,
    and ``pool_directory`` keeps pools on disk, which is public data.
    """

    bytes_per_parameter: float = DEFAULT_MEMORY
    min_bits: float = DEFAULT_MIN_BITS
    wide_weights: bool = False
    bank_rows: int = DEFAULT_BANK_ROWS
    pool_directory: Path | None = None
