"""Nothing of the process's memory reaches core files, debuggers or logs."""

from __future__ import annotations

import subprocess
import sys

from tee_runner.hardening import where

_SCRIPT = """
import resource
from tee_runner.hardening import forbid_memory_dumps
forbid_memory_dumps()
print(resource.getrlimit(resource.RLIMIT_CORE))
import ctypes
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_core_files_and_ptrace_are_off() -> None:
    result = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["(0, 0)", "0"]


def test_where_names_the_place_and_not_the_value() -> None:
    def fail(token: int) -> None:
        raise IndexError(f"index {token} is out of bounds")

    try:
        fail(48_151_623)
    except IndexError as error:
        text = where(error)
    assert text.startswith("IndexError at test_hardening.py:")
    assert "48151623" not in text
    assert "index" not in text
