"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

# Before numpy and torch are imported. One process per core runs the tests (see the Makefile), on small
# matrices: more threads of OpenBLAS or torch only wait for each other, busily. numba's stay as they are.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test process of several is told a width of 80, which rich's consoles keep from when they are made.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import pytest

from tee_runner.models import DEFAULT_MODEL, pull


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model as a directory, pulled once into the cache."""
    return pull(DEFAULT_MODEL)


# Worker and runner wait for each other in loops on all cores: two pairs at a time would starve each other.
_SERVICES = ("e2e", "gelo_cli")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in one process when there are several: a file, and all tests that start the services."""
    root = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(root)
        group = "services" if file.parts[0] in _SERVICES else str(file)
        item.add_marker(pytest.mark.xdist_group(group))
