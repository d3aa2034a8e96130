"""The secret streams: known answers, separation, ratchet, and the normals drawn from them."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from tee_runner.protection.gaussian import _pairs, fill_normals, standard_normals
from tee_runner.protection.rng import KEY_BYTES, SecretKey, SecretStream

from .doubles import key_of

KEY = bytes(range(32))
# Words of one piece of `fill`.
PIECE = (1 << 18) // 4
NORMALS = 1 << 20


def aes_ctr(key: bytes, counter: int, length: int) -> bytes:
    """CTR keystream by hand: AES of successive 128-bit big-endian counters."""
    blocks = b"".join((counter + i & (1 << 128) - 1).to_bytes(16, "big") for i in range(-(-length // 16)))
    cipher = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()  # noqa: S305 - the block function itself
    return cipher.update(blocks)[:length]


def words_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint32)


def test_reference_keystream_meets_nist_sp_800_38a_f_5_5() -> None:
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    expected = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    stream = aes_ctr(key, int.from_bytes(bytes(range(0xF0, 0x100)), "big"), len(plain))
    assert bytes(a ^ b for a, b in zip(plain, stream, strict=True)) == expected


def test_stream_is_that_keystream_from_counter_zero() -> None:
    np.testing.assert_array_equal(SecretStream(KEY).words(1000), words_of(aes_ctr(KEY, 0, 4000)))


def test_streams_are_derived_by_hkdf_sha256() -> None:
    # RFC 5869 with no salt and one block of output.
    prk = hmac.new(bytes(32), KEY, hashlib.sha256).digest()
    key = SecretKey(KEY)
    for counter, purpose in enumerate(["mask", "shield", "mask"], start=1):
        info = b"gelo/v1/" + purpose.encode() + b"/" + counter.to_bytes(8, "big") + b"\x01"
        derived = hmac.new(prk, info, hashlib.sha256).digest()
        np.testing.assert_array_equal(key.stream(purpose).words(64), words_of(aes_ctr(derived, 0, 256)))


def test_streams_differ_by_purpose_counter_and_key() -> None:
    key, same, other = SecretKey(KEY), SecretKey(KEY), SecretKey(bytes(32))
    drawn = [key.stream("mask"), key.stream("mask"), key.stream("shield"), other.stream("mask")]
    heads = {stream.words(8).tobytes() for stream in drawn}
    assert len(heads) == 4
    assert same.stream("mask").words(8).tobytes() in heads  # the first one, reproduced
    assert SecretKey(KEY).stream("shield").words(8).tobytes() not in heads  # another counter


def test_keys_without_a_seed_differ_and_never_show() -> None:
    assert SecretKey().stream("x").words(8).tobytes() != SecretKey().stream("x").words(8).tobytes()
    assert repr(SecretKey(KEY)) == "SecretKey(...)"
    for size in (0, 16, KEY_BYTES - 1, KEY_BYTES + 1):
        with pytest.raises(ValueError, match="32 bytes"):
            SecretKey(bytes(size))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 3])
def test_fill_continues_one_keystream_across_pieces(size: int) -> None:
    whole = SecretStream(KEY).words(size + 7)
    stream = SecretStream(KEY)
    first, rest = np.zeros(size, np.uint32), np.zeros(7, np.uint32)
    stream.fill(first)
    stream.fill(rest)
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)
    np.testing.assert_array_equal(whole, words_of(aes_ctr(KEY, 0, 4 * (size + 7))))


def test_fill_takes_any_shape_but_only_contiguous_memory() -> None:
    shaped = np.zeros((3, 4, 5), np.uint32)
    SecretStream(KEY).fill(shaped)
    np.testing.assert_array_equal(shaped.ravel(), SecretStream(KEY).words(60))
    # Anything else would leave the caller's array as it was: a secret that is not random.
    with pytest.raises(TypeError):
        SecretStream(KEY).fill(np.zeros((8, 8), np.uint32)[:, ::2])


def test_ratchet_replaces_the_key_by_keystream() -> None:
    stream = SecretStream(KEY)
    before = stream.words(16)
    stream.ratchet()
    after = stream.words(64)
    following = aes_ctr(KEY, 0, 64 + KEY_BYTES)[64:]
    np.testing.assert_array_equal(after, words_of(aes_ctr(following, 0, 256)))
    # Neither what was drawn, nor what the old key would have given next.
    old = SecretStream(KEY).words(200)
    assert not set(after.tolist()) & set(old.tolist())
    assert not set(after.tolist()) & set(before.tolist())


def test_words_are_uniform() -> None:
    # A fixed key: these p-values are constants, and 1e-3 on both sides is no narrow escape.
    data = key_of(3).stream("chi").words(1 << 20).view(np.uint8)
    counts = np.bincount(data, minlength=256)
    assert 1e-3 < stats.chisquare(counts).pvalue < 1 - 1e-3
    pairs = np.bincount(data.view(np.uint16), minlength=1 << 16)
    assert 1e-3 < stats.chisquare(pairs).pvalue < 1 - 1e-3
    ones = np.unpackbits(data).reshape(-1, 32).sum(axis=0)
    draws = len(data) // 4
    assert np.max(np.abs(ones - draws / 2)) < 5 * np.sqrt(draws) / 2


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return standard_normals(key_of(4).stream("normal"), NORMALS).astype(np.float64)


def test_normals_have_the_normal_distribution(normals: np.ndarray) -> None:
    assert stats.kstest(normals, "norm").pvalue > 1e-3


def test_normals_have_normal_moments(normals: np.ndarray) -> None:
    # Standard deviations of the sample moments 1 to 4 and 6 over n draws.
    root = np.sqrt(NORMALS)
    for power, moment, deviation in [(1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)]:
        assert abs(np.mean(normals**power) - moment) < 5 * deviation / root
    assert abs(np.mean(normals**6) - 15) < 5 * (10395 - 225) ** 0.5 / root


def test_normals_have_normal_tails_that_end(normals: np.ndarray) -> None:
    for sigma in (2.0, 3.0, 4.0, 4.5):
        expected = NORMALS * stats.norm.sf(sigma)
        for found in (np.sum(normals > sigma), np.sum(normals < -sigma)):
            assert abs(found - expected) < 5 * np.sqrt(expected)
    assert np.max(np.abs(normals)) < 6.8


def test_the_two_normals_of_a_pair_are_independent() -> None:
    words = key_of(5).stream("pairs").words(NORMALS)
    x, y = np.empty((2, NORMALS // 2), np.float32)
    _pairs(words[: NORMALS // 2], words[NORMALS // 2 :], x, y)
    x, y = x.astype(np.float64), y.astype(np.float64)
    limit = 5 / np.sqrt(len(x))
    for f, g in [(x, y), (x**2, y**2), (np.abs(x), y), (x, np.abs(y)), (x**3, y)]:
        assert abs(np.corrcoef(f, g)[0, 1]) < limit
    edges = stats.norm.ppf(np.linspace(0.0, 1.0, 17)[1:-1])
    cells = np.digitize(x, edges) * 16 + np.digitize(y, edges)
    assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("lag", [1, 2, 1 << 15, 1 << 16, NORMALS // 2])
def test_normals_are_independent_of_later_ones(normals: np.ndarray, lag: int) -> None:
    early, late = normals[:-lag], normals[lag:]
    limit = 5 / np.sqrt(len(early))
    assert abs(np.corrcoef(early, late)[0, 1]) < limit
    assert abs(np.corrcoef(early**2, late**2)[0, 1]) < limit


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 65535, 65536, 65537, 131_073])
def test_any_number_of_normals(count: int) -> None:
    drawn = standard_normals(SecretStream(KEY), count)
    assert drawn.shape == (count,)
    assert drawn.dtype == np.float32
    # A slice of a larger array: filled to the last element, and nothing beside it.
    around = np.full(count + 2, np.nan, np.float32)
    fill_normals(SecretStream(KEY), around[1:-1])
    np.testing.assert_array_equal(around[1:-1], drawn)
    assert np.isfinite(drawn).all()
    assert np.isnan(around[[0, -1]]).all()
    # No value is used for two places.
    assert len(np.unique(drawn)) >= 0.99 * count


def test_forked_streams_differ_and_cannot_be_forked_again() -> None:
    stream = SecretStream(KEY)
    before = SecretStream(KEY)
    forks = stream.fork(3)
    keystream = before.words(3 * KEY_BYTES // 4 + 64)
    for number, fork in enumerate(forks):
        key = keystream[8 * number : 8 * number + 8].tobytes()
        np.testing.assert_array_equal(fork.words(64), words_of(aes_ctr(key, 0, 256)))
    # The parent goes on under another key.
    assert not np.isin(stream.words(64), keystream).all()
    heads = {source.words(8).tobytes() for source in (stream, *stream.fork(4), *forks)}
    assert len(heads) == 8
