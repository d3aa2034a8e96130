"""The checked-in stubs are what the generator makes of worker.proto today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = ("worker_pb2.py", "worker_pb2.pyi", "worker_pb2_grpc.py", "worker_pb2_grpc.pyi")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("stubs")
    script = ROOT / "scripts" / "generate_stubs.py"
    # The mypy plugins are console scripts beside the interpreter.
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    subprocess.run([sys.executable, str(script), str(output)], check=True, timeout=120, env=environment)
    return output / "gelo" / "v1"


@pytest.mark.parametrize("name", STUBS)
def test_stub_is_current(generated: Path, name: str) -> None:
    checked_in = ROOT / "proto" / "gelo" / "v1" / name
    assert (generated / name).read_bytes() == checked_in.read_bytes()


def test_generator_writes_nothing_else(generated: Path) -> None:
    assert sorted(path.name for path in generated.iterdir()) == sorted(STUBS)
