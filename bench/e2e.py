"""TTFT and TPOT of every scheme beside HF transformers on the CPU, same prompt, same run.

python bench/e2e.py [--tokens 64] [--repeats 5] [--engine cpu] [--json FILE]

Each scheme runs as the real two processes and is measured at the client, over RA-TLS, as it
streams. The schemes and transformers take turns, and the median of the repeats is reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from attestation import UNPINNED, UnsafeAllowSimulated
from attestation.client import connect
from bench import report
from gelo_cli.client import Timing, stream
from gelo_cli.processes import started
from gelo_cli.up import serve_arguments
from tee_runner.models import load_model, resolve_model

MODEL = "smollm2-135m-instruct"
SCHEMES = ("plain", "gelo-haar", "gelo-hd3", "plain-int8", "lpn")
PROMPT = "Explain in a few paragraphs how a bicycle stays upright while it is moving."
COLUMNS = (
    "system", "TTFT ms", "TPOT ms", "tokens/s", "x plain", "x HF f32", "offloads/token",
    "round trip us", "worker ms", "wire ms", "runner ms",
)  # fmt: skip


class Service:
    """One scheme's two processes and a verified client."""

    def __init__(self, stack: ExitStack, scheme: str, engine: str) -> None:
        worker = stack.enter_context(
            started(["worker", "--listen", "127.0.0.1:0", "--engine", engine, "--log-level", "error"])
        )
        runner = stack.enter_context(
            started(
                serve_arguments(
                    worker, model=MODEL, protection=scheme, port=0, metrics_port=0, log_level="error"
                )
            )
        )
        policy = UnsafeAllowSimulated.only(
            model_identity=UNPINNED, service=UNPINNED, allowed_protection=frozenset({scheme})
        )
        url = f"https://127.0.0.1:{runner.ready['port']}"
        self._client: httpx.Client = stack.enter_context(connect(url, policy))
        self._metrics = f"http://127.0.0.1:{runner.ready['metrics_port']}/metrics"

    def run(self, tokens: int) -> dict[str, float]:
        """One answer: times in ms, wire figures per token of the whole answer."""
        before = self._counters()
        timing = Timing()
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens}
        for _ in stream(self._client, body, timing):
            pass
        after = self._counters()
        spent = {name: after[name] - before[name] for name in after}
        return {
            "ttft": timing.ttft * 1e3,
            "tpot": timing.tpot * 1e3,
            "offloads": spent["gelo_offloads_total"],
            "exchange": spent["gelo_offload_seconds_total"] * 1e3,
            "worker": spent["gelo_worker_compute_seconds_total"] * 1e3,
            "steps": spent["gelo_step_seconds_total"] * 1e3,
            "passes": spent["gelo_steps_total"],
        }

    def _counters(self) -> dict[str, float]:
        with urllib.request.urlopen(self._metrics, timeout=10) as response:  # noqa: S310
            text = response.read().decode()
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.endswith("_total")
        }


class Transformers:
    """Greedy decoding with a KV cache in HF transformers on the CPU."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model.eval()
        model = load_model(directory)
        text = model.tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
        self._ids = model.tokenizer.encode(text)

    def run(self, tokens: int) -> dict[str, float]:
        """One answer."""
        torch = self._torch
        with torch.inference_mode():
            started_at = time.perf_counter()
            output = self._model(torch.tensor([self._ids]), use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            first = time.perf_counter()
            for _ in range(tokens - 1):
                output = self._model(token, past_key_values=output.past_key_values, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
            done = time.perf_counter()
        return {"ttft": (first - started_at) * 1e3, "tpot": (done - first) / (tokens - 1) * 1e3}


def summarise(name: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the repeats as one row."""
    middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    row: dict[str, Any] = {
        "system": name,
        "TTFT ms": middle["ttft"],
        "TPOT ms": middle["tpot"],
        "tokens/s": 1e3 / middle["tpot"],
    }
    if "offloads" in middle:
        passes = middle["passes"]
        row |= {
            "offloads/token": middle["offloads"] / passes,
            "round trip us": (middle["exchange"] - middle["worker"]) / middle["offloads"] * 1e3,
            "worker ms": middle["worker"] / passes,
            "wire ms": (middle["exchange"] - middle["worker"]) / passes,
            "runner ms": (middle["steps"] - middle["exchange"]) / passes,
        }
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=("auto", "cpu", "wgpu"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    directory = resolve_model(MODEL)
    with ExitStack() as stack:
        systems: dict[str, Service | Transformers] = {
            scheme: Service(stack, scheme, arguments.engine) for scheme in SCHEMES
        }
        systems["HF transformers f32"] = Transformers(directory, "float32")
        systems["HF transformers bf16"] = Transformers(directory, "bfloat16")
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
        for system in systems.values():
            system.run(8)  # compile and warm up
        for _ in range(arguments.repeats):
            for name, system in systems.items():
                runs[name].append(system.run(arguments.tokens))
    rows = [summarise(name, results) for name, results in runs.items()]
    tpot = {row["system"]: row["TPOT ms"] for row in rows}
    for row in rows:
        row["x plain"] = row["TPOT ms"] / tpot["plain"]
        row["x HF f32"] = row["TPOT ms"] / tpot["HF transformers f32"]
    report.show(f"End to end, {MODEL}, {arguments.engine} engine", COLUMNS, rows)
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
