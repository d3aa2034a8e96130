"""What the integrity check costs per token, what it catches, and how far honest engines stay from it.

python bench/integrity.py [--protection gelo-hd3] [--tokens 33] [--repeats 15] [--trials 200] [--json FILE]

One worker process serves two runners of this process, with the check and without. They answer the same
prompt and take turns step by step. Errors of known size are then put into real results of real operands,
with a fresh secret for each trial.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from gelo_cli.processes import started
from gpu_worker.engines import create_engine
from gpu_worker.engines.base import Engine, EngineError
from gpu_worker.engines.cpu import CpuEngine
from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime, RuntimeOptions
from tee_runner.errors import IntegrityError
from tee_runner.models import load_model, resolve_model
from tee_runner.protection.base import Linear
from tee_runner.protection.integrity import DEFAULT_PROBES, Integrity

MODEL = "smollm2-135m-instruct"
PROMPT = "Explain in a few paragraphs how a bicycle stays upright while it is moving."
SIZES = (1e-4, 3e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Layers whose operands and results are tried, and the LM head.
LAYERS = (0, 15, 29)

Result = NDArray[np.float32]
Lie = Callable[[np.random.Generator, Result, float], None]


@dataclass(frozen=True, slots=True)
class Offload:
    """One real offload: operand bits as sent, result as it came."""

    linear: Linear
    operand: NDArray[np.uint16]
    result: Result


def answer(runtime: Runtime, prompt: list[int], tokens: int) -> Generator[float]:
    """Greedy decoding; yields the time of each step in ms, the prefill first."""
    slot = runtime.cache.take()
    try:
        following = prompt
        for _ in range(tokens):
            batch = RaggedBatch(
                tokens=np.asarray(following, np.int64), slots=[slot], counts=[len(following)], sampled=[1]
            )
            begun = time.perf_counter()
            logits = runtime.forward(batch)
            took = (time.perf_counter() - begun) * 1e3
            following = [int(logits[0].argmax())]
            yield took
    finally:
        runtime.cache.release(slot)


def cost(runtimes: dict[str, Runtime], prompt: list[int], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """With and without the check, alternating step by step; the first of a pair changes every time."""
    times: dict[str, list[list[float]]] = {name: [] for name in runtimes}
    for runtime in runtimes.values():
        list(answer(runtime, prompt, 8))  # compile and warm up
    for repeat in range(repeats):
        answers = {name: answer(runtime, prompt, tokens) for name, runtime in runtimes.items()}
        for name in times:
            times[name].append([])
        for step in range(tokens):
            for name in list(runtimes)[:: 1 if (repeat + step) % 2 else -1]:
                times[name][-1].append(next(answers[name]))
        for running in answers.values():
            running.close()
    decode = {name: np.concatenate([run[1:] for run in runs]) for name, runs in times.items()}
    extra = float(np.median(decode["on"] - decode["off"]))
    rows = []
    for name, runs in times.items():
        middle = float(np.median(decode[name]))
        rows.append(
            {
                "check": name,
                "prefill ms": statistics.median(run[0] for run in runs),
                "TPOT ms": middle,
                "fastest tenth ms": float(np.quantile(decode[name], 0.1)),
                "x off": f"{middle / float(np.median(decode['off'])):.3f}",
                "median of paired differences ms": extra if name == "on" else None,
            }
        )
    return rows


def record(runtime: Runtime, prompt: list[int]) -> list[Offload]:
    """Offloads of one prefill and three decode steps."""
    protection: Any = runtime._protection
    inner = protection.exchange
    seen: list[Offload] = []

    def exchange(weight: Linear, rows: int) -> Result:
        result: Result = inner(weight, rows)
        if weight.name == "lm_head" or any(weight.name.startswith(f"layers.{i}.") for i in LAYERS):
            seen.append(Offload(weight, protection.operand(weight, rows).copy(), result.copy()))
        return result

    protection.exchange = exchange
    try:
        list(answer(runtime, prompt, 4))
    finally:
        del protection.exchange
    return seen


def _row(rng: np.random.Generator, result: Result) -> Result:
    row: Result = result[rng.integers(len(result))]
    return row


def element_of_row(rng: np.random.Generator, result: Result, size: float) -> None:
    row = _row(rng, result)
    row[rng.integers(len(row))] += np.float32(size * np.linalg.norm(row))


def element_of_itself(rng: np.random.Generator, result: Result, size: float) -> None:
    row = _row(rng, result)
    row[rng.integers(len(row))] *= np.float32(1.0 + size)


def one_row(rng: np.random.Generator, result: Result, size: float) -> None:
    row = _row(rng, result)
    error = rng.standard_normal(len(row)).astype(np.float32)
    row += error * np.float32(size * np.linalg.norm(row) / np.linalg.norm(error))


def low_rank(rng: np.random.Generator, result: Result, size: float) -> None:
    left, right = (rng.standard_normal(n, dtype=np.float32) for n in result.shape)
    error = np.outer(left, right)
    result += error * np.float32(size * np.linalg.norm(result) / np.linalg.norm(error))


def sign_flips(rng: np.random.Generator, result: Result, size: float) -> None:
    row = _row(rng, result)
    row[rng.choice(len(row), max(1, round(size * len(row))), replace=False)] *= np.float32(-1.0)


def scaled(rng: np.random.Generator, result: Result, size: float) -> None:
    result *= np.float32(1.0 + size)


LIES: dict[str, Lie] = {
    "one element, by size x its row's norm": element_of_row,
    "one element, by size x itself": element_of_itself,
    "one row, in a random direction": one_row,
    "rank one, over all rows": low_rank,
    "sign flips, size = share of one row": sign_flips,
    "whole result scaled by 1 + size": scaled,
}


def passes(integrity: Integrity, offload: Offload, result: Result) -> float:
    """The largest |D| / τ of an offload that passes.

    Raises:
        IntegrityError: it does not.
    """
    integrity.operand(*offload.operand.shape)[...] = offload.operand
    integrity.begin(offload.linear.weight_id, len(result))
    assert integrity._current is not None
    own = integrity._current[1]
    integrity.verified(offload.linear.name, result)
    return float((np.abs(own.sums - own.expected) / own.tolerance[:, None]).max())


def prepared(offload: Offload, weights: dict[str, NDArray[np.float16]]) -> Integrity:
    """A fresh secret for one weight."""
    integrity = Integrity()
    linear = offload.linear
    integrity.add(linear.weight_id, lambda: weights[linear.name], linear.spectral_norm)
    return integrity


def detection(
    offloads: list[Offload], weights: dict[str, NDArray[np.float16]], trials: int
) -> list[dict[str, Any]]:
    """The share of errors of each kind and size that is caught, in percent."""
    rng = np.random.default_rng(1)
    rows = []
    for kind, lie in LIES.items():
        row: dict[str, Any] = {"error": kind}
        for size in SIZES:
            caught = 0
            for _ in range(trials):
                offload = offloads[rng.integers(len(offloads))]
                wrong = offload.result.copy()
                lie(rng, wrong, size)
                try:
                    passes(prepared(offload, weights), offload, wrong)
                except IntegrityError:
                    caught += 1
            row[f"{size:g}"] = 100.0 * caught / trials
        rows.append(row)
    return rows


def engines() -> dict[str, Engine]:
    """Every engine of this machine."""
    found: dict[str, Engine] = {"cpu, vector": CpuEngine(use_amx=False)}
    amx = CpuEngine(use_amx=True)
    if any("amx" in feature for feature in amx.info.features):
        found["cpu, AMX"] = amx
    with contextlib.suppress(EngineError):
        found["wgpu"] = create_engine("wgpu")
    return found


def margins(offloads: list[Offload], weights: dict[str, NDArray[np.float16]]) -> list[dict[str, Any]]:
    """|D| / τ of honest engines, on recorded operands and on rows along W's first singular vector."""
    coherent = []
    for offload in {o.linear.name: o for o in offloads}.values():
        weight = weights[offload.linear.name].astype(np.float32)
        direction = np.ones(weight.shape[1], np.float32)
        for _ in range(20):
            direction = weight.T @ (weight @ direction)
            direction /= np.linalg.norm(direction)
        rows = np.outer(np.linspace(1.0, 100.0, 32), direction).astype(np.float16)
        coherent.append(Offload(offload.linear, rows.view(np.uint16), offload.result))
    table = []
    for name, engine in engines().items():
        row: dict[str, Any] = {"engine": name}
        for label, kind in (("recorded", offloads), ("along W's first singular vector", coherent)):
            ratios = []
            for offload in kind:
                loaded = engine.load(weights[offload.linear.name])
                result = np.empty((len(offload.operand), loaded.d_out), np.float32)
                engine.matmul(loaded, offload.operand.view(np.float16), result)
                engine.unload(loaded)
                ratios.append(passes(prepared(offload, weights), offload, result))
            row[f"{label}, median"] = f"{statistics.median(ratios):.4f}"
            row[f"{label}, largest"] = f"{max(ratios):.4f}"
        engine.close()
        table.append(row)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--protection", default="gelo-hd3")
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = load_model(resolve_model(MODEL))
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    prompt = model.tokenizer.encode(text)
    worker_arguments = ["worker", "--listen", "127.0.0.1:0", "--engine", "cpu", "--log-level", "error"]
    with started(worker_arguments) as worker:
        runtimes = {
            name: Runtime(
                model,
                RuntimeOptions(
                    worker=f"127.0.0.1:{worker.ready['port']}",
                    protection=arguments.protection,
                    integrity_probes=probes,
                    max_sequences=1,
                    max_len=512,
                ),
            )
            for name, probes in (("off", 0), ("on", DEFAULT_PROBES))
        }
        try:
            for runtime in runtimes.values():
                runtime.connect()
            times = cost(runtimes, prompt, arguments.tokens, arguments.repeats)
            offloads = record(runtimes["on"], prompt)
        finally:
            for runtime in runtimes.values():
                runtime.close()
    wanted = {offload.linear.name for offload in offloads}
    weights = {spec.name: spec.load() for spec in model.weights.linears() if spec.name in wanted}
    honest = margins(offloads, weights)
    curve = detection(offloads, weights, arguments.trials)
    report.show(f"Honest engines: |D| / tolerance, {MODEL}", tuple(honest[0]), honest)
    report.show(
        f"Errors caught, % of {arguments.trials}, {MODEL}, {arguments.protection}", tuple(curve[0]), curve
    )
    report.show(f"Cost of the check, {MODEL}, {arguments.protection}", tuple(times[0]), times)
    report.write(arguments.json, [*times, *curve, *honest])


if __name__ == "__main__":
    main()
