"""The table of per-layer embeddings, quantised to int8 and held in the runner's own memory.

A token picks a row, so reading a row through a file mapping would show the host, by which disk
blocks are fetched, what the token is. The checkpoint is therefore read once, from end to end, into
a private anonymous mapping that is never written to disk. What remains is the page fault pattern
of a hypervisor that unmaps guest pages, coarse to 2 MiB where huge pages are to be had.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.oblivious import gather
from tee_runner.decoder.weights import Float32
from tee_runner.errors import InvalidRequestError, ModelError

_PEAK: Final = np.float32(127.0)
_TINY: Final = np.finfo(np.float32).tiny
# Elements quantised at a time: the float32 block stays within a core's cache.
_BLOCK: Final = 1 << 18

Progress = Callable[[int, int], None]


class PerLayerTable:
    """``vocab`` rows of ``layers`` parts of ``width`` int8, each part with a float32 scale.

    A part's largest magnitude is 127 scales, so an element is off by half a scale at most: of 256
    normal elements, by 0.6 % of their norm in all.
    """

    def __init__(
        self, source: NDArray[Any], *, layers: int, name: str, progress: Progress | None = None,
        oblivious: bool = False,
    ) -> None:  # fmt: skip
        """Quantise ``source`` ``(vocab, layers·width)``, of any float dtype; ``progress`` is told bytes.

        With ``oblivious``, lookups read the whole table (:mod:`tee_runner.decoder.oblivious`).

        Raises:
            ModelError: a value is not finite; ``name`` names the tensor.
        """
        self.vocab, total = source.shape
        self._oblivious = oblivious
        self.layers, self.width = layers, total // layers
        self._values = _private(self.vocab * total).reshape(self.vocab, total)
        self._scales = np.empty((self.vocab, layers), dtype=np.float32)
        # Embedding modules of this family multiply by the root of their width.
        self._gain = np.float32(math.sqrt(self.width))
        step = max(1, _BLOCK // total)
        block, scratch = np.empty((2, step, total), dtype=np.float32)
        for first in range(0, self.vocab, step):
            count = min(step, self.vocab - first)
            np.copyto(block[:count], source[first : first + count], casting="same_kind")
            self._quantise(first, block[:count], scratch[:count], name)
            if progress is not None:
                progress((first + count) * total, self.vocab * total)
        self._values.flags.writeable = False
        self._scales.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._values.nbytes + self._scales.nbytes

    def gather(self, ids: NDArray[np.int64]) -> Float32:
        """The rows of token ids ``(n,)`` int64, times √width: ``(n, layers, width)`` float32.

        Raises:
            InvalidRequestError: an id has no row.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab):
            raise InvalidRequestError(f"A token id lies outside the per-layer vocabulary of {self.vocab}.")
        rows = (
            gather(self._values, ids, oblivious=self._oblivious)
            .astype(np.float32)
            .reshape(len(ids), self.layers, self.width)
        )
        scales = gather(self._scales, ids, oblivious=self._oblivious)
        rows *= (scales * self._gain)[:, :, None]
        return rows

    def _quantise(self, first: int, block: Float32, scratch: Float32, name: str) -> None:
        """Rows ``first ..`` from ``block`` ``(n, layers·width)``, in buffers that stay in the cache."""
        parts, work = (held.reshape(len(block), self.layers, self.width) for held in (block, scratch))
        scales = np.abs(parts, out=work).max(axis=2) / _PEAK
        if not np.isfinite(scales).all():
            raise ModelError(f"Tensor {name!r} holds values that are not finite.")
        scales[scales < _TINY] = 0.0  # their reciprocals would overflow
        self._scales[first : first + len(block)] = scales
        inverse = np.divide(np.float32(1.0), scales, out=np.zeros_like(scales), where=scales > 0.0)
        np.multiply(parts, inverse[:, :, None], out=work)
        self._values[first : first + len(block)] = np.rint(scratch, out=scratch)


def _private(nbytes: int) -> NDArray[np.int8]:
    """Anonymous memory outside any file and any core dump, in huge pages where there are some."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        if hasattr(mmap, advice):
            try:
                mapping.madvise(getattr(mmap, advice))
            except OSError:
                continue  # a kernel without it: the table works all the same
    return np.frombuffer(mapping, dtype=np.int8)
