"""Memory for packed weights: aligned, zero, apart from each other, and given back."""

from __future__ import annotations

import gc
import mmap
import resource
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engines import memory
from gpu_worker.engines.memory import Arena, aligned_bytes


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3 << 20), min_size=1, max_size=40))
def test_arrays_are_aligned_zero_and_apart(sizes: list[int]) -> None:
    arena = Arena()
    arrays = [arena.take(size) for size in sizes]
    assert [array.size for array in arrays] == sizes
    spans = sorted((int(array.ctypes.data), array.size) for array in arrays)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    for value, array in enumerate(arrays, 1):
        assert not array[:: 1 << 12].any()
        assert not array[-64:].any()
        array[::512] = value
    assert [int(array[0]) for array in arrays] == [value % 256 for value in range(1, len(arrays) + 1)]


@pytest.mark.parametrize("size", [1, 64, (8 << 20) - 63, 8 << 20, (32 << 20) + 1])
def test_small_arrays_share_a_piece_and_large_ones_do_not(size: int) -> None:
    arena = Arena()
    first, second = arena.take(size), arena.take(size)
    assert first.base is not None
    assert second.base is not None
    apart = int(second.ctypes.data) - int(first.ctypes.data)
    shared = size <= (8 << 20) - 64
    if shared:
        assert apart == -(-size // 64) * 64
    else:
        assert abs(apart) >= size
    second[-1] = 3
    assert not first[-1]


def test_a_piece_goes_with_its_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    honest = mmap.mmap

    class Watched(honest):
        """Can be watched."""

    def watch(*arguments: Any, **options: Any) -> Watched:
        made = Watched(*arguments, **options)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(memory.mmap, "mmap", watch)
    arena = Arena()
    first, second = arena.take(5 << 20), arena.take(5 << 20)
    del arena, first
    gc.collect()
    assert [piece() is not None for piece in alive] == [True]
    assert not second.any()
    del second
    gc.collect()
    assert [piece() is not None for piece in alive] == [False]


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limit[1]))
    try:
        with pytest.raises(MemoryError):
            Arena().take(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_aligned_bytes(size: int) -> None:
    array = aligned_bytes(size)
    assert array.size == size
    assert array.dtype == np.uint8
    assert array.ctypes.data % 64 == 0
    assert not array.any()
