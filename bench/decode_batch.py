"""Batched decoding against serial: per-step per-sequence time on a Qwen3-4B shape.

python -m bench.decode_batch [--layers 4] [--context 64] [--engine auto] [--json FILE]

Random weights. Serial runs B sequences one pass after another; batched runs them in one pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.synthetic import qwen3_4b_shape, random_model
from gelo_cli.processes import started
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.profile import BUCKETS
from tee_runner.protection.base import MaskOptions

_TOKEN = 1000


def step(runtime: Runtime, slots: list[int]) -> float:
    """One decode pass over ``slots``; seconds. The cache is put back to where it was."""
    lengths = runtime.cache.lengths.copy()
    batch = RaggedBatch(
        tokens=np.full(len(slots), _TOKEN, dtype=np.int64),
        slots=slots,
        counts=[1] * len(slots),
        sampled=[1] * len(slots),
    )
    begin = time.perf_counter()
    runtime.forward(batch)
    spent = time.perf_counter() - begin
    runtime.cache.lengths[:] = lengths
    return spent


def measure(runtime: Runtime, size: int, context: int, repeats: int) -> dict[str, Any]:
    """Serial and batched medians for ``size`` sequences, and the batched pass's buckets."""
    slots = [runtime.cache.take() for _ in range(size)]
    for slot in slots:
        runtime.cache.lengths[slot] = context
    step(runtime, slots)
    serial, batched = [], []
    runtime.profile.reset()
    for _ in range(repeats):
        batched.append(step(runtime, slots))
    buckets = {name: runtime.profile.nanoseconds[name] / repeats / 1e6 for name in BUCKETS}
    for _ in range(repeats):
        serial.append(sum(step(runtime, [slot]) for slot in slots))
    for slot in slots:
        runtime.cache.release(slot)
    one, many = statistics.median(serial), statistics.median(batched)
    return {
        "B": size,
        "serial ms/seq": one / size * 1e3,
        "batched ms/seq": many / size * 1e3,
        "speed-up": one / many,
        **{f"{name} ms": value for name, value in buckets.items() if name != "sampling"},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--engine", choices=("auto", "cpu", "wgpu"), default="auto")
    parser.add_argument("--schemes", nargs="*", default=["plain", "gelo-hd3"])
    parser.add_argument("--masks", nargs="*", choices=("sequence", "shared"), default=["sequence", "shared"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = random_model(qwen3_4b_shape(arguments.layers, vocab=arguments.vocab))
    rows: list[dict[str, Any]] = []
    worker = ["worker", "--listen", "127.0.0.1:0", "--engine", arguments.engine, "--log-level", "warning"]
    with started(worker) as child:
        for scheme in arguments.schemes:
            for mask in arguments.masks if scheme.startswith("gelo") else ["sequence"]:
                options = RuntimeOptions(
                    worker=f"127.0.0.1:{child.ready['port']}",
                    protection=scheme,
                    masks=MaskOptions(shared_decode=mask == "shared"),
                    max_len=arguments.context + 8,
                )
                runtime = Runtime(model, options)
                runtime.connect()
                info = runtime.worker_info
                for size in (1, 2, 4, 8):
                    result = measure(runtime, size, arguments.context, arguments.repeats)
                    rows.append({"scheme": scheme, "A per": mask} | result)
                runtime.close()
    where = f"{info.engine} engine on {info.adapter}" if info else ""
    columns = list(rows[0])
    report.show(f"Decode, {arguments.layers} layers of Qwen3-4B, {where}", columns, rows)
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
