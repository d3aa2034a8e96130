"""Regenerates the wire package's stubs from proto/gelo/v1/worker.proto.

python scripts/generate_stubs.py [OUTPUT_DIR]   (default: proto/)
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"


def generate(output: Path) -> None:
    """Write ``gelo/v1/worker_pb2*.py`` and their type stubs below ``output``."""
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out={output}",
        f"--mypy_grpc_out={output}",
        "gelo/v1/worker.proto",
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
