"""The worker's products modulo 2^32: uint32 rows times int8 weights.

python bench/ring.py [--engine cpu|wgpu] [--kernels amx,dots,words] [--rows 1,16,64,256]
                     [--seconds 0.5] [--verify] [--json FILE]

"ms" includes what the engine does with the operand and the result. Weights are cold: each call takes
the next of as many copies as fill --cold-mb. "Gmac/s" are multiply-adds of 32-bit words; "weights
GB/s" counts a weight once a call. The CPU's kernels: "amx" tiles of bytes, "dots" AVX-512 byte dot
products, "words" 32-bit arithmetic; the engine takes the first that runs.

On a GPU the last three columns are the arithmetic alone: what one more product takes, adding up
partial sums included, in a submission of many. Empty where a product takes several submissions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench import report
from gpu_worker.engines.base import EngineError, LoadedWeight
from gpu_worker.engines.ring_weights import INT16_MAX, RingWeight
from gpu_worker.engines.ring_wgpu import RingWgpu

SHAPES = ((576, 1536), (2560, 6144), (9728, 2560))
COLUMNS = ("engine", "m", "d_in", "d_out", "bits", "ms", "Gmac/s", "weights GB/s")
GPU_COLUMNS = ("kernel ms", "kernel Gmac/s", "kernel GB/s")


class Ring(Protocol):
    """What is measured."""

    def load(self, weight: RingWeight) -> LoadedWeight:
        """A resident weight."""

    def unload(self, weight: LoadedWeight) -> None:
        """Free it."""

    def matmul(self, weight: LoadedWeight, operand: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
        """``operand @ weight.T`` modulo 2^32."""


def engines(arguments: argparse.Namespace) -> tuple[dict[str, Ring], Callable[[], None]]:
    """By name, and what closes them."""
    if arguments.engine == "wgpu":
        from gpu_worker.engines.wgpu_device import pick_adapter

        adapter = pick_adapter()
        gpu = RingWgpu(adapter=adapter)
        return {f"wgpu, {adapter.name}": gpu}, gpu.close
    from gpu_worker.engines.ring_cpu import RingCpu
    from gpu_worker.engines.team import Team

    team = Team(arguments.threads)
    found: dict[str, Ring] = {}
    for name in arguments.kernels.split(","):
        try:
            found[name] = RingCpu(team, (name,))
        except EngineError as error:
            print(error)
    return found, team.close


def measure(
    name: str, engine: Ring, shape: tuple[int, int], rows: list[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row of the table for each row count."""
    d_in, d_out = shape
    generator = np.random.default_rng(d_in)
    limit = 127 if arguments.bits == 8 else INT16_MAX
    integers = generator.integers(-limit, limit + 1, (d_out, d_in))
    weight: RingWeight = integers.astype(np.int8) if arguments.bits == 8 else integers.astype(np.int16)
    copies = max(1, round(arguments.cold_mb * 1e6 / weight.nbytes))
    loaded = [engine.load(weight) for _ in range(copies)]
    figures = []
    for m in rows:
        operand = generator.integers(0, 1 << 32, (m, d_in), dtype=np.uint32)
        out = np.zeros((m, d_out), dtype=np.uint32)
        engine.matmul(loaded[0], operand, out)
        if arguments.verify and not np.array_equal(out[:2], operand[:2] @ weight.astype(np.uint32).T):
            raise SystemExit(f"{name}: a wrong result at {m} x {d_in} x {d_out}")
        times: list[float] = []
        begun = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - begun < arguments.seconds:
            started = time.perf_counter()
            engine.matmul(loaded[len(times) % copies], operand, out)
            times.append(time.perf_counter() - started)
        seconds = statistics.median(times)
        mac, size = m * d_in * d_out, weight.nbytes
        figure = {
            "engine": name, "m": m, "d_in": d_in, "d_out": d_out, "bits": arguments.bits, "ms": seconds * 1e3,
            "Gmac/s": mac / seconds / 1e9, "weights GB/s": size / seconds / 1e9,
        }  # fmt: skip
        if isinstance(engine, RingWgpu) and m <= engine._state(loaded[0]).rows:
            kernel = kernel_seconds(engine, loaded, m, arguments.seconds)
            values = (kernel * 1e3, mac / kernel / 1e9, size / kernel / 1e9)
            figure.update(zip(GPU_COLUMNS, values, strict=True))
        figures.append(figure)
    for one in loaded:
        engine.unload(one)
    return figures


def kernel_seconds(engine: RingWgpu, loaded: list[LoadedWeight], m: int, seconds: float) -> float:
    """What one more product of ``m`` rows takes in a submission of many. All must fit one chunk."""
    on = engine._on
    states = [engine._state(weight) for weight in loaded]
    prepared = engine._prepare(states[0], m)
    for state in states:
        engine._reserve(state, {m: prepared}, ())

    def submission(products: int) -> float:
        with on.commands() as commands:
            for i in range(products):
                for slab, plan in enumerate(prepared.plans):
                    engine._dispatch(commands, states[i % len(states)], slab, plan)
            commands.finish()
            started = time.perf_counter()
            on.wait(commands.submit())
            return time.perf_counter() - started

    few, most = 4, 2004
    floor = submission(few)
    many = min(most, few + max(8, round(seconds / 6 / (submission(few + 8) - floor + 1e-9) * 8)))
    return (min(submission(many) for _ in range(3)) - min(submission(few) for _ in range(3))) / (many - few)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=("cpu", "wgpu"), default="cpu")
    parser.add_argument("--kernels", default="amx,dots,words")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES), help="d_in x d_out, ...")
    parser.add_argument("--bits", type=int, choices=(8, 16), default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--cold-mb", type=float, default=200.0)
    parser.add_argument("--verify", action="store_true", help="compare two rows with NumPy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    rows = [int(m) for m in arguments.rows.split(",")]
    shapes = [(int(k), int(n)) for k, n in (shape.split("x") for shape in arguments.shapes.split(","))]
    found, close = engines(arguments)
    figures = [
        figure
        for shape in shapes
        for name, engine in found.items()
        for figure in measure(name, engine, shape, rows, arguments)
    ]
    close()
    columns = COLUMNS + GPU_COLUMNS if arguments.engine == "wgpu" else COLUMNS
    report.show("Products modulo 2^32", columns, figures)
    report.write(arguments.json, figures)


if __name__ == "__main__":
    main()
