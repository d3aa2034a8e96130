"""What serving a model takes of the runner's memory, and whether this machine has it.

The plan counts what the runner allocates for a configuration: the embedding tables, the small
vectors, a full KV cache, the largest linear weight (one at a time passes through while weights are
hashed, uploaded and projected), the step's buffers on both sides of the wire, what the protection
keeps, and the secret projections. The interpreter and its libraries are there already and not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.kv_cache import kv_cache_bytes
from tee_runner.engine.runtime import RuntimeOptions, longest_chunk, operand_limits, served_length
from tee_runner.errors import CapacityError
from tee_runner.protection.schemes import scheme

_MEMINFO: Final = Path("/proc/meminfo")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what they are for, and the settings that decide the largest part."""

    parts: Mapping[str, int]
    max_sequences: int
    max_len: int
    kv_dtype: str

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """One line: the total, the settings, and the parts, largest first."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts if size >= 5_000_000)
        return (
            f"{gigabytes(self.total)} for {self.max_sequences} sequences of {self.max_len} tokens, "
            f"KV cache in {self.kv_dtype} ({listed})"
        )


def gigabytes(size: int) -> str:
    """``size`` bytes for people: ``1.23 GB``."""
    return f"{size / 1e9:.2f} GB"


def memory_plan(
    config: DecoderConfig, options: RuntimeOptions, *, embedding_bytes_per_value: int = 2
) -> MemoryPlan:
    """What :class:`~tee_runner.engine.runtime.Runtime` will need for this model, at most.

    ``embedding_bytes_per_value``: of the embedding as it is stored, 2 for float16 and bfloat16.
    """
    layers = [config.layer(i) for i in range(config.num_layers)]
    width, hidden, packed = config.per_layer_input_width, config.hidden_size, 0
    table = config.vocab_size * hidden * embedding_bytes_per_value
    small = hidden * 4
    if width:
        packed = config.num_layers * width
        # int8 values and a float32 scale per layer; the projections in float32.
        table += config.per_layer_vocab_size * (packed + 4 * config.num_layers)
        small += 4 * (packed * hidden + width)
    linears = [(hidden, config.vocab_size)]
    for layer in layers:
        linears += [(hidden, layer.qkv_dim), (layer.q_dim, hidden)]
        linears += [(hidden, 2 * layer.intermediate_size), (layer.intermediate_size, hidden)]
        small += 4 * (4 * hidden + 2 * layer.head_dim + 2 * hidden * width + hidden * bool(width))
        small += 4 * (layer.qkv_dim * config.qkv_bias + 2 * layer.intermediate_size * config.mlp_bias)
    max_len = served_length(config, options)
    rows, head_rows = operand_limits(options)
    ropes = {(layer.rope, layer.head_dim) for layer in layers}
    widest_in, widest_out = (max(dims[i] for dims in linears[1:]) for i in (0, 1))
    logits = head_rows * config.vocab_size * 4
    step = rows * 4 * (4 * hidden + 3 * max(layer.intermediate_size for layer in layers) + 4 * packed)
    step += rows * 4 * max(layer.qkv_dim + 2 * layer.q_dim for layer in layers)
    step += sum(max_len * head_dim * 4 for _, head_dim in ropes)
    return MemoryPlan(
        parts={
            "embeddings": table,
            "norms and biases": small,
            "KV cache": kv_cache_bytes(
                config,
                slots=options.max_sequences,
                max_len=max_len,
                dtype=options.kv_dtype,
                longest_chunk=longest_chunk(options),
            ),
            "largest weight": 2 * max(d_in * d_out for d_in, d_out in linears),
            "step buffers": step + logits,
            # The operand and result slabs, and what a scheme unmasks into.
            "wire buffers": rows * (6 * widest_in + 8 * widest_out) + 2 * logits,
            "protection": scheme(options.protection).held_bytes(linears, options.scheme_options),
            "integrity check": options.integrity_probes * 4 * sum(map(sum, linears)),
        },
        max_sequences=options.max_sequences,
        max_len=max_len,
        kv_dtype=options.kv_dtype,
    )


def require_memory(name: str, plan: MemoryPlan, available: int | None) -> None:
    """Raise ``CapacityError`` when the model ``name`` needs more than ``available`` bytes.

    Nothing is refused where the system does not say how much there is.
    """
    if available is None or plan.total <= available:
        return
    raise CapacityError(
        f"Serving {name} needs {plan.describe()}; {gigabytes(available)} of memory are available.",
        remedy=(
            "Lower --max-sequences or --max-len, choose a smaller --kv-dtype (bfloat16, int8), "
            "with lpn a smaller --lpn-memory, or give this machine more memory."
        ),
    )


def available_memory() -> int | None:
    """Bytes that this process can still allocate, None where Linux does not say.

    The least of what the kernel estimates for the machine and of what the memory limits of this
    process's control groups leave, pages that can be dropped not counted as used.
    """
    found = [_machine(_MEMINFO), *_control_groups(_OWN_CGROUP, _CGROUPS)]
    known = [size for size in found if size is not None]
    return min(known) if known else None


def _machine(meminfo: Path) -> int | None:
    try:
        line = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(line[1]) * 1024 if line else None


def _control_groups(own: Path, root: Path) -> list[int]:
    """What each limited group on the way from this process's own (version 2) to the root leaves."""
    try:
        path = re.search(r"^0::/(.*)$", own.read_text(), re.MULTILINE)
    except OSError:
        return []
    if path is None:
        return []
    group, left = root / path[1], []
    for directory in (group, *group.parents):
        try:
            limit = (directory / "memory.max").read_text().strip()
            used = int((directory / "memory.current").read_text())
            droppable = re.search(r"^inactive_file (\d+)$", (directory / "memory.stat").read_text(), re.M)
        except (OSError, ValueError):
            limit = "max"
        if limit != "max":
            left.append(max(0, int(limit) - used + (int(droppable[1]) if droppable else 0)))
        if directory == root:
            break
    return left
