"""The strict CBOR decoder."""

from __future__ import annotations

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation import codec
from attestation.errors import MalformedEvidenceError

TEXT = st.text(max_size=20)
LEAVES = (
    st.integers(-(2**64), 2**64 - 1)
    | st.booleans()
    | st.binary(max_size=40)
    | TEXT
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=8
)


def decode(data: bytes) -> codec.Value:
    return codec.decode(data, limit=4096, what="test")


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES)
def test_what_is_encoded_is_decoded(value: codec.Value) -> None:
    if depth(value) <= codec.MAX_DEPTH:
        assert decode(codec.encode(value)) == value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\x01\x01", "trailing"),
        (b"\x18\x01", "canonical"),  # 1 in two bytes
        (b"\xa2\x61b\x01\x61a\x02", "canonical"),  # keys not sorted
        (b"\xa2\x61a\x01\x61a\x02", "canonical"),  # a key twice
        (b"\xfb\x3f\xf8\0\0\0\0\0\0", "canonical"),  # 1.5 fits into a half float
        (b"\x9f\x01\xff", "indefinite"),
        (b"\x5f\x41a\xff", "indefinite"),
        (b"\xa1\x01\x02", "key that is not text"),
        (b"\x62\xff\xfe", "UTF-8"),
        (b"\xf6", "simple value"),  # null
        (b"\xf7", "simple value"),  # undefined
        (b"\xf9\x7e\x00", "not finite"),  # NaN
        (b"\xf9\x7c\x00", "not finite"),  # infinity
        (b"\xc2\x41\x01", "tag"),  # big number
        (b"\xd8\x23\x61a", "tag"),  # regular expression
        (b"\xd8\x1d\x00", "tag"),  # shared reference
        (b"\x81" * 100 + b"\x01", "nested"),
        (b"\x9a\xff\xff\xff\xff", "too many items"),
        (b"\x5b\xff\xff\xff\xff\xff\xff\xff\xff", "truncated"),
    ],
)
def test_hostile_documents_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(MalformedEvidenceError, match=why):
        decode(data)


def test_the_size_is_checked_first() -> None:
    with pytest.raises(MalformedEvidenceError, match="more than the 4096"):
        decode(cbor2.dumps(bytes(4096)))


def test_a_map_has_exactly_its_keys() -> None:
    keys = frozenset({"a", "b"})
    assert codec.decode_map(codec.encode({"a": 1, "b": 2}), keys=keys, limit=99, what="map") == {
        "a": 1,
        "b": 2,
    }
    for wrong in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, {}, [1, 2], 3):
        with pytest.raises(MalformedEvidenceError):
            codec.decode_map(codec.encode(wrong), keys=keys, limit=99, what="map")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_canonically_or_are_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except MalformedEvidenceError:
        return
    assert codec.encode(value) == data
