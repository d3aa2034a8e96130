"""`lpn` and `plain-int8` through their sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import IntegrityError, UnsupportedModelError
from tee_runner.protection.base import SchemeOptions
from tee_runner.protection.lpn import parameters
from tee_runner.protection.lpn.matrix import SEED
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.lpn.parameters import LpnParameters
from tee_runner.protection.lpn.quantise import quantise
from tee_runner.protection.lpn.ring import PlainInt8, RingStore
from tee_runner.protection.lpn.scheme import Lpn
from tee_runner.protection.rng import SecretKey

from .words_worker import WordsTransport, key_of, linear_of, small_parameters, transport_for, weight_of

WEIGHTS = [weight_of(1, 60, 40), weight_of(2, 21, 70), weight_of(3, 33, 40)]
CHOSEN = [small_parameters(40, 100, 20, 12), small_parameters(70, 64, 10, 20)]


def opened(
    scheme: type[Lpn] | type[PlainInt8], *, key: SecretKey | None = None, wide: bool = False,
    store: RingStore | None = None,
) -> tuple[WordsTransport, Lpn | PlainInt8]:  # fmt: skip
    transport = transport_for(*WEIGHTS, wide=wide)
    extra = {"chosen": CHOSEN} if scheme is Lpn else {}
    options = LpnOptions(wide_weights=wide)
    protection = scheme(transport, options=options, store=store, key=key, **extra)  # type: ignore[arg-type]
    protection.provision([linear_of(w, i) for i, w in enumerate(WEIGHTS)], probes=2)
    transport.operands.clear()
    return transport, protection


def passes(protection: Lpn | PlainInt8, steps: Sequence[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """One pass per step: (weight, rows)."""
    results = []
    for index, rows in steps:
        out = np.full((len(rows), len(WEIGHTS[index])), np.nan, np.float32)
        with protection.forward_session() as session:
            session.linear(linear_of(WEIGHTS[index], index), rows, [len(rows)], out)
        results.append(out)
    return results


def steps_of(seed: int, sizes: Sequence[int]) -> list[tuple[int, np.ndarray]]:
    generator = np.random.default_rng(seed)
    steps = []
    for n in sizes:
        index = int(generator.integers(len(WEIGHTS)))
        rows = generator.standard_normal((n, WEIGHTS[index].shape[1])) * 10.0 ** generator.integers(-3, 4)
        steps.append((index, rows.astype(np.float32)))
    return steps


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**32 - 1))
def test_lpn_is_plain_int8_bit_for_bit(sizes: list[int], wide: bool, seed: int) -> None:
    steps = steps_of(seed, sizes)
    (blinded, lpn), (bare, plain) = opened(Lpn, wide=wide), opened(PlainInt8, wide=wide)
    for a, b in zip(passes(lpn, steps), passes(plain, steps), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    for (index, rows), sent, bare_sent, out in zip(
        steps, blinded.operands, bare.operands, passes(plain, steps), strict=False
    ):
        # The control sends the rounded rows; what comes back is their integer product.
        quantised = quantise(WEIGHTS[index], wide=wide)
        x = bare_sent.astype(np.int32).astype(np.int64)
        levels = quantised.levels
        assert np.abs(x).max(axis=1).tolist() == [levels] * len(rows)
        scale = np.abs(rows).max(axis=1) / np.float32(levels)
        assert np.abs(x * scale[:, None] - rows).max() <= 0.51 * scale.max()
        product = (x @ quantised.values.astype(np.int64).T).astype(np.float32)
        np.testing.assert_array_equal(out, product * (scale[:, None] * quantised.scales))
        assert not np.array_equal(sent, bare_sent)


def test_a_dry_bank_gives_the_same_results() -> None:
    steps = steps_of(1, [1] * 40 + [70, 3, 200, 1])
    (_, dry), (_, warm) = opened(Lpn), opened(Lpn)
    while warm.idle():
        pass
    assert isinstance(warm, Lpn)
    assert all(bank.ready == 192 for bank in warm.banks._banks.values())
    for a, b in zip(passes(dry, steps), passes(warm, steps), strict=True):
        np.testing.assert_array_equal(a, b)


def test_sweeps_that_are_due_are_done_while_a_worker_apart_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And end with its answer. Beside one that shares the processor they wait for the end of the pass."""
    looks = 0

    def answered(self: WordsTransport) -> bool:
        nonlocal looks
        looks += 1
        return looks % 3 == 0

    monkeypatch.setattr(WordsTransport, "answered", answered)
    steps = steps_of(1, [1] * 150)
    (_, beside), (apart, lpn) = opened(Lpn), opened(Lpn)
    apart.worker_apart = True
    assert isinstance(lpn, Lpn)
    lpn._panels_meanwhile = 1
    worked: list[int] = []
    original = lpn.banks.work

    def work(panels: int) -> bool:
        worked.append(panels)
        return original(panels)

    monkeypatch.setattr(lpn.banks, "work", work)
    expected = passes(beside, steps)
    assert looks == 0
    for a, b in zip(passes(lpn, steps), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    # Between two answers, at most two pieces.
    assert 20 < worked.count(1) <= 2 * len(steps)


def test_operands_are_uniform_in_every_bit() -> None:
    """A constant row, sent again and again: no bit, pair of neighbours or column stands out."""
    transport, protection = opened(Lpn, key=key_of(1))
    rows = np.full((100, 40), 1.0, np.float32)
    passes(protection, [(0, rows)] * 60)
    words = np.concatenate(transport.operands)
    assert words.shape == (6000, 40)
    bits = np.unpackbits(words.view(np.uint8).reshape(6000, 40, 4), axis=2, bitorder="little")
    for axis in ((0,), (0, 1), (0, 2)):
        count = np.prod([bits.shape[i] for i in axis])
        deviations = (bits.mean(axis=axis) - 0.5) * 2 * np.sqrt(count)
        assert np.abs(deviations).max() < 5.0
        assert (deviations**2).mean() == pytest.approx(1.0, abs=5 * np.sqrt(2 / deviations.size))
    neighbours = (bits[:, :, 1:] ^ bits[:, :, :-1]).mean(axis=(0, 1))
    assert np.abs((neighbours - 0.5) * 2 * np.sqrt(6000 * 40)).max() < 5.0
    # Bytes: χ² with 255 degrees of freedom.
    counts = np.bincount(words.view(np.uint8).reshape(-1), minlength=256)
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)


