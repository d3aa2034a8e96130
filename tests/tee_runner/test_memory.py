"""Arrays for kernels: where they begin, and what they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tee_runner.memory import LINE, PAGE, on_lines, pages

SHAPES = st.one_of(st.integers(0, 5000), st.tuples(st.integers(0, 40), st.integers(0, 200)))
DTYPES = st.sampled_from([np.uint8, np.uint16, np.int32, np.float32, np.float64])


@given(SHAPES, DTYPES)
def test_arrays_begin_on_lines_and_pages(shape: int | tuple[int, ...], dtype: type) -> None:
    for make, boundary in ((on_lines, LINE), (pages, PAGE)):
        array = make(shape, dtype)
        assert array.shape == np.empty(shape).shape
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.size == 0 or array.ctypes.data % boundary == 0
    assert not array.any()


@pytest.mark.parametrize("make", [on_lines, pages])
def test_every_element_is_the_arrays_own(make: type) -> None:
    arrays = [make((n, 3), np.float32) for n in range(1, 40)]
    for i, array in enumerate(arrays):
        array.fill(i)
    for i, array in enumerate(arrays):
        assert (array == i).all()
