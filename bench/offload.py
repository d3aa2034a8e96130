"""One offload, from the operand in place to the result in place, by the format of its weight.

python -m bench.offload [--rows 1,2,8,16] [--layers 30] [--repeats 5] [--formats float16,int8,int16]
                        [--transport slab] [--engine cpu] [--json FILE]

The products of a decode step of SmolLM2-135M, layer by layer and then the LM head, through a real
worker process. The formats take turns at each product, so that all of them see the same machine; the
weights of one step exceed the caches. Times are in microseconds: "engine", the worker's own, and "round
trip", the runner's, are lowest quartiles; "wire" is the least decile of what a round trip takes beside
its engine. "GB/s" are weight bytes by the engine's time, "x float16" compares engines' times.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from gelo.formats import WeightFormat
from gelo.slab import SlabSizes
from gelo_cli.processes import started
from tee_runner.worker.client import RemoteWeight, WorkerClient, weight_digest
from tee_runner.worker.transport import Transport

LAYER = ((576, 960), (576, 576), (576, 3072), (1536, 576))
HEAD = (576, 49152)
COLUMNS = ("d_in", "d_out", "rows", "weight", "round trip us", "wire us", "engine us", "GB/s", "x float16")
_INT16_MAX = 32639

Shape = tuple[int, int]
Times = dict[tuple[Shape, int, WeightFormat], list[tuple[int, int]]]


def random_weight(shape: Shape, form: WeightFormat, seed: int) -> NDArray[Any]:
    """Values of ``form`` ``(d_out, d_in)``; float16 ones such as checkpoints have."""
    generator = np.random.default_rng(seed)
    if form == WeightFormat.FLOAT16:
        return (generator.standard_normal(shape[::-1], dtype=np.float32) * 0.05).astype(np.float16)
    limit = 127 if form == WeightFormat.INT8 else _INT16_MAX
    return generator.integers(-limit, limit + 1, shape[::-1], dtype=form.dtype)


def offload(
    transport: Transport, number: int, shape: Shape, form: WeightFormat, rows: int
) -> tuple[int, int]:
    """Nanoseconds of one offload: the round trip's, and the worker's engine's."""
    d_in, d_out = shape
    before = transport.stats.worker_ns
    if form == WeightFormat.FLOAT16:
        transport.operand(rows, d_in)[...] = 0.5
        begun = time.perf_counter_ns()
        transport.exchange(number, rows, d_in, d_out)
    else:
        transport.operand_words(rows, d_in)[...] = 0x9E3779B9
        begun = time.perf_counter_ns()
        transport.exchange_words(number, rows, d_in, d_out)
    return time.perf_counter_ns() - begun, transport.stats.worker_ns - before


def measure(
    client: WorkerClient, formats: list[WeightFormat], rows: list[int], arguments: argparse.Namespace
) -> Times:
    """All times."""
    shapes = [*LAYER * arguments.layers, HEAD]
    weights = []
    for index, shape in enumerate(shapes):
        for form in formats:
            values = random_weight(shape, form, index)
            weights.append(
                RemoteWeight(
                    name=f"{index}", d_in=shape[0], d_out=shape[1], sha256=weight_digest(values), format=form,
                    load=partial(random_weight, shape, form, index),
                )
            )  # fmt: skip
    client.provision(weights)
    most = max(rows)
    sizes = SlabSizes(operand=most * 1536 * 4, result=most * HEAD[1] * 4)
    transport = client.open_session(weights, sizes, arguments.transport)
    times: Times = defaultdict(list)
    for repeat in range(arguments.repeats + 1):
        for m in rows:
            for index, shape in enumerate(shapes):
                for place, form in enumerate(formats):
                    number = index * len(formats) + place
                    spent = offload(transport, number, shape, form, m)
                    if repeat:  # the first pass warms up
                        times[shape, m, form].append(spent)
    transport.close()
    return times


def table(times: Times) -> list[dict[str, Any]]:
    """By shape, rows and format."""
    quartile = {key: np.quantile(np.array(some), 0.25, axis=0) / 1e3 for key, some in times.items()}
    figures = []
    for (shape, m, form), (trip, engine) in quartile.items():
        base = quartile.get((shape, m, WeightFormat.FLOAT16))
        wire = np.quantile([one - other for one, other in times[shape, m, form]], 0.1) / 1e3
        figures.append({
            "d_in": shape[0], "d_out": shape[1], "rows": m, "weight": form.dtype.name,
            "round trip us": float(trip), "wire us": float(wire), "engine us": float(engine),
            "GB/s": shape[0] * shape[1] * form.item_bytes / float(engine) / 1e3,
            "x float16": None if base is None else float(engine / base[1]),
        })  # fmt: skip
    return sorted(figures, key=lambda row: (row["d_in"] * row["d_out"], row["rows"]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,2,8,16")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", default="float16,int8,int16")
    parser.add_argument("--transport", choices=("slab", "grpc"), default="slab")
    parser.add_argument("--engine", choices=("auto", "cpu", "wgpu"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    rows = [int(m) for m in arguments.rows.split(",")]
    formats = [WeightFormat.of(np.dtype(name)) for name in arguments.formats.split(",")]
    worker = ["worker", "--listen", "127.0.0.1:0", "--engine", arguments.engine, "--log-level", "warning"]
    with started(worker) as child:
        client = WorkerClient(f"127.0.0.1:{child.ready['port']}")
        figures = table(measure(client, formats, rows, arguments))
        client.close()
    report.show("Offloads", COLUMNS, figures)
    report.write(arguments.json, figures)


if __name__ == "__main__":
    main()