def test_uniformity_would_show_the_control() -> None:
    """The same statistic on `plain-int8`, so that the test above can fail."""
    transport, protection = opened(PlainInt8)
    passes(protection, [(0, np.full((100, 40), 1.0, np.float32))])
    bits = np.unpackbits(np.concatenate(transport.operands).view(np.uint8), bitorder="little")
    assert abs(bits.mean() - 0.5) * 2 * np.sqrt(bits.size) > 5.0


def test_two_runs_on_one_prompt_share_no_word_beyond_chance() -> None:
    steps = steps_of(3, [40, 1, 1, 1, 70])
    seen = []
    for _ in range(2):
        transport, protection = opened(Lpn)
        passes(protection, steps)
        seen.append(np.concatenate([operand.reshape(-1) for operand in transport.operands]))
    one, two = seen
    assert one.shape == two.shape
    # Equal words by chance: n/2^32 in the same place, n²/2^32 anywhere; Poisson, far below 10.
    assert (one == two).sum() == 0
    assert len(np.intersect1d(one, two)) < 10


def test_one_operand_shares_no_word_with_the_next() -> None:
    transport, protection = opened(Lpn)
    passes(protection, [(0, np.ones((1, 40), np.float32))] * 90)
    words = np.concatenate([operand.reshape(-1) for operand in transport.operands])
    assert len(np.unique(words)) > len(words) - 5


def test_sequences_and_prompts_share_a_pass() -> None:
    (_, lpn), (_, plain) = opened(Lpn), opened(PlainInt8)
    rows = steps_of(5, [9])[0][1][:, :40]
    results = []
    for protection in (lpn, plain):
        out = np.empty((9, 60), np.float32)
        with protection.forward_session() as session:
            session.linear(linear_of(WEIGHTS[0]), np.ascontiguousarray(rows), [4, 0, 1, 1, 3], out)
        results.append(out)
    np.testing.assert_array_equal(*results)
    assert lpn.operand_rows([4, 0, 1, 1, 3]) == 9


