"""Weight formats: the protocol's numbers, and their types."""

from __future__ import annotations

import numpy as np
import pytest

from gelo.formats import WeightFormat
from gelo.header import OperandKind
from gelo.v1 import worker_pb2


def test_the_numbers_are_the_protocols() -> None:
    assert {form.name: form.value for form in WeightFormat} == dict(worker_pb2.WeightFormat.items())


@pytest.mark.parametrize(
    ("form", "dtype", "kind"),
    [
        (WeightFormat.FLOAT16, "<f2", OperandKind.HALF),
        (WeightFormat.INT8, "i1", OperandKind.WORDS),
        (WeightFormat.INT16, "<i2", OperandKind.WORDS),
    ],
)
def test_types(form: WeightFormat, dtype: str, kind: OperandKind) -> None:
    assert form.dtype == np.dtype(dtype)
    assert form.item_bytes == np.dtype(dtype).itemsize
    assert form.kind == kind
    assert WeightFormat.of(np.dtype(dtype)) == form


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "u2", "i4", ">i2", ">f2", "?", "V2"])
def test_other_types_have_none(dtype: str) -> None:
    with pytest.raises(ValueError, match="float16, int8 or int16"):
        WeightFormat.of(np.dtype(dtype))
