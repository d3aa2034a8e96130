"""Compiled kernels are found again, and never outlive a change of any kernel source."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

_HELPER = "import numba\n@numba.njit\ndef step(x):\n    return x + {step}\n"
_KERNEL = """
import numba
from kernels.helper import step

@numba.njit(cache=True)
def twice(x):
    return step(step(x))
"""
_RUN = """
import sys
from pathlib import Path
from gelo.kernel_cache import use_kernel_cache
use_kernel_cache(Path(sys.argv[1]))
from kernels.kernel import twice
print(twice(1), sum(twice.stats.cache_hits.values()))
"""


def run(package: Path, cache: Path) -> str:
    environment = {**os.environ, "GELO_CACHE": str(cache), "PYTHONPATH": str(package.parent)}
    result = subprocess.run(
        [sys.executable, "-c", _RUN, str(package)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_a_change_in_a_called_module_recompiles(tmp_path: Path) -> None:
    package, cache = tmp_path / "kernels", tmp_path / "cache"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text(_KERNEL)
    (package / "helper.py").write_text(_HELPER.format(step=1))
    assert run(package, cache) == "3 0"
    assert run(package, cache) == "3 1"
    # The kernel's own file is untouched: numba alone would answer 3 from its cache.
    (package / "helper.py").write_text(_HELPER.format(step=10))
    assert run(package, cache) == "21 0"
    (directory, _) = sorted((cache / "kernels").iterdir())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_an_unusable_cache_directory_is_no_obstacle(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text(_KERNEL)
    (package / "helper.py").write_text(_HELPER.format(step=1))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(package, blocked).startswith("3 ")
