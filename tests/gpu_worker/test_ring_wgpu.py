"""Products modulo 2^32 on whatever adapter there is (lavapipe on a machine without a GPU): always equal."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.ring_plan import plan_ring
from gpu_worker.engines.ring_weights import INT16_MAX
from gpu_worker.engines.ring_wgpu import RingWgpu
from gpu_worker.engines.wgpu_device import AdapterSummary, pick_adapter
from gpu_worker.engines.wgpu_plan import plan_slabs, rows_per_chunk
from gpu_worker.engines.wgpu_products import GpuDevice

Words = NDArray[np.uint32]
Weight = NDArray[np.int8] | NDArray[np.int16]

ROWS = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 64, 65, 130)


@pytest.fixture(scope="module", autouse=True)
def adapter() -> AdapterSummary:
    try:
        return pick_adapter("any")
    except EngineError as error:
        pytest.fail(f"These tests need a Vulkan device: install the package mesa-vulkan-drivers. {error}")


@pytest.fixture(scope="module")
def ring(adapter: AdapterSummary) -> Iterator[RingWgpu]:
    ring = RingWgpu(adapter=adapter)
    yield ring
    ring.close()


Make = Callable[..., RingWgpu]


@pytest.fixture
def make(adapter: AdapterSummary) -> Iterator[Make]:
    """Makes engines with a device of their own."""
    devices: list[GpuDevice] = []

    def create(*, chunk_bytes: int = 1 << 26, **options: int) -> RingWgpu:
        devices.append(GpuDevice.open(adapter, **options))  # type: ignore[arg-type]
        return RingWgpu(devices[-1], chunk_bytes=chunk_bytes)

    yield create
    for device in devices:
        device.close()


def words(rng: np.random.Generator, *shape: int) -> Words:
    return rng.integers(0, 1 << 32, shape, dtype=np.uint32)


def int8(rng: np.random.Generator, *shape: int) -> NDArray[np.int8]:
    return rng.integers(-128, 128, shape, dtype=np.int8)


def int16(rng: np.random.Generator, *shape: int) -> NDArray[np.int16]:
    return rng.integers(-32768, INT16_MAX, shape, dtype=np.int16, endpoint=True)


def expected(y: Words, w: Weight) -> Words:
    # Casting a negative integer to uint32 adds 2^32.
    return y @ w.astype(np.uint32).T


def multiply(ring: RingWgpu, weight: LoadedWeight, y: Words) -> Words:
    out = np.full((len(y), weight.d_out), 0xABCDEF01, np.uint32)
    ring.matmul(weight, y, out)
    return out


def check(ring: RingWgpu, y: Words, w: Weight) -> None:
    weight = ring.load(w)
    try:
        np.testing.assert_array_equal(multiply(ring, weight, y), expected(y, w))
    finally:
        ring.unload(weight)


# --- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n"), [(576, 192), (577, 131), (1, 1), (1031, 5), (3, 613)])
def test_every_kernel(ring: RingWgpu, k: int, n: int) -> None:
    rng = np.random.default_rng(k * 10007 + n)
    w, y = int8(rng, n, k), words(rng, max(ROWS), k)
    weight, product = ring.load(w), expected(y, w)
    for m in ROWS:
        np.testing.assert_array_equal(multiply(ring, weight, y[:m]), product[:m])
    ring.unload(weight)


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 70), k=st.integers(1, 300), n=st.integers(1, 300), seed=st.integers(0, 2**32 - 1),
    wide=st.booleans(),
)  # fmt: skip
def test_any_shape(ring: RingWgpu, m: int, k: int, n: int, seed: int, wide: bool) -> None:
    rng = np.random.default_rng(seed)
    check(ring, words(rng, m, k), int16(rng, n, k) if wide else int8(rng, n, k))


@pytest.mark.parametrize("m", [1, 4, 16, 20])
def test_extremes(ring: RingWgpu, m: int) -> None:
    k = 700
    for w in (-128, 127, -1, 0):
        weight = ring.load(np.full((18, k), w, np.int8))
        for value in (0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1):
            y = np.full((m, k), value, np.uint32)
            assert (multiply(ring, weight, y) == value * w * k % 2**32).all()
        ring.unload(weight)
    for w in (-32768, INT16_MAX, 128, -129):
        check(ring, np.full((m, k), 0xFFFFFFFF, np.uint32), np.full((2, k), w, np.int16))


def test_thousands_of_rows(ring: RingWgpu) -> None:
    rng = np.random.default_rng(5)
    check(ring, words(rng, 4096, 17), int8(rng, 19, 17))


def test_split_k_with_reduction(make: Make) -> None:
    rng = np.random.default_rng(4)
    ring = make(workgroup_target=264)
    for m, k, n in [(1, 2000, 130), (4, 1536, 200), (9, 1471, 130), (31, 1536, 200), (130, 1024, 300)]:
        padded = -(-k // 16) * 16, -(-n // 128) * 128
        assert plan_ring(m, *padded, ring._on.limits).splits > 1
        check(ring, words(rng, m, k), int8(rng, n, k))
        check(ring, words(rng, m, k), int16(rng, n, k))


@pytest.mark.parametrize("workgroup_target", [None, 264])
def test_slabs_and_chunks(make: Make, workgroup_target: int | None) -> None:
    rng = np.random.default_rng(5)
    options = {"workgroup_target": workgroup_target} if workgroup_target else {}
    ring = make(max_binding_bytes=1 << 16, chunk_bytes=1 << 15, **options)
    w = int8(rng, 1301, 257)
    slabs = plan_slabs(272, 1301, ring._on.limits, item_bytes=1)
    rows = rows_per_chunk(272, 1408, 1 << 15, ring._on.limits, item_bytes=4)
    assert len(slabs) > 5
    assert 1 < rows < 16
    weight = ring.load(w)
    assert ring.resident_bytes == 272 * 1408
    for m in (1, rows, rows + 1, 5 * rows + 2):
        y = words(rng, m, 257)
        np.testing.assert_array_equal(multiply(ring, weight, y), expected(y, w))


def test_large_tiles_over_several_chunks(make: Make) -> None:
    rng = np.random.default_rng(6)
    ring = make(chunk_bytes=70 * 4 * 256)
    check(ring, words(rng, 300, 100), int8(rng, 200, 100))


def test_portable_calls(make: Make) -> None:
    rng = np.random.default_rng(7)
    ring = make(use_native=False, chunk_bytes=1 << 16)
    for m, k, n in [(1, 100, 100), (16, 577, 130), (100, 300, 200)]:
        check(ring, words(rng, m, k), int8(rng, n, k))


def test_an_operand_in_shared_memory_is_left_alone(ring: RingWgpu) -> None:
    rng = np.random.default_rng(8)
    memory = shared_memory.SharedMemory(create=True, size=4 * 20 * 100)
    try:
        y = np.ndarray((20, 100), np.uint32, memory.buf)
        y[...] = words(rng, 20, 100)
        before = y.copy()
        check(ring, y, int8(rng, 33, 100))
        check(ring, y[:3], int16(rng, 33, 100))
        np.testing.assert_array_equal(y, before)
        del y
    finally:
        memory.close()
        memory.unlink()


def test_strided_arrays(ring: RingWgpu) -> None:
    rng = np.random.default_rng(3)
    w, y = int8(rng, 30, 20), words(rng, 20, 12).T
    out = np.zeros((12, 60), np.uint32)
    weight = ring.load(np.asfortranarray(w))
    ring.matmul(weight, y, out[:, ::2])
    np.testing.assert_array_equal(out[:, ::2], expected(y, w))
    assert (out[:, 1::2] == 0).all()
    ring.unload(weight)


# --- resources ---------------------------------------------------------------------------------------------


def test_many_shapes_in_sequence_with_several_resident_weights(make: Make) -> None:
    ring = make()
    rng = np.random.default_rng(8)
    weights = [int8(rng, n, k) for k, n in [(64, 900), (700, 40), (129, 127), (1, 300), (500, 500)]]
    loaded = [ring.load(w) for w in weights]
    for step in range(40):
        index = step % len(weights)
        y = words(rng, int(rng.integers(1, 60)), weights[index].shape[1])
        np.testing.assert_array_equal(multiply(ring, loaded[index], y), expected(y, weights[index]))
        if step % 7 == 6:
            ring.unload(loaded[index])
            loaded[index] = ring.load(weights[index])


def test_two_engines_on_one_device(adapter: AdapterSummary) -> None:
    rng = np.random.default_rng(9)
    device = GpuDevice.open(adapter)
    first, second = RingWgpu(device), RingWgpu(device)
    w, v = int8(rng, 40, 30), int8(rng, 500, 70)
    a, b = first.load(w), second.load(v)
    for m in (1, 9, 40):
        y, z = words(rng, m, 30), words(rng, 3 * m, 70)
        np.testing.assert_array_equal(multiply(first, a, y), expected(y, w))
        np.testing.assert_array_equal(multiply(second, b, z), expected(z, v))
    first.close()
    np.testing.assert_array_equal(multiply(second, b, z), expected(z, v))
    with pytest.raises(EngineError, match="not loaded"):
        multiply(second, a, y)
    second.close()
    device.close()


def test_a_repeated_call_allocates_nothing_large(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = make()
    rng = np.random.default_rng(9)
    w, y = int8(rng, 1024, 1024), words(rng, 16, 1024)
    out = np.empty((16, 1024), np.uint32)
    weight = ring.load(w)
    ring.matmul(weight, y, out)

    def refuse(**_: object) -> None:
        raise AssertionError("created on the hot path")

    for name in ("create_buffer", "create_bind_group", "create_shader_module", "create_compute_pipeline"):
        monkeypatch.setattr(ring._on.device, name, refuse)
    tracemalloc.start()
    ring.matmul(weight, y, out)
    ring.matmul(weight, y[:9], out[:9])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 1024, "operand and result have 64 KiB each"
    np.testing.assert_array_equal(out, expected(y, w))


def test_unload_and_close(adapter: AdapterSummary) -> None:
    ring = RingWgpu(adapter=adapter)
    first, second = (ring.load(np.ones((300, 200), np.int8)) for _ in range(2))
    one = 208 * 384
    assert ring.resident_bytes == 2 * one
    ring.unload(first)
    assert ring.resident_bytes == one
    for use in (lambda: ring.unload(first), lambda: multiply(ring, first, np.ones((1, 200), np.uint32))):
        with pytest.raises(EngineError, match="not loaded"):
            use()
    assert (multiply(ring, second, np.ones((1, 200), np.uint32)) == 200).all()
    ring.close()
    ring.close()
    assert ring.resident_bytes == 0
    for use in (
        lambda: ring.load(np.ones((2, 2), np.int8)),
        lambda: multiply(ring, second, np.ones((1, 200), np.uint32)),
    ):
        with pytest.raises(EngineError, match="closed"):
            use()


# --- what goes wrong ---------------------------------------------------------------------------------------


def test_bad_weights_are_refused(ring: RingWgpu) -> None:
    for bad in (np.ones((2, 2), np.float16), np.ones(4, np.int8), np.ones((0, 3), np.int8)):
        with pytest.raises(EngineError, match="int8 or int16 matrix"):
            ring.load(bad)
    with pytest.raises(EngineError, match="exceed 32639"):
        ring.load(np.full((1, 1), INT16_MAX + 1, np.int16))


@pytest.mark.parametrize(
    ("operand", "out"),
    [
        (np.ones((1, 4), np.uint32), np.empty((1, 3), np.uint32)),
        (np.ones((1, 5), np.int32), np.empty((1, 3), np.uint32)),
        (np.ones((0, 5), np.uint32), np.empty((0, 3), np.uint32)),
        (np.ones((1, 5), np.uint32), np.empty((1, 4), np.uint32)),
        (np.ones((1, 5), np.uint32), np.empty((1, 3), np.uint64)),
        (np.ones((1, 5), np.uint32), np.broadcast_to(np.uint32(0), (1, 3))),
    ],
)
def test_bad_operands_are_refused(ring: RingWgpu, operand: Words, out: Words) -> None:
    weight = ring.load(np.ones((3, 5), np.int8))
    with pytest.raises(EngineError):
        ring.matmul(weight, operand, out)
    ring.unload(weight)


def test_a_weight_beyond_the_limits_is_refused(make: Make) -> None:
    ring = make(max_binding_bytes=1 << 16)
    with pytest.raises(EngineError, match="storage binding"):
        ring.load(np.ones((1, 513), np.int8))
    with pytest.raises(EngineError, match="one row"):
        ring.load(np.ones((16385, 1), np.int8))
    assert ring.resident_bytes == 0


def test_out_of_memory_leaves_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import wgpu

    ring = make(max_binding_bytes=1 << 16)
    create = ring._on.device.create_buffer
    created = []

    def second_fails(**options: object) -> object:
        if created:
            raise wgpu.GPUOutOfMemoryError("not enough memory left")
        created.append(create(**options))
        return created[0]

    monkeypatch.setattr(ring._on.device, "create_buffer", second_fails)
    with pytest.raises(EngineError, match="out of memory"):
        ring.load(np.ones((2000, 64), np.int8))
    monkeypatch.undo()
    assert ring.resident_bytes == 0
    check(ring, np.ones((2, 64), np.uint32), np.ones((2000, 64), np.int8))


@pytest.mark.parametrize("use_native", [True, False])
@pytest.mark.parametrize("kind", ["partial", "reduce"])
def test_a_product_that_fails_while_it_is_recorded(
    make: Make, kind: str, use_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first dispatch or within a pass: what was recorded is dropped, and the next one is right."""
    rng = np.random.default_rng(11)
    ring = make(workgroup_target=264, use_native=use_native)
    y, w = words(rng, 3, 1536), int8(rng, 200, 1536)
    bind = ring._bind_group

    def failing(state: Any, index: int, wanted: str) -> object:
        if wanted == kind:
            raise EngineError("not this time")
        return bind(state, index, wanted)

    weight = ring.load(w)
    monkeypatch.setattr(ring, "_bind_group", failing)
    for _ in range(3):
        with pytest.raises(EngineError, match="not this time"):
            ring.matmul(weight, y, np.zeros((3, 200), np.uint32))
    monkeypatch.undo()
    assert np.array_equal(multiply(ring, weight, y), y @ w.astype(np.uint32).T)
