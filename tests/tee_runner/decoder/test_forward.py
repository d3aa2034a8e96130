"""The whole forward pass against transformers, for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tee_runner.decoder.forward import Decoder, LinearHandles
from tee_runner.decoder.kv_cache import KvCache, KvDtype
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


@pytest.mark.parametrize("chunks", [[1, 47], [5, 30, 1, 12]])
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


# A key or value in bfloat16 is off by 2⁻⁹ of itself at most; in int8 by 1/254 of its head's
# largest, some three times its own size: 2⁻⁶. Three layers, in scores and in values.
@pytest.mark.parametrize(("dtype", "off"), [("bfloat16", 2.0**-9), ("int8", 2.0**-6)])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_narrow_caches(small_model: Models, name: str, dtype: KvDtype, off: float) -> None:
    model = small_model(name)
    tokens = tokens_of(14, 40)
    expected = model.reference(tokens)
    cache = model.cache(dtype=dtype)
    decoder, slot = model.decoder(), cache.take()
    feed(decoder, cache, model.session, (slot, tokens[:20], 1))
    worst = 0.0
    for i in range(20, 40):
        logits = feed(decoder, cache, model.session, (slot, [tokens[i]], 1))
        worst = max(worst, distance(logits, expected[i : i + 1]))
    assert SINGLE < worst < 6 * off


def in_chunks(decoder: Decoder, cache: KvCache, opened: Steps, text: list[int], counts: list[int]) -> Float32:
    """All logits of a sequence fed chunk by chunk, beside one that lags behind it."""
    slot, other = cache.take(), cache.take()
    parts, start = [], 0
    for count in counts:
        logits = feed(
            decoder, cache, opened, (slot, text[start : start + count], count), (other, text[start:][:1], 0)
        )
        parts.append(logits)
        start += count
    return np.concatenate(parts)


CHUNKS = [40, 1, 25, 1, 1, 40, 17, 40, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2-window", "float32"), ("mistral", "int8"), ("gemma3", "bfloat16"), ("gemma4", "float32"),
        ("gemma4", "int8"),
    ],
)  # fmt: skip
def test_rings_answer_as_full_caches_do(small_model: Models, name: str, dtype: KvDtype) -> None:
    model = small_model(name)
    text = tokens_of(18, sum(CHUNKS))
    full, ring = model.cache(dtype=dtype), model.cache(dtype=dtype, longest_chunk=40)
    windows = [model.ours.config.layer(i).window for i in range(model.ours.config.num_layers)]
    assert [keys.shape[1] for keys in ring.keys] == [64 if window else MAX_LEN for window in windows]
    assert ring.nbytes < full.nbytes
    expected = in_chunks(model.decoder(), full, model.session, text, CHUNKS)
    np.testing.assert_array_equal(in_chunks(model.decoder(), ring, model.session, text, CHUNKS), expected)
    if dtype == "float32":
        assert distance(expected, model.reference(text)) <= SINGLE


@pytest.mark.parametrize("name", ["mistral", "gemma4"])
def test_a_failed_pass_over_a_ring_can_be_repeated(small_model: Models, name: str) -> None:
    model = small_model(name, mild=True)
    protection = model.protection(Plain)
    transport = protection.transport
    text = tokens_of(19, 120)
    decoder, cache = model.decoder(), model.cache(longest_chunk=40)
    slot = cache.take()
    for start in (0, 40):
        feed(decoder, cache, model.session, (slot, text[start : start + 40], 1))
    before = transport.stats.offloads

    def tamper(result: Float32) -> None:
        if transport.stats.offloads == before + len(model.linears):
            result[0, 0] = np.nan

    # Fails at the head: every layer has written all it would.
    transport.tamper = tamper  # type: ignore[attr-defined]
    with pytest.raises(WorkerProtocolError):
        feed(decoder, cache, protection.forward_session, (slot, tokens_of(20, 40), 1))
    assert cache.lengths[slot] == 80
    # Again, with the right tokens, and in other pieces.
    for start, end in ((80, 81), (81, 120)):
        logits = feed(decoder, cache, model.session, (slot, text[start:end], 1))
        assert distance(logits, model.reference(text)[end - 1 : end]) <= SINGLE
    cache.release(slot)
    assert not any(stored.any() for stored in (*cache.keys, *cache.values))


def test_capped_attention_scores(small_model: Models) -> None:
    model = small_model("llama")
    tokens, config = tokens_of(21, 30), model.ours.config

    def logits(**changes: float) -> Float32:
        handles = LinearHandles(handles=model.linears)
        decoder = Decoder(replace(config, **changes), model.ours.weights, handles, max_len=MAX_LEN)
        cache = model.cache()
        return feed(decoder, cache, model.session, (cache.take(), tokens, 30))

    # A tight cap levels all scores, as queries of no size do; a wide one changes nothing.
    uniform = logits(query_scale=0.0)
    assert distance(uniform, model.reference(tokens)) > 0.1
    assert distance(logits(attn_logit_softcap=1e-5), uniform) <= SINGLE + 2e-5
    assert distance(logits(attn_logit_softcap=1e4), model.reference(tokens)) <= 2 * SINGLE


def test_handles_must_be_those_of_the_weights(small_model: Models) -> None:
    model = small_model("llama")
    a, b, *rest = model.linears
    for wrong in ((b, a, *rest), (a, b), (a, replace(b, d_in=b.d_in + 1), *rest)):
        with pytest.raises(ValueError, match="missing, or in another place"):
            Decoder(
                model.ours.config, model.ours.weights, LinearHandles(handles=tuple(wrong)), max_len=MAX_LEN
            )


def test_weights_must_fit_the_configuration(small_model: Models) -> None:
    model = small_model("llama")
    handles = LinearHandles(handles=model.linears)
    for changes in ({"num_kv_heads": 1}, {"intermediate_size": 80}, {"head_dim": 16}):
        config = replace(model.ours.config, **changes)
        with pytest.raises(ValueError, match="do not have the layer's sizes"):
            Decoder(config, model.ours.weights, handles, max_len=MAX_LEN)
    ple = small_model("gemma4")
    with pytest.raises(ValueError, match="per-layer inputs are incomplete"):
        Decoder(
            ple.ours.config, replace(ple.ours.weights, ple=None), LinearHandles(handles=ple.linears),
            max_len=MAX_LEN,
        )  # fmt: skip


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
