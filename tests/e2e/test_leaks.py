"""What the worker learns while the real model answers: nothing in clear, under every mask and transport.

The same search must find the secrets under `plain`. Otherwise it would prove nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tee_runner.decoder.forward import Decoder, RaggedBatch
from tee_runner.models import LoadedModel
from tee_runner.protection.base import Float32, ForwardSession, Linear, MaskOptions, Protection
from tee_runner.protection.gelo.base import GeloProtection
from tee_runner.protection.lpn.layout import unpack_rows
from tee_runner.protection.lpn.matrix import public_matrix
from tee_runner.protection.lpn.quantise import quantise
from tee_runner.protection.rng import SecretKey
from tee_runner.protection.schemes import scheme
from tee_runner.worker.client import TransportName
from tee_runner.worker.transport import Transport

from .conftest import chat
from .processes import WorkerProcess, start_python
from .recording import Offload, Operand, Recording, Secrets, cosine_bound, leaks, read_recording
from .running import running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTION = "My doctor, Mrs. Abernathy, says I have haemochromatosis. What should I not eat?"
TOKENS = 8


@dataclass(frozen=True, slots=True)
class Spy:
    """A spying worker process and its recording."""

    process: WorkerProcess
    path: Path


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spy]:
    path = tmp_path_factory.mktemp("spy") / "recording"
    process = start_python(["-m", "tests.e2e.spy_worker", str(path), "127.0.0.1:0"])
    yield Spy(process, path)
    process.kill()
    path.unlink()


@pytest.fixture(scope="module")
def weight_names(model: LoadedModel) -> dict[str, str]:
    """The public weights by their digest, in float16 and quantised."""
    names = {}
    for weight in model.weights.linears():
        values = weight.load()
        for form in (values, quantise(values).values):
            names[hashlib.sha256(form.tobytes()).hexdigest()] = weight.name
    return names


class _Watched(ForwardSession):
    """Notes the rows of each offload before they are protected."""

    def __init__(self, inner: ForwardSession, secrets: Secrets) -> None:
        self._inner, self._secrets = inner, secrets

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        self._secrets.offloads.append(Offload(weight.name, rows.copy()))
        self._inner.linear(weight, rows, counts, out)

    def wipe(self) -> None:
        self._inner.wipe()


def watched(name: str, secrets: Secrets) -> type[Protection]:
    """The scheme ``name`` with a fixed key, so that its chances are the same in every run."""
    base = scheme(name)

    class WatchedScheme(base):  # type: ignore[misc, valid-type]
        def __init__(self, transport: Transport, *, masks: MaskOptions | None = None) -> None:
            if issubclass(base, GeloProtection):
                key = SecretKey(hashlib.sha256(b"leak test").digest())
                super().__init__(transport, masks=masks, key=key)
            else:
                super().__init__(transport, masks=masks)

        def forward_session(self) -> ForwardSession:
            return _Watched(super().forward_session(), secrets)

    return WatchedScheme


@contextmanager
def _noting_logits(secrets: Secrets) -> Iterator[None]:
    original = Decoder.forward

    def forward(self: Decoder, batch: RaggedBatch, cache: object, session: ForwardSession) -> Float32:
        logits = original(self, batch, cache, session)  # type: ignore[arg-type]
        secrets.logits += [row.copy() for row in logits]
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", forward)
        yield


def without_matrices(opening: Recording) -> list[tuple[str, bytes]]:
    """What was received, without operands inline. All operands must be rows of the public matrix G."""
    known: dict[int, set[bytes]] = {}
    for operand in opening.operands:
        d = operand.rows.shape[1]
        if d not in known:
            rows = np.empty((2 * d, d), np.uint32)
            unpack_rows(public_matrix(d, 2 * d), 0, rows)
            known[d] = {row.tobytes() for row in rows}
        assert {row.tobytes() for row in operand.rows} <= known[d]
    inline = iter(opening.operands)
    received = []
    for source, data in opening.received:
        # The first message of a stream names its session.
        if source.endswith("/Compute") and len(data) > 200:
            data = data.replace(next(inline).rows.tobytes(), b"")
            assert len(data) < 200
        received.append((source, data))
    return received


def record(
    model: LoadedModel, spy: Spy, weight_names: dict[str, str], name: str, transport: TransportName
) -> tuple[Recording, Secrets]:
    """Generate, and return what the worker saw and what it must not have.

    What it multiplied before the first token, to make the pools of `lpn`, must be the public G.
    """
    start = spy.path.stat().st_size
    secrets = Secrets(prompt=QUESTION)
    prompt = chat(model, QUESTION)
    with (
        _noting_logits(secrets),
        running(
            model, spy.process.address, name, transport=transport, scheme=watched(name, secrets)
        ) as served,
    ):
        opening, start = read_recording(spy.path, start, weight_names, model.weights.lm_head.name)
        (answer,) = served.generate([prompt], TOKENS)
    assert len(answer.tokens) == TOKENS
    secrets.answer = answer.text
    content = model.tokenizer.encode(QUESTION)
    place = prompt.index(content[0])
    assert prompt[place : place + len(content)] == content
    secrets.tokens = [*content, *answer.tokens]
    # The worker writes its slab down when it sees the session end.
    for _ in range(500):
        recording, _ = read_recording(spy.path, start, weight_names, model.weights.lm_head.name)
        if transport == "grpc" or any(source == "slab" for source, _ in recording.received):
            break
        time.sleep(0.02)
    uploaded = {*opening.uploaded, *recording.uploaded}
    assert uploaded <= set(weight_names), "something other than a public weight was uploaded"
    assert bool(opening.operands) == (name == "lpn")
    recording.received += without_matrices(opening)
    return recording, secrets


@pytest.mark.parametrize("transport", ["slab", "grpc"])
@pytest.mark.parametrize("name", ["gelo-haar", "gelo-hd3", "gelo-dct4"])
def test_masks_show_nothing_in_clear(
    model: LoadedModel, spy: Spy, weight_names: dict[str, str], name: str, transport: TransportName
) -> None:
    recording, secrets = record(model, spy, weight_names, name, transport)
    assert len(recording.operands) == TOKENS * (4 * model.config.num_layers + 1)
    assert len(secrets.logits) == len(recording.head_results) == TOKENS
    assert any("OpenSession" in source for source, _ in recording.received)
    assert leaks(recording, secrets) == []


@pytest.mark.parametrize("transport", ["slab", "grpc"])
def test_the_search_finds_what_plain_shows(
    model: LoadedModel, spy: Spy, weight_names: dict[str, str], transport: TransportName
) -> None:
    recording, secrets = record(model, spy, weight_names, "plain", transport)
    found = leaks(recording, secrets)
    # Every single offload is recognised, by its direction, by its span and by its bytes.
    offloads = len(recording.operands)
    assert sum("parallel to a plaintext row" in text for text in found) == offloads
    assert sum("in the span of" in text for text in found) == offloads
    assert (
        sum(text.startswith("operand of") and "activation row as float16" in text for text in found)
        == offloads
    )
    assert sum("parallel to a logits row" in text for text in found) == TOKENS
    assert any("a logits row as float32" in text for text in found)


@pytest.mark.parametrize("transport", ["slab", "grpc"])
def test_lpn_shows_nothing_in_clear(
    model: LoadedModel, spy: Spy, weight_names: dict[str, str], transport: TransportName
) -> None:
    recording, secrets = record(model, spy, weight_names, "lpn", transport)
    assert len(recording.operands) == TOKENS * (4 * model.config.num_layers + 1)
    assert len(secrets.logits) == len(recording.head_results) == TOKENS
    assert leaks(recording, secrets) == []
    # Every word once: no row was blinded with what another was. By chance n²/2^33 pairs are equal.
    words = np.concatenate([operand.rows.reshape(-1) for operand in recording.operands])
    repeated = len(words) - len(np.unique(words))
    expected = len(words) ** 2 / 2**33
    assert abs(repeated - expected) < 6 * np.sqrt(expected) + 3


@pytest.mark.parametrize("transport", ["slab", "grpc"])
def test_the_search_finds_what_plain_int8_shows(
    model: LoadedModel, spy: Spy, weight_names: dict[str, str], transport: TransportName
) -> None:
    recording, secrets = record(model, spy, weight_names, "plain-int8", transport)
    found = leaks(recording, secrets)
    offloads = len(recording.operands)
    assert sum("parallel to a plaintext row" in text for text in found) == offloads
    assert sum("in the span of" in text for text in found) == offloads
    assert sum("parallel to a logits row" in text for text in found) == TOKENS


# --- each detector on its own ------------------------------------------------------------------------------

RNG = np.random.default_rng(2)
N, D = 5, 64


def masked() -> tuple[Recording, Secrets]:
    """An honest GELO operand of N Gaussian rows: nothing to be found."""
    rows = RNG.standard_normal((N, D)).astype(np.float32)
    shields = 4 * RNG.standard_normal((8, D))
    mask = np.linalg.qr(RNG.standard_normal((N + 8, N + 8)))[0]
    operand = (mask @ np.concatenate([rows, shields])).astype(np.float16)
    secrets = Secrets(
        prompt="a secret question",
        answer="an answer, naïvely",
        tokens=[311, 4097, 12, 0, 0, 9],
        offloads=[Offload("w", rows)],
        logits=[RNG.standard_normal(100).astype(np.float32)],
    )
    noise = RNG.bytes(5000)
    recording = Recording([Operand("w", operand)], [("message", noise)], [np.ones((1, 100), np.float32)])
    return recording, secrets


def test_an_honest_operand_is_clean() -> None:
    assert leaks(*masked()) == []


def test_an_unmixed_row_is_found() -> None:
    recording, secrets = masked()
    rows = recording.operands[0].rows.copy()
    rows[3] = (-0.125 * secrets.offloads[0].rows[2]).astype(np.float16)
    recording.operands[0] = Operand("w", rows)
    found = leaks(recording, secrets)
    assert any("parallel to a plaintext row" in text for text in found)
    assert any("an activation row as float16" in text for text in found)


def test_a_mix_without_shields_is_found() -> None:
    recording, secrets = masked()
    mask = np.linalg.qr(RNG.standard_normal((N, N)))[0]
    recording.operands[0] = Operand("w", (mask @ secrets.offloads[0].rows).astype(np.float16))
    assert leaks(recording, secrets) == ["offload 0 (w): it lies in the span of the plaintext rows"]


@pytest.mark.parametrize("exponent", [-12, -3, 0, 1, 9])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_row_at_any_scale_and_offset_is_found(exponent: int, dtype: type, offset: int) -> None:
    recording, secrets = masked()
    width = 8 * np.dtype(dtype).itemsize
    for what, row in (("an activation", secrets.offloads[0].rows[4]), ("a logits", secrets.logits[0])):
        data = np.ldexp(row, exponent).astype(dtype).tobytes()
        recording.received = [("message", RNG.bytes(offset) + data + RNG.bytes(99))]
        assert leaks(recording, secrets) == [f"message: {what} row as float{width}"]


@pytest.mark.parametrize("dtype", ["<i4", "<i8"])
def test_token_ids_are_found(dtype: str) -> None:
    recording, secrets = masked()
    recording.received = [("message", b"x" + np.array([4097, 12], dtype).tobytes())]
    assert leaks(recording, secrets) == ["message: two token ids in a row"]
    recording.received = [("message", np.array([12, 4097, 0, 0, 0], dtype).tobytes())]
    assert leaks(recording, secrets) == []


@pytest.mark.parametrize(("text", "what"), [("t questio", "prompt"), ("naïvely", "answer")])
def test_text_is_found(text: str, what: str) -> None:
    recording, secrets = masked()
    recording.received = [("metadata", b"..." + text.encode() + b".....")]
    assert leaks(recording, secrets) == [f"metadata: 8 bytes of the {what}"]
    recording.received = [("metadata", b"..." + text.encode()[:7] + b".....")]
    assert leaks(recording, secrets) == []


def test_parallel_logits_are_found() -> None:
    recording, secrets = masked()
    recording.head_results = [np.stack([np.ones(100, np.float32), -3 * secrets.logits[0] + 0.01])]
    assert leaks(recording, secrets) == ["result 0 of lm_head: parallel to a logits row"]


def test_recordings_of_other_runs_are_refused() -> None:
    recording, secrets = masked()
    recording.operands = []
    with pytest.raises(AssertionError, match="different runs"):
        leaks(recording, secrets)


def test_the_cosine_bound_holds_for_the_worst_case() -> None:
    """Parallel rows and Haar masks by the thousand: the bound's own model, at a rate that can be seen.

    The largest of m values of Student's t exceeds its quantile at 1/(100 m) with probability 1 %.
    """
    assert 0.9 < cosine_bound(1) < cosine_bound(8) < cosine_bound(64) < 0.9999
    n, d, worst = 16, 256, 0.0
    direction = RNG.standard_normal(d)
    direction /= np.linalg.norm(direction)
    for _ in range(300):
        block = np.concatenate([np.tile(direction, (n, 1)), RNG.standard_normal((8, d)) * 4 / np.sqrt(d)])
        mask = np.linalg.qr(RNG.standard_normal((n + 8, n + 8)))[0]
        operand = mask @ block
        worst = max(worst, float((np.abs(operand @ direction) / np.linalg.norm(operand, axis=1)).max()))
    assert 0.8 < worst < cosine_bound(n)
