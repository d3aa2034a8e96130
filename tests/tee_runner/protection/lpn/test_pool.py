"""Pools: made by the worker, verified, kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tee_runner.errors import IntegrityError
from tee_runner.protection.lpn.fold_kernels import WIDTH, fold, project
from tee_runner.protection.lpn.layout import empty_panels, pack_rows, unpack_rows
from tee_runner.protection.lpn.matrix import SEED, public_matrix
from tee_runner.protection.lpn.pool import PoolCache, RingWeight, is_pool, make_pool, provide_pool
from tee_runner.protection.lpn.quantise import quantise

from .words_worker import WordsTransport, key_of, linear_of, transport_for, weight_of

K, D_IN, D_OUT = 70, 37, 45
WEIGHT = weight_of(1, D_OUT, D_IN)


def stream(key: int = 1):  # type: ignore[no-untyped-def]
    return key_of(key).stream("pool")


@pytest.fixture(params=[False, True], ids=["int8", "int16"])
def wide(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def ring_of(wide: bool = False) -> RingWeight:
    return RingWeight.of(linear_of(WEIGHT), quantise(WEIGHT, wide=wide))


def test_the_matrix_is_the_published_keystream() -> None:
    key = hashlib.sha256(SEED.encode() + D_IN.to_bytes(8, "little")).digest()
    cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    expected = np.frombuffer(cipher.update(bytes(K * D_IN * 4)), "<u4").reshape(K, D_IN)
    G = np.empty((K, D_IN), np.uint32)
    unpack_rows(public_matrix(D_IN, K), 0, G)
    np.testing.assert_array_equal(G, expected)
    # A smaller k is a prefix, another width another matrix.
    unpack_rows(public_matrix(D_IN, 7), 0, G[:7])
    np.testing.assert_array_equal(G[:7], expected[:7])
    assert not np.array_equal(public_matrix(D_IN + 1, K)[0, :K], public_matrix(D_IN, K)[0, :K])


def test_the_matrix_runs_on_over_blocks_of_rows() -> None:
    long, short = public_matrix(5, 600), public_matrix(5, 300)
    np.testing.assert_array_equal(long[:, :300], short[:, :300])
    assert long[0, 599, :5].all()
    assert not long[:, 600:].any()


def in_panels(matrix: np.ndarray) -> np.ndarray:
    """The reference layout: panels of 16 columns, whole pages of rows, the rest zero."""
    per_page = 4096 // (16 * matrix.itemsize)
    rows, columns = (-(-size // unit) * unit for size, unit in zip(matrix.shape, (per_page, 16), strict=True))
    padded = np.zeros((rows, columns), matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.reshape(rows, -1, 16).transpose(1, 0, 2).copy()


def test_panels_and_back() -> None:
    matrix = np.random.default_rng(0).integers(0, 2**32, (K, D_IN), dtype=np.uint32)
    panels = empty_panels(K, D_IN, np.uint32)
    pack_rows(matrix[:50], panels, 0)
    pack_rows(matrix[50:], panels, 50)
    np.testing.assert_array_equal(panels, in_panels(matrix))
    back = np.empty_like(matrix)
    unpack_rows(panels, 0, back)
    np.testing.assert_array_equal(back, matrix)


def test_weights_are_transposed_into_panels(wide: bool) -> None:
    values = quantise(WEIGHT, wide=wide).values
    np.testing.assert_array_equal(ring_of(wide).panels, in_panels(np.ascontiguousarray(values.T)))


@pytest.mark.parametrize("dtype", [np.uint32, np.int8, np.int16])
def test_folding_is_exact(dtype: type) -> None:
    generator = np.random.default_rng(1)
    info = np.iinfo(dtype)
    matrix = generator.integers(info.min, info.max, (300, D_IN), dtype=dtype, endpoint=True)
    panels = in_panels(matrix)
    probes = np.zeros((48, WIDTH), np.uint32)
    probes[:D_IN] = generator.integers(0, 2**32, (D_IN, WIDTH), dtype=np.uint32)
    sums = generator.integers(0, 2**32, (300, WIDTH), dtype=np.uint32)
    expected = sums + matrix.astype(np.uint32) @ probes[:D_IN]
    fold(panels, probes, sums)
    np.testing.assert_array_equal(sums, expected)


def test_projecting_is_exact(wide: bool) -> None:
    ring = ring_of(wide)
    v = np.random.default_rng(2).integers(-(2**31), 2**31, (3, D_OUT), dtype=np.int32)
    w = np.zeros((3, D_IN), np.int64)
    project(ring.panels, v, w)
    np.testing.assert_array_equal(w, v.astype(np.int64) @ quantise(WEIGHT, wide=wide).values.astype(np.int64))


def test_a_right_pool_passes(wide: bool) -> None:
    ring, matrix = ring_of(wide), public_matrix(D_IN, K)
    pool = make_pool(transport_for(WEIGHT, wide=wide), ring, matrix, K)
    G, P = np.empty((K, D_IN), np.uint32), np.empty((K, D_OUT), np.uint32)
    unpack_rows(matrix, 0, G)
    unpack_rows(pool, 0, P)
    np.testing.assert_array_equal(P, G @ quantise(WEIGHT, wide=wide).values.astype(np.uint32).T)
    for key in range(5):
        assert is_pool(pool, ring, matrix, K, stream(key))


@pytest.mark.parametrize("valuation", range(32))
def test_one_wrong_word_is_found_whatever_power_of_two_divides_it(valuation: int) -> None:
    ring, matrix = ring_of(), public_matrix(D_IN, K)
    pool = make_pool(transport_for(WEIGHT), ring, matrix, K)
    generator = np.random.default_rng(valuation)
    row, column = int(generator.integers(K)), int(generator.integers(D_OUT))
    error = (2 * int(generator.integers(2**31)) + 1) << valuation
    pool[column // 16, row, column % 16 :][:1] += np.uint32(error & 0xFFFFFFFF)
    assert not is_pool(pool, ring, matrix, K, stream())


def test_errors_that_cancel_in_sums_are_found() -> None:
    ring, matrix = ring_of(), public_matrix(D_IN, K)
    pool = make_pool(transport_for(WEIGHT), ring, matrix, K)
    for error in ((1 << 31, 1 << 31), (5, -5), (1 << 16, 1 << 16)):
        wrong = pool.copy()
        wrong[:2, 3, 4] += np.array(error).astype(np.uint32)
        assert not is_pool(wrong, ring, matrix, K, stream())
    swapped = pool.copy()
    swapped[:, [3, 9]] = swapped[:, [9, 3]]
    assert not is_pool(swapped, ring, matrix, K, stream())


def test_words_outside_the_pool_must_be_zero() -> None:
    ring, matrix = ring_of(), public_matrix(D_IN, K)
    pool = make_pool(transport_for(WEIGHT), ring, matrix, K)
    pool[-1, 0, 15] = 1  # D_OUT = 45: panel 2 has 13 columns
    assert not is_pool(pool, ring, matrix, K, stream())
    pool[-1, 0, 15] = 0
    pool[0, K, 0] = 1
    assert not is_pool(pool, ring, matrix, K, stream())


def test_a_lying_worker_s_pool_is_refused() -> None:
    ring, matrix = ring_of(), public_matrix(D_IN, K)
    transport = transport_for(WEIGHT)

    def tamper(result: np.ndarray) -> None:
        result[0, 0] ^= np.uint32(1 << 31)

    transport.tamper = tamper
    with pytest.raises(IntegrityError, match="pool for w0"):
        provide_pool(transport, ring, matrix, K, PoolCache(None), stream())
    assert ring.pool is None


def test_the_disk_saves_the_worker_s_work(tmp_path: Path, wide: bool) -> None:
    matrix = public_matrix(D_IN, K)
    cache = PoolCache(tmp_path / "pools")
    first, second = ring_of(wide), ring_of(wide)
    provide_pool(transport_for(WEIGHT, wide=wide), first, matrix, K, cache, stream())
    idle = WordsTransport([])
    provide_pool(idle, second, matrix, K, cache, stream())
    assert (idle.stats.offloads, cache.hits) == (0, 1)
    np.testing.assert_array_equal(first.pool, second.pool)
    assert len(list((tmp_path / "pools").iterdir())) == 1


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    matrix = public_matrix(D_IN, K)
    cache = PoolCache(tmp_path)
    provide_pool(transport_for(WEIGHT), ring_of(), matrix, K, cache, stream())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[100] ^= 0x80
    changed = {"bit": data, "short": data[:-1], "long": data + b"\0", "empty": b""}[damage]
    path.write_bytes(changed)
    ring, transport = ring_of(), transport_for(WEIGHT)
    provide_pool(transport, ring, matrix, K, cache, stream())
    assert (transport.stats.offloads, cache.hits) == (2, 0)
    assert ring.pool is not None
    assert is_pool(ring.pool, ring, matrix, K, stream())
    assert path.read_bytes() != changed


def test_another_weight_or_k_is_another_file(tmp_path: Path) -> None:
    cache = PoolCache(tmp_path)
    other = RingWeight.of(linear_of(weight_of(2, D_OUT, D_IN)), quantise(weight_of(2, D_OUT, D_IN)))
    paths = {
        cache.path(ring_of(), K),
        cache.path(ring_of(), K + 1),
        cache.path(ring_of(True), K),
        cache.path(other, K),
    }
    assert len(paths) == 4
    assert PoolCache(None).path(ring_of(), K) is None


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    ring = ring_of()
    provide_pool(
        transport_for(WEIGHT), ring, public_matrix(D_IN, K), K, PoolCache(blocked / "below"), stream()
    )
    assert ring.pool is not None
