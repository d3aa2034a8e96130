"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tee_runner.models import DEFAULT_MODEL, pull


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model as a directory, pulled once into the cache."""
    return pull(DEFAULT_MODEL)
