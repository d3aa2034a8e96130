"""Every transport against the real worker: the same suite for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gpu_worker.engines import create_engine
from gpu_worker.server import WorkerSettings
from gpu_worker.server import start as start_server
from tee_runner.errors import CapacityError, WorkerError, WorkerProtocolError, WorkerUnavailableError
from tee_runner.worker import client as client_module
from tee_runner.worker.client import RemoteWeight, TransportName, WorkerClient, weight_digest
from tee_runner.worker.inline_transport import InlineTransport
from tee_runner.worker.slab_transport import SlabTransport
from tee_runner.worker.transport import Transport
from tests.e2e.processes import WorkerProcess, start_worker

from .conftest import HANG_GUARD_S, SIZES, integers, quantised, remote, words

SHAPES = ((1, 1), (16, 16), (61, 127), (576, 960), (1536, 576), (3, 4096), (1000, 7))
ARRAYS = [integers(i, d_out, d_in) for i, (d_in, d_out) in enumerate(SHAPES)]
WEIGHTS = [remote(values, f"w{i}") for i, values in enumerate(ARRAYS)]
# The same shapes again as weights of integers, in turn int8 and int16, in the same sessions.
QUANTISED = [
    quantised(i, d_out, d_in, np.int16 if i % 2 else np.int8) for i, (d_in, d_out) in enumerate(SHAPES)
]
ALL = [*WEIGHTS, *(remote(values, f"q{i}") for i, values in enumerate(QUANTISED))]
CHUNK_BYTES = 20_000


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = start_worker()
    yield process
    process.kill()


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[WorkerClient]:
    client = WorkerClient(worker.address, timeout=HANG_GUARD_S)
    client.provision(ALL)
    yield client
    client.close()


Open = Callable[..., Transport]


@pytest.fixture(params=["slab", "grpc", "grpc-chunked"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransportName:
    if request.param == "grpc-chunked":
        monkeypatch.setattr(client_module, "_MAX_MESSAGE_BYTES", CHUNK_BYTES)
    return "slab" if request.param == "slab" else "grpc"


@pytest.fixture
def transport(client: WorkerClient, kind: TransportName) -> Iterator[Transport]:
    transport = client.open_session(ALL, SIZES, kind)
    assert isinstance(transport, SlabTransport if kind == "slab" else InlineTransport)
    yield transport
    transport.close()


def offload(transport: Transport, weight_id: int, operand: NDArray[np.float16]) -> NDArray[np.float32]:
    rows, d_in = operand.shape
    transport.operand(rows, d_in)[...] = operand
    return transport.exchange(weight_id, rows, d_in, SHAPES[weight_id][1])


def expected(weight_id: int, operand: NDArray[np.float16]) -> NDArray[np.float32]:
    product: NDArray[np.float32] = operand.astype(np.float32) @ ARRAYS[weight_id].astype(np.float32).T
    return product


@pytest.mark.parametrize("weight_id", range(len(SHAPES)))
def test_products(transport: Transport, weight_id: int) -> None:
    for rows in (1, 2, 3, 8, 9, 16, 31, 64, 100):
        operand = integers(rows, rows, SHAPES[weight_id][0])
        result = offload(transport, weight_id, operand)
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected(weight_id, operand))


def offload_words(transport: Transport, index: int, operand: NDArray[np.uint32]) -> NDArray[np.uint32]:
    rows, d_in = operand.shape
    transport.operand_words(rows, d_in)[...] = operand
    return transport.exchange_words(len(SHAPES) + index, rows, d_in, SHAPES[index][1])


def expected_words(index: int, operand: NDArray[np.uint32]) -> NDArray[np.uint32]:
    product: NDArray[np.uint32] = operand @ QUANTISED[index].astype(np.uint32).T
    return product


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_products_of_words(transport: Transport, index: int) -> None:
    for rows in (1, 2, 3, 8, 16, 31, 64, 100):
        operand = words(rows, rows, SHAPES[index][0])
        result = offload_words(transport, index, operand)
        assert result.dtype == np.uint32
        np.testing.assert_array_equal(result, expected_words(index, operand))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weight_id=st.integers(0, len(SHAPES) - 1), rows=st.integers(1, 160), seed=st.integers(0, 1 << 30),
    halves=st.booleans(),
)  # fmt: skip
def test_any_order_of_offloads(
    transport: Transport, weight_id: int, rows: int, seed: int, halves: bool
) -> None:
    if halves:
        operand = integers(seed, rows, SHAPES[weight_id][0])
        np.testing.assert_array_equal(offload(transport, weight_id, operand), expected(weight_id, operand))
    else:
        random = words(seed, rows, SHAPES[weight_id][0])
        result = offload_words(transport, weight_id, random)
        np.testing.assert_array_equal(result, expected_words(weight_id, random))


def test_an_answer_shows_while_other_work_is_done(transport: Transport) -> None:
    operand = words(1, 64, 576)
    seen: list[bool] = []

    def meanwhile() -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not transport.answered() and time.monotonic() < deadline:
            seen.append(False)
        seen.append(transport.answered())

    for _ in range(3):
        offload_words(transport, 3, operand)
    transport.meanwhile = meanwhile
    for _ in range(200):
        result = offload_words(transport, 3, operand)
        np.testing.assert_array_equal(result, expected_words(3, operand))
        assert seen[-1]
        if False in seen:
            break
    assert False in seen  # at times the answer is not there at once


def test_values_that_are_not_finite_travel_as_they_are(transport: Transport) -> None:
    operand = integers(1, 3, 16)
    operand[1, 5] = np.inf
    operand[2, 0] = np.nan
    result = offload(transport, 1, operand)
    np.testing.assert_array_equal(result[0], expected(1, operand)[0])
    assert not np.isfinite(result[1, ARRAYS[1][:, 5] != 0]).any()
    assert np.isnan(result[2]).all()


def test_stats(transport: Transport, request: pytest.FixtureRequest) -> None:
    rows = (1, 40, 7)
    for n in rows:
        offload(transport, 3, integers(n, n, 576))
    stats = transport.stats
    # 960 results of 4 bytes a row: 5 rows fit a message of 20,000 bytes.
    chunked = "chunked" in request.node.callspec.id
    assert stats.offloads == (sum(-(-n // 5) for n in rows) if chunked else len(rows))
    assert stats.bytes_sent == sum(rows) * 576 * 2
    assert stats.bytes_received == sum(rows) * 960 * 4
    # The worker's engine ran within the exchanges.
    assert 0 < stats.worker_ns <= stats.exchange_ns


def test_stats_of_words(transport: Transport) -> None:
    for n in (1, 7):
        offload_words(transport, 1, words(n, n, 16))
    assert transport.stats.offloads == 2
    assert transport.stats.bytes_sent == 8 * 16 * 4
    assert transport.stats.bytes_received == 8 * 16 * 4
    assert 0 < transport.stats.worker_ns <= transport.stats.exchange_ns


def test_a_request_of_the_other_kind_is_a_worker_error(transport: Transport) -> None:
    """A half is no word: neither is computed as the other, and the session goes on."""
    transport.operand(2, 16)[...] = 1
    with pytest.raises(WorkerError, match="BAD_REQUEST"):
        transport.exchange(len(SHAPES) + 1, 2, 16, 16)
    transport.operand_words(2, 16)[...] = 1
    with pytest.raises(WorkerError, match="BAD_REQUEST"):
        transport.exchange_words(1, 2, 16, 16)
    operand = words(1, 2, 16)
    np.testing.assert_array_equal(offload_words(transport, 1, operand), expected_words(1, operand))


def test_a_bad_request_is_a_worker_error_and_the_session_goes_on(transport: Transport) -> None:
    for weight_id, d_in, d_out in ((99, 16, 16), (2**32 - 1, 16, 16), (1, 16, 17), (1, 15, 16)):
        transport.operand(2, d_in)[...] = 0
        with pytest.raises(WorkerError, match="BAD_REQUEST") as error:
            transport.exchange(weight_id, 2, d_in, d_out)
        assert type(error.value) is WorkerError
    operand = integers(1, 2, 16)
    np.testing.assert_array_equal(offload(transport, 1, operand), expected(1, operand))


def test_two_sessions_at_once(client: WorkerClient, kind: TransportName) -> None:
    """Each with its own numbering of the weights, and its own results."""
    orders = ((0, 1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0))
    problems: list[str] = []

    def use(order: tuple[int, ...], seed: int) -> None:
        transport = client.open_session([WEIGHTS[i] for i in order], SIZES, kind)
        for step in range(100):
            place = (step * 3 + seed) % len(order)
            index = order[place]
            d_in, d_out = SHAPES[index]
            operand = integers(seed + step, 1 + step % 9, d_in)
            transport.operand(len(operand), d_in)[...] = operand
            result = transport.exchange(place, len(operand), d_in, d_out)
            if not np.array_equal(result, expected(index, operand)):
                problems.append(f"{order} {step}")
        transport.close()

    threads = [threading.Thread(target=use, args=(order, 1000 * i)) for i, order in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
        assert not thread.is_alive()
    assert not problems


def test_an_unknown_weight_is_a_worker_error(client: WorkerClient, kind: TransportName) -> None:
    with pytest.raises(WorkerError, match="not uploaded") as error:
        client.open_session([*WEIGHTS, remote(integers(99, 5, 5))], SIZES, kind)
    assert type(error.value) is WorkerError


def test_close_releases_the_session(kind: TransportName) -> None:
    """A worker with room for one session serves one after the other."""
    running = start_server(create_engine("cpu"), WorkerSettings(address="127.0.0.1:0", max_sessions=1))
    client = WorkerClient(f"127.0.0.1:{running.port}", timeout=HANG_GUARD_S)
    client.provision(WEIGHTS[:2])
    for _ in range(3):
        transport = open_patiently(client, kind)
        with pytest.raises(WorkerError, match="sessions are open"):
            client.open_session(WEIGHTS[:2], SIZES, kind)
        operand = integers(1, 2, 16)
        np.testing.assert_array_equal(offload(transport, 1, operand), expected(1, operand))
        transport.close()
    client.close()
    running.stop()


def open_patiently(client: WorkerClient, kind: TransportName) -> Transport:
    """The worker learns of the last session's end a moment after it."""
    pause = threading.Event()
    for _ in range(int(HANG_GUARD_S / 0.01)):
        try:
            return client.open_session(WEIGHTS[:2], SIZES, kind)
        except WorkerUnavailableError:
            raise
        except WorkerError:
            pause.wait(0.01)
    raise AssertionError("the session was never released")


