"""`gelo-auto`: HD3 where padding to a power of two is cheap, DCT-IV elsewhere, block by block."""

from __future__ import annotations

from tee_runner.protection.gelo.base import SHIELD_ROWS, GeloProtection, Mask
from tee_runner.protection.gelo.dct4 import Dct4, dct4_mask
from tee_runner.protection.gelo.hd3 import Hd3, Hd3Mask

# HD3 may take this many times the rows that DCT-IV needs.
MAX_PADDING = 1.6


class Auto(GeloProtection):
    """The faster of the two fast families for each block."""

    name = "gelo-auto"

    @classmethod
    def family(cls, n: int) -> type[Hd3] | type[Dct4]:
        """The family for n data rows."""
        return Hd3 if Hd3.block_rows(n) <= MAX_PADDING * (n + SHIELD_ROWS) else Dct4

    @classmethod
    def block_rows(cls, n: int) -> int:
        """That of the block's family."""
        return cls.family(n).block_rows(n)

    def new_mask(self, n: int) -> Mask:
        """See :meth:`GeloProtection.new_mask`."""
        return Hd3Mask(self, n) if self.family(n) is Hd3 else dct4_mask(self, n)
