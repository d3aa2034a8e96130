"""`lpn` beside `plain-int8`, `gelo-hd3` and HF transformers on the CPU, in one run.

python -m bench.lpn [--tokens 64] [--repeats 3] [--layers 0] [--engine cpu] [--apart] [--json FILE]
                    [--plot FILE]

Decode steps of all systems take turns, so that a noisy machine is noisy for all. ``lpn warm`` takes its
blinding from banks that are filled between the steps, outside the clock; ``lpn cold`` starts with empty
banks and never gets time between steps: its first step sweeps for 64 rows of every weight, and
the later ones pay for the next sweep as they go. "TPOT" is a median over steps; "mean" counts the sweeps
of all steps. TTFT is a prompt's prefill, with banks that were filled (warm) or empty (cold).

``--layers N`` measures N layers of Qwen3-4B's shape with random weights instead of SmolLM2 (no HF then).

``--apart`` pins the workers to half of the cores and this process to the others, as a GPU's worker would
leave them to the runner: sweeps then run beside the worker's products, but for ``lpn cold, after``.

The second table is the cost of blinding against the memory it may use: parameters (k, w_f, w_e) as
`gelo serve --lpn-memory` would choose them, their multiply-adds, and a measured sweep of 64 rows.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numba
import numpy as np

from bench import report
from bench.e2e import MODEL, PROMPT
from bench.synthetic import qwen3_4b_shape, random_model
from evals.attacks.model import Curve, Plot
from evals.attacks.svg import plot_svg
from gelo_cli.processes import started
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.models import LoadedModel, load_model, resolve_model
from tee_runner.protection.base import Linear
from tee_runner.protection.lpn import parameters
from tee_runner.protection.lpn.bank import Bank, Source, Tools
from tee_runner.protection.lpn.layout import empty_panels
from tee_runner.protection.lpn.matrix import public_matrix
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.lpn.pool import RingWeight
from tee_runner.protection.rng import SecretKey

SCHEMES = {"plain-int8": "plain-int8", "lpn warm": "lpn", "lpn cold": "lpn", "gelo-hd3": "gelo-hd3"}
APART = {"plain-int8": "plain-int8", "lpn warm": "lpn", "lpn cold": "lpn", "lpn cold, after": "lpn"}
_FILLED = {"lpn warm"}
LONG_PROMPT = 504
COLUMNS = (
    "system", "TTFT ms", f"TTFT {LONG_PROMPT} ms", "TPOT ms", "mean ms", "x plain-int8", "blinding ms",
    "worker ms", "wire ms", "start s", "restart s", "runner MB",
)  # fmt: skip
COST_COLUMNS = (
    "d", "bytes/parameter", "k", "w_f", "w_e", "bits", "M mult-adds/row", "us/row", "G mult-adds/s"
)  # fmt: skip
_WORKERS_CORES: set[int] = set()
_BUDGETS = (2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.5, 9.0)


@contextmanager
def pinned_to_workers_cores() -> Iterator[None]:
    """What is started within runs on the upper half of the cores; this thread, afterwards, on the lower."""
    cores = sorted(os.sched_getaffinity(0) | _WORKERS_CORES)
    _WORKERS_CORES.update(cores[len(cores) // 2 :])
    os.sched_setaffinity(0, _WORKERS_CORES)
    yield
    mine = set(cores) - _WORKERS_CORES
    os.sched_setaffinity(0, mine)
    numba.set_num_threads(len(mine))


class System:
    """One scheme in this process, and a worker of its own."""

    def __init__(
        self,
        stack: ExitStack,
        model: LoadedModel,
        name: str,
        engine: str,
        pools: Path,
        *,
        apart: bool = False,
    ) -> None:
        self.name = name
        with pinned_to_workers_cores() if apart else nullcontext():
            worker = stack.enter_context(
                started(["worker", "--listen", "127.0.0.1:0", "--engine", engine, "--log-level", "error"])
            )
        options = RuntimeOptions(
            worker=f"127.0.0.1:{worker.ready['port']}",
            protection=(APART | SCHEMES)[name],
            max_sequences=1,
            max_len=LONG_PROMPT + 8 if model.tokenizer is None else 1024,
            lpn=LpnOptions(pool_directory=pools / name),
        )
        self.figures: dict[str, float] = {}
        for what in ("start s", "restart s"):  # the second finds weights at the worker and pools on disk
            gc.collect()
            begin = time.perf_counter()
            self.runtime = Runtime(model, options)
            self.runtime.connect()
            self.figures[what] = time.perf_counter() - begin
            if what == "start s":
                self.runtime.close()
        stack.callback(self.runtime.close)
        protection = self.runtime._protection
        assert protection is not None
        if apart:
            protection.transport.worker_apart = name != "lpn cold, after"
        self.figures["runner MB"] = _held_bytes(protection) / 1e6
        self.times: list[float] = []
        self.buckets: list[dict[str, float]] = []

    def fill(self) -> None:
        """What a quiet moment does."""
        if self.name in _FILLED:
            while self.runtime.idle():
                pass

    def prefill(self, prompt: list[int]) -> float:
        """Milliseconds to the first logits of ``prompt``."""
        self.fill()
        slot = self.runtime.cache.take()
        begin = time.perf_counter()
        self._step(slot, prompt)
        spent = (time.perf_counter() - begin) * 1e3
        self.runtime.cache.release(slot)
        return spent

    def answer(self, prompt: list[int], tokens: int) -> Iterator[None]:
        """Prefill, then a decode step at every ``next``."""
        runtime = self.runtime
        slot = runtime.cache.take()
        try:
            token = self._step(slot, prompt)
            for _ in range(tokens):
                yield
                self.fill()
                runtime.profile.reset()
                begin = time.perf_counter()
                token = self._step(slot, [token])
                self.times.append((time.perf_counter() - begin) * 1e3)
                self.buckets.append({k: v / 1e6 for k, v in runtime.profile.nanoseconds.items()})
        finally:
            runtime.cache.release(slot)

    def _step(self, slot: int, tokens: list[int]) -> int:
        batch = RaggedBatch(
            tokens=np.asarray(tokens, dtype=np.int64), slots=[slot], counts=[len(tokens)], sampled=[1]
        )
        return int(self.runtime.forward(batch)[0].argmax())


class Transformers:
    """Greedy decoding with a KV cache in HF transformers on the CPU, float32."""

    name = "HF transformers f32"

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        begin = time.perf_counter()
        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()
        self.figures = {"start s": time.perf_counter() - begin}
        self.times: list[float] = []
        self.buckets: list[dict[str, float]] = []

    def prefill(self, prompt: list[int]) -> float:
        """See :meth:`System.prefill`."""
        with self._torch.inference_mode():
            begin = time.perf_counter()
            self._model(self._torch.tensor([prompt]), use_cache=True)
            return (time.perf_counter() - begin) * 1e3

    def answer(self, prompt: list[int], tokens: int) -> Iterator[None]:
        """See :meth:`System.answer`."""
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor([prompt]), use_cache=True)
            for _ in range(tokens):
                token = output.logits[:, -1:].argmax(-1)
                yield
                begin = time.perf_counter()
                output = self._model(token, past_key_values=output.past_key_values, use_cache=True)
                self.times.append((time.perf_counter() - begin) * 1e3)


def _held_bytes(protection: Any) -> int:
    """Bytes that a scheme on quantised rows keeps: weights, pools, G and banks."""
    total: int = 0
    for weight in getattr(protection, "weights", {}).values():
        total += weight.panels.nbytes + (0 if weight.pool is None else weight.pool.nbytes)
    if total:
        total += sum(matrix.nbytes for matrix in protection.store.matrices.values())
    return total + sum(int(bank.nbytes) for bank in getattr(protection, "banks", ()))


def compare(model: LoadedModel, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The first table."""
    generator = np.random.default_rng(0)
    long = generator.integers(0, model.config.vocab_size, LONG_PROMPT).tolist()
    short = long[:32] if arguments.layers else model.tokenizer.encode(PROMPT)
    with ExitStack() as stack:
        pools = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        systems: list[System | Transformers] = [
            System(stack, model, name, arguments.engine, pools, apart=arguments.apart)
            for name in (APART if arguments.apart else SCHEMES)
        ]
        if not arguments.layers and not arguments.apart:
            systems.append(Transformers(resolve_model(MODEL)))
        for system in systems:  # compile and warm up
            system.prefill(short)
            system.prefill(long)
            for _ in system.answer(short, 2):
                pass
            system.times.clear()
            system.buckets.clear()
        first: dict[str, list[float]] = {system.name: [] for system in systems}
        first_long: dict[str, list[float]] = {system.name: [] for system in systems}
        for repeat in range(arguments.repeats):
            for system in systems:
                first[system.name].append(system.prefill(short))
                first_long[system.name].append(system.prefill(long))
            answers = [system.answer(short, arguments.tokens) for system in systems]
            for answer in answers:
                next(answer)
            for step in range(arguments.tokens):
                for answer in answers if (repeat + step) % 2 else answers[::-1]:
                    next(answer, None)
    base = statistics.median(systems[0].times)
    return [
        {
            "system": system.name,
            "TTFT ms": statistics.median(first[system.name]),
            f"TTFT {LONG_PROMPT} ms": statistics.median(first_long[system.name]),
            "TPOT ms": statistics.median(system.times),
            "mean ms": statistics.mean(system.times),
            "x plain-int8": statistics.median(system.times) / base,
            **{
                f"{shown} ms": statistics.mean(bucket.get(name, 0.0) for bucket in system.buckets)
                for shown, name in (("blinding", "shield"), ("worker", "worker compute"), ("wire", "wire"))
                if system.buckets
            },
            **system.figures,
        }
        for system in systems
    ]


