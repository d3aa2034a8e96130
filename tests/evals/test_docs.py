"""The page for reviewers says of every attack what its driver says."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.attacks.drivers import ATTACKS

PAGE = (Path(__file__).parents[2] / "docs" / "attacks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_the_page_describes_the_attack(name: str) -> None:
    attack = ATTACKS[name]
    section = PAGE.partition(f"(`{name}`)\n")[2].partition("\n#")[0]
    for text in (attack.source, attack.assumes, attack.measures):
        assert text in section
