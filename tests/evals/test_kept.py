"""What is kept is made once per model, and once per directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from evals.attacks.kept import kept, share
from evals.attacks.public import PublicModel


class Model:
    """Stands in for a model: only its identity matters."""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    share(tmp_path)
    yield tmp_path
    share(None)


def model() -> PublicModel:
    return cast("PublicModel", cast("Any", Model()))


def test_a_value_is_made_once_for_a_model_and_key() -> None:
    made: list[str] = []
    one, other = model(), model()
    for name in ("a", "b", "a"):
        assert kept(one, (name, 1), lambda name=name: made.append(name) or name) == name  # type: ignore[misc]
    assert made == ["a", "b"]
    kept(other, ("a", 1), lambda: made.append("again"))
    assert made == ["a", "b", "again"]


def test_another_process_finds_it_in_the_directory(directory: Path) -> None:
    value = np.arange(6.0).reshape(2, 3)
    kept(model(), ("rows", (1, 2)), lambda: value)
    # A model of its own has nothing in memory, like another process.
    found = kept(model(), ("rows", (1, 2)), lambda: pytest.fail("made again"))
    np.testing.assert_array_equal(found, value)
    assert not list(directory.glob("*.partial"))


def test_what_raises_is_not_kept(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        kept(model(), ("k",), lambda: 1 / 0)
    assert kept(model(), ("k",), lambda: 2.0) == 2.0
