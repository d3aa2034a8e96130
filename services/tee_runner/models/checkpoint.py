"""A model directory's tensors: one safetensors file, or shards behind an index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tee_runner.errors import ModelError
from tee_runner.models.config_fields import shown
from tee_runner.models.json_file import read_json_object
from tee_runner.models.safetensors_file import Array, SafetensorsFile, TensorEntry

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

MAX_SHARDS: Final = 4096
# A shard is a file of the directory itself: no separators, no drive, no leading dot.
_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")


class Checkpoint:
    """All tensors of a model directory, memory-mapped.

    Raises ``ModelError`` when the directory holds no checkpoint, or a malformed or contradictory one.
    """

    def __init__(self, directory: Path) -> None:
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.is_file() and index.is_file():
            raise ModelError(f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}.", remedy="Remove one.")
        self._home: dict[str, SafetensorsFile] = {}
        if index.is_file():
            self._open_shards(directory, parse_index(read_json_object(index)))
        elif single.is_file():
            file = SafetensorsFile(single)
            self._home = dict.fromkeys(file.entries, file)
        else:
            raise ModelError(
                f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}.",
                remedy="Only safetensors checkpoints are read.",
            )

    def _open_shards(self, directory: Path, weight_map: dict[str, str]) -> None:
        shards = {name: SafetensorsFile(directory / name) for name in sorted(set(weight_map.values()))}
        for shard_name, shard in shards.items():
            for tensor in shard.entries:
                if weight_map.get(tensor) != shard_name:
                    raise ModelError(
                        f"{shard_name} holds the tensor {tensor!r}, which its index does not say."
                    )
        for tensor, shard_name in weight_map.items():
            if tensor not in shards[shard_name].entries:
                raise ModelError(f"The index places {tensor!r} in {shard_name}, which does not hold it.")
            self._home[tensor] = shards[shard_name]

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        """Tensor names in sorted order, however they are sharded."""
        return iter(sorted(self._home))

    def entry(self, name: str) -> TensorEntry:
        """Dtype, shape and size of tensor ``name``. Raises ``ModelError`` when there is none."""
        return self._file(name).entries[name]

    def array(self, name: str) -> Array:
        """Tensor ``name`` as a read-only view of the mapped file, in its stored dtype and shape."""
        return self._file(name).array(name)

    def raw(self, name: str) -> memoryview:
        """The stored bytes of tensor ``name`` (little-endian, row-major), as a view of the map."""
        return self._file(name).raw(name)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Let go of the memory behind bytes ``start`` to ``stop`` of tensor ``name``, which stay readable.

        Not for tables that tokens index: what is fetched again would show in the disk's accesses.
        """
        self._file(name).release(name, start, stop)

    def _file(self, name: str) -> SafetensorsFile:
        file = self._home.get(name)
        if file is None:
            raise ModelError(f"The checkpoint lacks the tensor {name!r}.")
        return file


def parse_index(index: dict[str, object]) -> dict[str, str]:
    """Tensor name to shard file name, from a parsed ``model.safetensors.index.json``.

    Raises ``ModelError`` unless every shard is a plain file name.
    """
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX_FILE} has no weight_map.")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ModelError(
                f"{INDEX_FILE}: {tensor!r} lies in {shown(shard)}, not a plain safetensors file name."
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise ModelError(f"{INDEX_FILE} names more than {MAX_SHARDS} shards.")
    return weight_map
