"""Which rows share a mask, when it is drawn anew, and where a pass's time is accounted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tee_runner.profile import BUCKETS
from tee_runner.protection.base import Linear, MaskOptions
from tee_runner.protection.gelo.base import GeloProtection, Mask, mask_blocks
from tee_runner.protection.schemes import SCHEMES

from .doubles import HALF_SCHEMES, ExactTransport

MASKED = [name for name, scheme in SCHEMES.items() if issubclass(scheme, GeloProtection)]
D = 80
WEIGHT = np.eye(D, dtype=np.float16)
LINEAR = Linear(weight_id=0, name="w", d_in=D, d_out=D)


def run(protection: object, counts: Sequence[int], times: int = 1) -> float:
    """``times`` offloads in one pass; the largest error relative to the largest row norm."""
    rows = np.random.default_rng(5).standard_normal((sum(counts), D)).astype(np.float32)
    worst = 0.0
    with protection.forward_session() as session:  # type: ignore[attr-defined]
        for _ in range(times):
            out = np.empty_like(rows)
            session.linear(LINEAR, rows, counts, out)
            worst = max(worst, float(np.abs(out - rows).max() / np.linalg.norm(rows, axis=1).max()))
    return worst


@pytest.mark.parametrize(
    ("counts", "shared", "blocks"),
    [
        ([1, 1, 1], False, [(0, 1), (1, 1), (2, 1)]),
        ([1, 1, 1], True, [(0, 3)]),
        ([1, 1, 30, 1, 1], True, [(0, 2), (2, 30), (3, 2)]),
        ([0, 1, 0, 1], True, [(1, 2)]),
        ([0, 1, 0, 1], False, [(1, 1), (3, 1)]),
        ([5], True, [(0, 5)]),
        ([0, 0], True, []),
    ],
)
def test_blocks(counts: list[int], shared: bool, blocks: list[tuple[int, int]]) -> None:
    assert mask_blocks(counts, shared_decode=shared) == blocks


@given(st.lists(st.integers(0, 4), max_size=20), st.booleans())
def test_blocks_cover_all_rows_in_order(counts: list[int], shared: bool) -> None:
    blocks = mask_blocks(counts, shared_decode=shared)
    assert sum(rows for _, rows in blocks) == sum(counts)
    firsts = [first for first, _ in blocks]
    assert firsts == sorted(set(firsts))
    assert all(counts[first] for first in firsts)


@pytest.mark.parametrize("name", MASKED)
def test_a_shared_mask_takes_fewer_rows_and_gives_the_same_result(name: str) -> None:
    rows = {}
    for shared in (False, True):
        transport = ExactTransport([WEIGHT])
        protection = SCHEMES[name](transport, masks=MaskOptions(shared_decode=shared))
        # f16 operands under a mask: 2^-11 relative per element, times the mix's energy (< 5).
        assert run(protection, [1] * 8) < 5 * 2.0**-11
        rows[shared] = len(transport.operands[0])
    assert rows[True] < rows[False]
    assert rows[True] == SCHEMES[name].operand_rows([8])


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_mask_lives_for_a_pass_or_an_offload(
    name: str, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    protection = SCHEMES[name](ExactTransport([WEIGHT]), masks=MaskOptions(per_offload=fresh))
    assert isinstance(protection, GeloProtection)
    drawn: list[Mask] = []
    wiped: list[Mask] = []
    draw = protection.new_mask

    def noted(n: int) -> Mask:
        mask = draw(n)
        drawn.append(mask)
        wipe = mask.wipe
        monkeypatch.setattr(mask, "wipe", lambda: (wiped.append(mask), wipe()))
        return mask

    monkeypatch.setattr(protection, "new_mask", noted)
    run(protection, [1, 3], times=4)
    assert len(drawn) == (8 if fresh else 2)
    assert wiped == drawn


@pytest.mark.parametrize("name", list(HALF_SCHEMES))
def test_the_profile_accounts_every_bucket_of_an_offload(name: str) -> None:
    protection = SCHEMES[name](ExactTransport([WEIGHT]))
    run(protection, [3], times=3)
    spent = protection.profile.nanoseconds
    assert set(spent) == set(BUCKETS)
    assert all(value >= 0 for value in spent.values())
    if name in MASKED:
        assert min(spent["mask apply"], spent["unapply"], spent["shield"]) > 0
    assert protection.profile.total() == sum(spent.values())
    protection.profile.reset()
    assert protection.profile.total() == 0
