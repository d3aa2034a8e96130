"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

# Before numpy and torch are imported. Two processes run the tests (scripts/run_tests.sh), on small
# matrices: more threads of OpenBLAS or torch only wait for each other, busily. numba's stay as they are.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Which rich's consoles keep from when they are made.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import pytest

from tee_runner.models import DEFAULT_MODEL, pull


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model as a directory, pulled once into the cache."""
    return pull(DEFAULT_MODEL)
