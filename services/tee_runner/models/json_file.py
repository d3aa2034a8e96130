"""Bounded, strict JSON: duplicate keys and non-finite numbers are errors, never silently resolved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NoReturn

from tee_runner.errors import ModelError

MAX_JSON_BYTES: Final = 100_000_000  # tokenizer.json of a 250k vocabulary is about 35 MB


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def parse_json_object(data: bytes, *, what: str) -> dict[str, Any]:
    """The JSON object in ``data``. Raises ``ModelError`` naming ``what`` for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{what} is not a JSON object.")
    return value


def read_bytes(path: Path, *, limit: int = MAX_JSON_BYTES) -> bytes:
    """The whole file, at most ``limit`` bytes. Raises ``ModelError`` when missing or larger."""
    try:
        with path.open("rb") as handle:
            data = handle.read(limit + 1)
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror or error}.") from error
    if len(data) > limit:
        raise ModelError(f"{path} is larger than {limit} bytes.")
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``. Raises ``ModelError`` when there is none."""
    return parse_json_object(read_bytes(path), what=str(path))
