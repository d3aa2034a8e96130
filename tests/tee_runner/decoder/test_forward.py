"""The whole forward pass against transformers, for every family."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tee_runner.decoder.forward import Decoder
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.errors import CapacityError, InvalidRequestError, WorkerProtocolError
from tee_runner.protection.base import ForwardSession
from tee_runner.protection.gelo.haar import Haar
from tee_runner.protection.gelo.hd3 import Hd3
from tee_runner.protection.plain import Plain
from tests.tee_runner.protection.doubles import Float32

from .small_models import FAMILIES, MAX_LEN, VOCAB, SmallModel, batch_of, distance, tokens_of

Models = Callable[..., SmallModel]
Steps = Callable[[], ForwardSession]

# Both sides compute in float32 (2⁻²⁴, 6e-8, a rounding); three layers of some ten dependent
# steps, each a sum of up to 112 terms, and their float32 angles: some 300 roundings.
SINGLE = 2e-5
# With `plain`, operands are rounded to float16: an element is off by 2⁻¹¹ of itself at most, and
# 2.0e-4 root mean square. With mild weights errors shrink from one offload to the next, so what
# arrives is at most the independent sum over the layers' twelve and the head: √13·2.0e-4 =
# 7.2e-4, less what the residual keeps away.
HALF = 1e-3
# A GELO operand carries shield rows of norm 4 per data row's 1: its rounding errors, spread over
# all s rows, are those of a row of norm √((n + 16·k)/s) ≤ 4, so at most four times as large.
MASKED = 4 * HALF


@pytest.fixture(params=["exact", "plain"])
def wire(request: pytest.FixtureRequest) -> str:
    """Exact products of the rows as they are, or ``plain`` with its rounding to float16."""
    return str(request.param)


@pytest.fixture(params=list(FAMILIES))
def model(request: pytest.FixtureRequest, wire: str, small_model: Models) -> SmallModel:
    return small_model(request.param, mild=wire == "plain")


@pytest.fixture
def steps(wire: str, model: SmallModel) -> tuple[Steps, float]:
    """Opens the session of a pass, and the tolerance that goes with it."""
    if wire == "exact":
        return model.session, SINGLE
    return model.protection(Plain).forward_session, HALF


def feed(decoder: Decoder, cache: KvCache, opened: Steps, *parts: tuple[int, list[int], int]) -> Float32:
    """One pass; a copy of its logits."""
    with opened() as session:
        return decoder.forward(batch_of(parts), cache, session).copy()


def test_prefill(model: SmallModel, steps: tuple[Steps, float]) -> None:
    opened, tolerance = steps
    tokens = tokens_of(1, 48)
    cache = model.cache()
    logits = feed(model.decoder(), cache, opened, (cache.take(), tokens, 48))
    assert distance(logits, model.reference(tokens)) <= tolerance


def test_prefill_then_decode(model: SmallModel, steps: tuple[Steps, float]) -> None:
    opened, tolerance = steps
    tokens = tokens_of(2, 14 + 40)
    expected = model.reference(tokens)
    decoder, cache = model.decoder(), model.cache()
    slot = cache.take()
    assert distance(feed(decoder, cache, opened, (slot, tokens[:14], 1)), expected[13:14]) <= tolerance
    for i in range(14, len(tokens)):
        logits = feed(decoder, cache, opened, (slot, [tokens[i]], 1))
        assert distance(logits, expected[i : i + 1]) <= tolerance
        assert cache.lengths[slot] == i + 1


def test_mixed_ragged_batches(model: SmallModel, steps: tuple[Steps, float]) -> None:
    opened, tolerance = steps
    decoder, cache = model.decoder(), model.cache()
    texts = [tokens_of(seed, 60) for seed in (3, 4, 5, 6)]
    expected = [model.reference(text) for text in texts]
    a, b, c, d = (cache.take() for _ in range(4))
    feed(decoder, cache, opened, (c, texts[2][:7], 0), (a, texts[0][:25], 1))
    past = {a: 25, b: 0, c: 7, d: 0}
    # Decoding, a first chunk, one that continues, a one-token prompt: all in one pass, again
    # and again at other lengths; what is sampled varies too.
    plan = [
        [(a, 1, 1), (b, 17, 1), (c, 9, 0)],
        [(d, 1, 1), (b, 1, 1), (a, 1, 1), (c, 20, 3)],
        [(c, 1, 1), (a, 1, 1), (d, 12, 12), (b, 1, 1)],
        [(d, 1, 1), (c, 1, 1), (b, 1, 1), (a, 1, 1)],
    ]
    names = {a: 0, b: 1, c: 2, d: 3}
    for step in plan:
        parts, wanted = [], []
        for slot, count, sampled in step:
            text, start = names[slot], past[slot]
            parts.append((slot, texts[text][start : start + count], sampled))
            past[slot] = end = start + count
            wanted.append(expected[text][end - sampled : end])
        logits = feed(decoder, cache, opened, *parts)
        assert distance(logits, np.concatenate(wanted)) <= tolerance
    for slot, length in past.items():
        assert cache.lengths[slot] == length


@pytest.mark.parametrize("chunks", [[1, 47], [16, 16, 16], [5, 30, 1, 12], [47, 1]])
def test_prefill_in_chunks_is_prefill(
    model: SmallModel, steps: tuple[Steps, float], chunks: list[int]
) -> None:
    opened, tolerance = steps
    tokens = tokens_of(7, 48)
    decoder, cache = model.decoder(), model.cache()
    whole = feed(decoder, cache, opened, (cache.take(), tokens, 48))
    slot, parts, start = cache.take(), [], 0
    for count in chunks:
        parts.append(feed(decoder, cache, opened, (slot, tokens[start : start + count], count)))
        start += count
    # The same sums in another order; with `plain` that moves a rounding to float16 now and then.
    assert distance(np.concatenate(parts), whole) <= tolerance


def test_sequences_do_not_see_each_other(model: SmallModel, steps: tuple[Steps, float]) -> None:
    opened, tolerance = steps
    own = tokens_of(8, 30)
    results = []
    for other in (None, tokens_of(9, 21), tokens_of(10, 21)):
        decoder, cache = model.decoder(), model.cache()
        slot, neighbour = cache.take(), cache.take()
        logits = []
        for first, last in ((0, 20), (20, 29), (29, 30)):
            parts = [(slot, own[first:last], 1)]
            if other is not None:
                parts.insert(first % 2, (neighbour, other[first // 2 : last // 2 + 1], 1))
            place = parts.index((slot, own[first:last], 1))
            logits.append(feed(decoder, cache, opened, *parts)[place])
        results.append(np.stack(logits))
    # Rows are quantised one by one, so a neighbour does not even change the float16 noise: the
    # products may be summed in another order, which moves a rounding to float16 now and then.
    for result in results[1:]:
        assert distance(result, results[0]) <= tolerance / 2
    # Two neighbours of the same shape: the same sums in the same order.
    np.testing.assert_array_equal(results[1], results[2])


@pytest.mark.parametrize("kind", [Haar, Hd3])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_masks_do_not_change_the_answer(kind: type[Haar] | type[Hd3], name: str, small_model: Models) -> None:
    model = small_model(name, mild=True)
    opened = model.protection(kind).forward_session
    decoder, cache = model.decoder(), model.cache()
    texts = [tokens_of(seed, 40) for seed in (11, 12)]
    expected = [model.reference(text) for text in texts]
    a, b = cache.take(), cache.take()
    logits = feed(decoder, cache, opened, (a, texts[0][:30], 30))
    assert distance(logits, expected[0][:30]) <= MASKED
    logits = feed(decoder, cache, opened, (a, [texts[0][30]], 1), (b, texts[1][:20], 2))
    assert distance(logits, np.concatenate([expected[0][30:31], expected[1][18:20]])) <= MASKED
    for i in range(31, 40):
        logits = feed(decoder, cache, opened, (b, [texts[1][i - 11]], 1), (a, [texts[0][i]], 1))
        wanted = np.stack([expected[1][i - 11], expected[0][i]])
        assert distance(logits, wanted) <= MASKED


def test_long_prefill_uses_all_threads_to_the_same_end(small_model: Models) -> None:
    model = small_model("llama")
    tokens = tokens_of(13, 170)  # beyond the serial limit of 2²¹ multiply-adds
    cache = model.cache()
    logits = feed(model.decoder(), cache, model.session, (cache.take(), tokens, 170))
    assert distance(logits, model.reference(tokens)) <= SINGLE


def test_bfloat16_cache(small_model: Models) -> None:
    model = small_model("qwen3")
    tokens = tokens_of(14, 40)
    expected = model.reference(tokens)
    cache = model.cache(dtype="bfloat16")
    decoder, slot = model.decoder(), cache.take()
    feed(decoder, cache, model.session, (slot, tokens[:20], 1))
    worst = 0.0
    for i in range(20, 40):
        logits = feed(decoder, cache, model.session, (slot, [tokens[i]], 1))
        worst = max(worst, distance(logits, expected[i : i + 1]))
    # Keys and values are off by 2⁻⁹ at most; three layers, in scores and in values.
    assert SINGLE < worst < 6 * 2.0**-9


def test_logits_only_where_asked(small_model: Models) -> None:
    model = small_model("llama")
    cache = model.cache()
    slot = cache.take()
    logits = feed(model.decoder(), cache, model.session, (slot, tokens_of(15, 5), 0))
    assert logits.shape == (0, VOCAB)
    assert cache.lengths[slot] == 5


@pytest.mark.parametrize("failing", range(13))
def test_a_failed_pass_can_be_repeated_and_leaves_nothing(small_model: Models, failing: int) -> None:
    model = small_model("llama", mild=True)
    protection = model.protection(Plain)
    transport = protection.transport
    tokens = tokens_of(16, 30)
    decoder, cache = model.decoder(), model.cache()
    slot = cache.take()
    feed(decoder, cache, protection.forward_session, (slot, tokens[:10], 1))
    before = transport.stats.offloads

    def tamper(result: Float32) -> None:
        if transport.stats.offloads == before + failing + 1:
            result[0, 0] = np.nan

    transport.tamper = tamper  # type: ignore[attr-defined]
    with pytest.raises(WorkerProtocolError):
        feed(decoder, cache, protection.forward_session, (slot, tokens[10:], 20))
    assert cache.lengths[slot] == 10
    transport.tamper = None  # type: ignore[attr-defined]
    if failing % 2:
        logits = feed(decoder, cache, protection.forward_session, (slot, tokens[10:], 20))
        assert distance(logits, model.reference(tokens)[10:]) <= HALF
    cache.release(slot)
    assert not any(stored.any() for stored in (*cache.keys, *cache.values))


def test_a_sequence_cannot_outgrow_its_slot(small_model: Models) -> None:
    model = small_model("llama")
    decoder, cache = model.decoder(), model.cache()
    slot = cache.take()
    with pytest.raises(CapacityError):
        feed(decoder, cache, model.session, (slot, tokens_of(17, MAX_LEN + 1), 1))
    feed(decoder, cache, model.session, (slot, tokens_of(17, MAX_LEN), 1))
    with pytest.raises(CapacityError):
        feed(decoder, cache, model.session, (slot, [1], 1))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(small_model: Models, token: int) -> None:
    model = small_model("llama")
    cache = model.cache()
    with pytest.raises(InvalidRequestError):
        feed(model.decoder(), cache, model.session, (cache.take(), [1, token], 1))