def test_a_killed_worker_is_unavailable(kind: TransportName) -> None:
    process = start_worker()
    client = WorkerClient(process.address, timeout=HANG_GUARD_S)
    client.provision(WEIGHTS)
    transport = client.open_session(WEIGHTS, SIZES, kind)
    offload(transport, 1, integers(1, 2, 16))
    process.kill()
    for _ in range(2):
        with pytest.raises(WorkerUnavailableError):
            offload(transport, 1, integers(1, 2, 16))
    with pytest.raises(WorkerUnavailableError):
        client.open_session(WEIGHTS, SIZES, kind)
    transport.close()
    client.close()


def test_closing_twice_is_harmless(client: WorkerClient, kind: TransportName) -> None:
    transport = client.open_session(WEIGHTS, SIZES, kind)
    transport.close()
    transport.close()


# --- what differs between them -----------------------------------------------------------------------------


def test_slab_capacity(client: WorkerClient) -> None:
    transport = client.open_session(WEIGHTS, SIZES, "slab")
    with pytest.raises(CapacityError):
        transport.operand(SIZES.operand // 2 + 1, 1)
    transport.operand(1000, 3)[...] = 1
    with pytest.raises(CapacityError):
        transport.exchange(5, 1000, 3, 4096)
    operand = integers(1, 256, 3)
    np.testing.assert_array_equal(offload(transport, 5, operand), expected(5, operand))
    transport.operand(SIZES.operand // 2, 1)
    with pytest.raises(CapacityError):
        transport.operand_words(SIZES.operand // 4 + 1, 1)
    with pytest.raises(CapacityError):
        transport.exchange_words(5, 1000, 3, 4096)
    transport.close()


def test_inline_exchange_must_follow_its_operand(client: WorkerClient) -> None:
    transport = client.open_session(ALL, SIZES, "grpc")
    transport.operand(2, 16)
    with pytest.raises(WorkerProtocolError, match="another operand"):
        transport.exchange(1, 3, 16, 16)
    with pytest.raises(WorkerProtocolError, match="another operand"):
        transport.exchange_words(len(SHAPES) + 1, 2, 16, 16)
    transport.operand_words(2, 16)
    with pytest.raises(WorkerProtocolError, match="another operand"):
        transport.exchange(1, 2, 16, 16)
    transport.close()


def test_results_beyond_one_message_are_chunked(client: WorkerClient) -> None:
    """At the true limit of 64 MiB: a result of 75 MiB."""
    values = integers(3, 49152, 4)
    weight = remote(values)
    client.provision([weight])
    transport = client.open_session([weight], SIZES, "grpc")
    operand = integers(5, 400, 4)
    transport.operand(400, 4)[...] = operand
    result = transport.exchange(0, 400, 4, 49152)
    assert transport.stats.offloads == 2
    np.testing.assert_array_equal(result, operand.astype(np.float32) @ values.astype(np.float32).T)
    transport.close()


# --- connecting --------------------------------------------------------------------------------------------


def test_auto_prefers_the_slab(client: WorkerClient) -> None:
    transport = client.open_session(WEIGHTS, SIZES)
    assert isinstance(transport, SlabTransport)
    transport.close()


def test_another_kernel_means_grpc(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "boot_id"
    other.write_text("another kernel\n")
    monkeypatch.setattr(client_module, "_BOOT_ID", other)
    transport = client.open_session(WEIGHTS, SIZES)
    assert isinstance(transport, InlineTransport)
    operand = integers(1, 2, 16)
    np.testing.assert_array_equal(offload(transport, 1, operand), expected(1, operand))
    transport.close()
    with pytest.raises(WorkerUnavailableError, match="shared memory"):
        client.open_session(WEIGHTS, SIZES, "slab")


def test_provisioning_sends_only_what_is_missing(worker: WorkerProcess) -> None:
    weights = [remote(integers(700 + i, 9, 5 + i), f"p{i}") for i in range(3)]
    client = WorkerClient(worker.address, timeout=HANG_GUARD_S)
    seen: list[tuple[str, int, int]] = []
    sizes = [weight.d_in * weight.d_out * 2 for weight in weights]
    assert client.provision(weights[:1]) == sizes[0]
    assert client.provision(weights, lambda *step: seen.append(step)) == sum(sizes[1:])
    assert [(done, total) for _, done, total in seen] == [
        (sizes[1], sum(sizes[1:])),
        (sum(sizes[1:]), sum(sizes[1:])),
    ]
    assert client.provision(weights) == 0
    client.close()


def test_integers_are_uploaded_as_they_are(client: WorkerClient) -> None:
    arrays = [quantised(900, 11, 13), quantised(901, 11, 13, np.int16)]
    weights = [remote(values, f"i{i}") for i, values in enumerate(arrays)]
    assert [weight.size for weight in weights] == [143, 286]
    seen: list[tuple[str, int, int]] = []
    assert client.provision(weights, lambda *step: seen.append(step)) == 429
    assert [(done, total) for _, done, total in seen] == [(143, 429), (429, 429)]
    assert client.provision(weights) == 0


@pytest.mark.parametrize("values", [integers(1, 9, 5), quantised(1, 5, 9), quantised(1, 9, 5, np.int16)])
def test_an_array_that_is_not_what_was_announced_is_not_sent(
    client: WorkerClient, values: NDArray[Any]
) -> None:
    announced = RemoteWeight(
        name="w", d_in=5, d_out=9, sha256=weight_digest(values), load=lambda: values, format=WeightFormat.INT8
    )
    with pytest.raises(ValueError, match=r"not int8 \(9, 5\)"):
        client.provision([announced])


def test_a_weight_that_changed_since_it_was_hashed_is_refused(client: WorkerClient) -> None:
    values = integers(800, 9, 5)
    honest = remote(values)
    changed = RemoteWeight(name="w", d_in=5, d_out=9, sha256=honest.sha256, load=lambda: values + 1)
    with pytest.raises(WorkerError, match="SHA-256"):
        client.provision([changed])


def test_large_weights_travel_in_chunks(client: WorkerClient) -> None:
    values = integers(801, 1200, 1000)
    weight = remote(values)
    assert client.provision([weight]) == 2_400_000
    transport = client.open_session([weight], SIZES)
    operand = integers(1, 3, 1000)
    transport.operand(3, 1000)[...] = operand
    result = transport.exchange(0, 3, 1000, 1200)
    np.testing.assert_array_equal(result, operand.astype(np.float32) @ values.astype(np.float32).T)
    transport.close()


def test_info(client: WorkerClient) -> None:
    info = client.info()
    assert (info.engine, info.backend, info.hardware_gpu) == ("cpu", "numba", False)


def test_nobody_listens() -> None:
    client = WorkerClient("127.0.0.1:1", timeout=1.0)
    for call in (
        lambda: client.info(wait=0.5),
        lambda: client.info(wait=1.5),
        lambda: client.provision(WEIGHTS),
        lambda: client.open_session(WEIGHTS, SIZES),
    ):
        with pytest.raises(WorkerUnavailableError, match="cannot be reached"):
            call()
    client.close()
