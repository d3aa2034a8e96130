"""Small models, made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .small_models import MILD, STRONG, SmallModel, make


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SmallModel]:
    """The small model of a family by name, with strong or mild weights."""
    made: dict[tuple[str, bool], SmallModel] = {}

    def get(name: str, *, mild: bool = False) -> SmallModel:
        if (name, mild) not in made:
            made[name, mild] = make(name, MILD if mild else STRONG, tmp_path_factory.mktemp(name))
        return made[name, mild]

    return get
