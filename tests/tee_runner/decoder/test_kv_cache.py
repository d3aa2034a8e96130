"""Slots: taken, given back, overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from tee_runner.decoder.config import DecoderConfig, RopeConfig
from tee_runner.decoder.kv_cache import KvCache, KvDtype
from tee_runner.errors import CapacityError

CONFIG = DecoderConfig(
    family="llama", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
    head_dim=8, vocab_size=10, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=1e4), tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "stored"), [("float32", np.float32), ("bfloat16", np.uint16)])
def test_shape_and_type(dtype: KvDtype, stored: type) -> None:
    cache = KvCache(CONFIG, slots=3, max_len=20, dtype=dtype)
    assert len(cache.keys) == len(cache.values) == 2
    for array in (*cache.keys, *cache.values):
        assert array.shape == (3, 20, 16)
        assert array.dtype == stored


def test_every_slot_is_given_out_once() -> None:
    cache = KvCache(CONFIG, slots=3, max_len=20)
    slots = {cache.take() for _ in range(3)}
    assert slots == {0, 1, 2}
    assert cache.free_slots == 0
    with pytest.raises(CapacityError, match="Wait"):
        cache.take()
    cache.release(1)
    assert cache.free_slots == 1
    assert cache.take() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("finished", [False, True])
def test_release_overwrites_what_was_written(dtype: KvDtype, finished: bool) -> None:
    cache = KvCache(CONFIG, slots=2, max_len=20, dtype=dtype)
    kept, slot = cache.take(), cache.take()
    for owner, count in ((kept, 20), (slot, 7)):
        assert cache.reserve(owner, count) == 0
        for array in (*cache.keys, *cache.values):
            array[owner, :count] = 5
    if finished:
        cache.lengths[slot] = 7
    cache.release(slot)
    assert cache.lengths[slot] == 0
    for array in (*cache.keys, *cache.values):
        assert not array[slot].any()
        assert (array[kept] == 5).all()


def test_reserve_gives_the_length_and_refuses_what_does_not_fit() -> None:
    cache = KvCache(CONFIG, slots=1, max_len=20)
    slot = cache.take()
    assert cache.reserve(slot, 20) == 0
    cache.lengths[slot] = 12
    assert cache.reserve(slot, 8) == 12
    with pytest.raises(CapacityError, match="21 tokens"):
        cache.reserve(slot, 9)
    assert cache.lengths[slot] == 12