def costs(widths: list[int], repeats: int) -> list[dict[str, Any]]:
    """The second table: one row per width and budget, each distinct parameter set once."""
    rows: list[dict[str, Any]] = []
    for d in widths:
        d_out = 3 * d
        chosen = []
        for budget in _BUDGETS:
            try:
                found = parameters.choose(d, bytes_per_parameter=budget)
            except parameters.LpnParametersError:
                continue
            if found not in chosen:
                chosen.append(found)
        for found in chosen:
            spent = statistics.median(_sweep_seconds(found, d_out, repeats))
            adds = found.multiply_adds(d_out)
            rows.append(
                {
                    "d": d,
                    "bytes/parameter": found.bytes_per_parameter(),
                    "k": found.k, "w_f": found.w_f, "w_e": found.w_e, "bits": found.bits,
                    "M mult-adds/row": adds / 1e6,
                    "us/row": spent / 64 * 1e6,
                    "G mult-adds/s": adds * 64 / spent / 1e9,
                }
            )  # fmt: skip
    return rows


def _sweep_seconds(found: parameters.LpnParameters, d_out: int, repeats: int) -> list[float]:
    """Seconds of sweeps of 64 rows over a pool of random words."""
    generator = np.random.default_rng(found.k)
    linear = Linear(weight_id=0, name="bench", d_in=found.d, d_out=d_out)
    panels = empty_panels(found.d, d_out, np.int8)
    panels[...] = generator.integers(-127, 128, panels.shape, dtype=np.int8)
    pool = empty_panels(found.k, d_out, np.uint32)
    pool[...] = generator.integers(0, 1 << 32, pool.shape, dtype=np.uint32)
    weight = RingWeight(
        linear=linear, panels=panels, scales=np.ones(d_out, np.float32), levels=2047, pool=pool
    )
    tools = Tools(SecretKey().stream("lpn"))
    bank = Bank(Source(weight, public_matrix(found.d, found.k), found, tools), 128)
    seconds = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        bank.fill(64)
        seconds.append(time.perf_counter() - begin)
        bank.take(64)
    return seconds[1:]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Cost against memory as an SVG file."""
    curves = []
    for d in dict.fromkeys(row["d"] for row in rows):
        own = [row for row in rows if row["d"] == d]
        curves.append(
            Curve(
                label=f"d = {d}: " + ", ".join(f"({r['k']}, {r['w_f']}, {r['w_e']})" for r in own),
                x=[row["bytes/parameter"] for row in own],
                y=[row["us/row"] for row in own],
            )
        )
    svg = plot_svg(
        Plot(
            title="Blinding one row of a d to 3·d product against memory; (k, w_f, w_e) at 128 bits",
            x_label="runner memory, bytes per parameter", y_label="microseconds per row", curves=curves,
            log_y=True,
        )
    )  # fmt: skip
    path.write_text(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--engine", choices=("auto", "cpu", "wgpu"), default="cpu")
    parser.add_argument("--widths", type=int, nargs="*", default=[576, 1536, 2560])
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()

    # numba would count the cores again whenever it compiles, and refuse another number.
    os.environ["NUMBA_NUM_THREADS"] = str(numba.get_num_threads())
    if arguments.layers:
        model = random_model(qwen3_4b_shape(arguments.layers, vocab=arguments.vocab))
        title = f"{arguments.layers} layers of Qwen3-4B"
    else:
        model = load_model(resolve_model(MODEL))
        title = MODEL
    rows = compare(model, arguments)
    cost = costs(arguments.widths, arguments.repeats)
    threads = numba.get_num_threads()
    report.show(f"Blinding against memory, {threads} threads", COST_COLUMNS, cost)
    report.show(f"{title}, {arguments.engine} engine", COLUMNS, rows)
    report.write(arguments.json, [*rows, *cost])
    if arguments.plot:
        plot(cost, arguments.plot)


if __name__ == "__main__":
    main()