def test_a_pass_leaves_no_activations() -> None:
    _, protection = opened(Lpn)
    rows = np.ones((5, 40), np.float32)
    passes(protection, [(0, rows)])
    assert not protection._x.any()
    assert not protection._u.any()
    assert not protection._row_scales.any()
    assert not protection._checks.any()
    # What was used of the bank is overwritten; the rest is not.
    assert isinstance(protection, Lpn)
    bank = protection.banks._banks[0]
    assert not bank._r[:5].any()
    assert not bank._R[:5].any()
    assert bank._r[5:64, :40].any(axis=1).all()


def test_closing_overwrites_everything() -> None:
    transport, protection = opened(Lpn)
    passes(protection, [(0, np.ones((5, 40), np.float32)), (1, np.ones((100, 70), np.float32))])
    assert isinstance(protection, Lpn)
    banks = list(protection.banks._banks.values())
    probe = protection.probes.of(1)
    protection.close()
    assert transport.closed
    assert not any(bank._r.any() or bank._R.any() for bank in banks)
    assert not probe.v.any()
    with pytest.raises(IntegrityError, match="over"):
        protection.probes.of(1)


def test_the_next_session_finds_weights_and_pools_ready() -> None:
    store = RingStore()
    _, first = opened(Lpn, store=store)
    transport, second = opened(Lpn, store=store)
    assert transport.stats.offloads == 0
    passes(second, steps_of(1, [3]))
    assert all(second.weights[i] is first.weights[i] for i in range(len(WEIGHTS)))


def test_progress_is_shown() -> None:
    seen: list[tuple[str, int, int]] = []
    protection = Lpn(transport_for(*WEIGHTS), chosen=CHOSEN)
    protection.progress = lambda *step: seen.append(step)
    protection.provision([linear_of(w, i) for i, w in enumerate(WEIGHTS)])
    total = 4 * (100 * 60 + 64 * 21 + 100 * 33)
    assert seen[-1] == ("pools", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_opening_takes_the_options() -> None:
    options = SchemeOptions(lpn=LpnOptions(wide_weights=True, bank_rows=256))
    for scheme in (Lpn, PlainInt8):
        protection = scheme.open(transport_for(*WEIGHTS), options, scheme.new_store())
        assert isinstance(protection, scheme)
        assert protection.options is options.lpn
        assert scheme.wire_weight(WEIGHTS[0], options).dtype == np.int16
        assert scheme.wire_weight(WEIGHTS[0], SchemeOptions()).dtype == np.int8
        assert scheme.operand_item_bytes == 4


def test_work_that_cannot_be_done_without_values_is_refused() -> None:
    linear = linear_of(WEIGHTS[0])
    object.__setattr__(linear, "load", None)
    with pytest.raises(ValueError, match="values"):
        PlainInt8(transport_for(*WEIGHTS)).provision([linear])


def test_the_control_warns() -> None:
    assert "clear" in PlainInt8.warning
    assert not Lpn.warning


def test_clients_are_told_the_parameters_and_the_least_level(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {40: 131.27, 70: 129.99}

    def choose(d: int, *, min_bits: float, bytes_per_parameter: float) -> LpnParameters:
        assert (min_bits, bytes_per_parameter) == (128.0, 7.5)
        return LpnParameters(d=d, k=d + 1, w_f=3, w_e=4, bits=levels[d])

    monkeypatch.setattr(parameters, "choose", choose)
    options = SchemeOptions(lpn=LpnOptions(bytes_per_parameter=7.5))
    assert Lpn.parameters_for([40, 70, 40], options) == {
        "weight_bytes": 1,
        "matrix_seed": SEED,
        "security_bits": 129.9,
        "width_40": "k 41, w_f 3, w_e 4",
        "width_70": "k 71, w_f 3, w_e 4",
    }
    assert PlainInt8.parameters_for([40], options) == {"weight_bytes": 1}


def test_a_level_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(d: int, *, min_bits: float, bytes_per_parameter: float) -> LpnParameters:
        raise ValueError("not enough memory")

    monkeypatch.setattr(parameters, "choose", choose)
    with pytest.raises(UnsupportedModelError, match="rows of 40 values: not enough memory"):
        Lpn.parameters_for([40], SchemeOptions())
