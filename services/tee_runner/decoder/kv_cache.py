"""Keys and values of every sequence, in the runner's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tee_runner.decoder.attention import KEY_BLOCK
from tee_runner.decoder.config import DecoderConfig, LayerConfig
from tee_runner.errors import CapacityError
from tee_runner.memory import pages

KvDtype = Literal["float32", "bfloat16", "int8"]

_STORED: dict[KvDtype, type[np.generic]] = {
    "float32": np.float32, "bfloat16": np.uint16, "int8": np.int8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per slot: ``positions`` times ``heads`` times ``depth``, twice."""

    positions: int
    heads: int
    depth: int

    def bytes_per_slot(self, dtype: KvDtype) -> int:
        """Of keys and values together, with the scales of int8 heads."""
        head = self.depth * np.dtype(_STORED[dtype]).itemsize + (4 if dtype == "int8" else 0)
        return 2 * self.positions * self.heads * head


def layer_shapes(
    config: DecoderConfig, *, max_len: int, longest_chunk: int | None
) -> list[LayerShape | None]:
    """The storage of every layer; None for one that reads another's.

    A layer whose readers all have a window keeps only the positions that a chunk of
    ``longest_chunk`` rows can still see, a whole number of key blocks; None keeps all.

    Raises:
        ValueError: a layer reads from one that stores nothing, or another shape.
    """
    layers = [config.layer(index) for index in range(config.num_layers)]
    windows: dict[int, int | None] = {}
    for index, layer in enumerate(layers):
        source = index
        if layer.kv_source is not None:
            source = layer.kv_source
            _check_source(layers, index, source)
        reach = windows.get(source, 0)
        windows[source] = None if layer.window is None or reach is None else max(reach, layer.window)
    shapes: list[LayerShape | None] = []
    for index, layer in enumerate(layers):
        if layer.kv_source is not None:
            shapes.append(None)
            continue
        positions, window = max_len, windows[index]
        if window is not None and longest_chunk is not None:
            ring = -(-(window + longest_chunk - 1) // KEY_BLOCK) * KEY_BLOCK
            positions = min(max_len, ring)
        shapes.append(LayerShape(positions, layer.num_kv_heads, layer.head_dim))
    return shapes


def _check_source(layers: list[LayerConfig], index: int, source: int) -> None:
    layer, origin = layers[index], layers[source]
    if source >= index or origin.kv_source is not None:
        raise ValueError(f"layer {index} reads the keys of layer {source}, which has none by then")
    if (layer.num_kv_heads, layer.head_dim) != (origin.num_kv_heads, origin.head_dim):
        raise ValueError(f"layer {index} reads the keys of layer {source}, whose heads differ")


def kv_cache_bytes(
    config: DecoderConfig, *, slots: int, max_len: int, dtype: KvDtype, longest_chunk: int | None = None
) -> int:
    """Bytes of a :class:`KvCache` that is full."""
    shapes = layer_shapes(config, max_len=max_len, longest_chunk=longest_chunk)
    return slots * sum(shape.bytes_per_slot(dtype) for shape in shapes if shape is not None)


class KvCache:
    """``keys[layer]`` and ``values[layer]`` are ``(slots, capacity, kv_dim)``.

    float32, bfloat16 as its uint16 bits, or int8 with ``key_scales[layer]`` and
    ``value_scales[layer]`` ``(slots, capacity, kv_heads)`` float32 (empty otherwise). A layer that
    reads another's keys shares its arrays. Position p lies at p modulo the capacity, which is
    ``max_len``, or less for a layer with a window when ``longest_chunk`` bounds the rows that a
    sequence has in one pass. Each slot grows at its own pace; memory is committed by the kernel
    only as positions are written.

    Raises:
        ValueError: the configuration shares keys between layers that do not fit.
    """

    def __init__(
        self, config: DecoderConfig, *, slots: int, max_len: int, dtype: KvDtype = "float32",
        longest_chunk: int | None = None,
    ) -> None:  # fmt: skip
        self.keys: list[NDArray[Any]] = []
        self.values: list[NDArray[Any]] = []
        self.key_scales: list[NDArray[np.float32]] = []
        self.value_scales: list[NDArray[np.float32]] = []
        self._owned: list[NDArray[Any]] = []
        shapes = layer_shapes(config, max_len=max_len, longest_chunk=longest_chunk)
        for index, shape in enumerate(shapes):
            parts = (self.keys, self.values, self.key_scales, self.value_scales)
            if shape is None:
                source = config.layer(index).kv_source
                for part in parts:
                    part.append(part[source])  # type: ignore[index]  # no shape: there is a source
                continue
            stored = (slots, shape.positions, shape.heads * shape.depth)
            scales = (slots, shape.positions, shape.heads) if dtype == "int8" else (0, 0, 0)
            for part in parts[:2]:
                part.append(pages(stored, _STORED[dtype]))
            for part in parts[2:]:
                part.append(pages(scales, np.float32))
            self._owned += [part[-1] for part in parts if part[-1].size]
        self.lengths: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self.max_len = max_len
        rings = any(shape is not None and shape.positions < max_len for shape in shapes)
        self._longest_chunk = longest_chunk if rings and longest_chunk is not None else max_len
        # Positions that may hold something: a pass that failed wrote past the length.
        self._written: NDArray[np.int64] = np.zeros(slots, dtype=np.int64)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots when they are full."""
        return sum(stored.nbytes for stored in self._owned)

    @property
    def free_slots(self) -> int:
        """Slots not taken."""
        return len(self._free)

    def take(self) -> int:
        """An empty slot.

        Raises:
            CapacityError: all are taken.
        """
        if not self._free:
            raise CapacityError("All sequence slots are taken.", remedy="Wait for a request to finish.")
        return self._free.pop()

    def reserve(self, slot: int, count: int) -> int:
        """The position from which a pass may write ``count`` rows; the length stays.

        Raises:
            CapacityError: they would not fit.
            ValueError: more than ``longest_chunk`` rows, where a layer keeps no more.
        """
        past = int(self.lengths[slot])
        if past + count > self.max_len:
            raise CapacityError(
                f"A sequence of {past + count} tokens exceeds the context of {self.max_len}.",
                remedy="Shorten the prompt, or ask for fewer tokens.",
            )
        if count > self._longest_chunk:
            raise ValueError(f"{count} rows of a sequence in one pass; the cache holds {self._longest_chunk}")
        self._written[slot] = max(self._written[slot], past + count)
        return past

    def release(self, slot: int) -> None:
        """Give a slot back; what it held is overwritten."""
        used = int(max(self.lengths[slot], self._written[slot]))
        for stored in self._owned:
            stored[slot, :used] = 0
        self.lengths[slot] = self._written[slot] = 0
        self._free.append(slot)
