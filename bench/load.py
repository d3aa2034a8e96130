"""Loading: how long it takes and how much memory, per family, at the published shapes.

Each checkpoint is written to disk with random float16 weights (sharded safetensors), loaded by a
process of its own, and deleted. That process goes through every pass the runner makes over the
weights before it serves: identity, digests and spectral norms, upload to the worker (the chunks
are made and dropped), secret projections. Its peak is what the kernel counts as resident, mapped
files included, above what the interpreter and its libraries took before.

    python -m bench.load [--model NAME ...] [--directory DIR] [--shard-gb 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import report
from tee_runner.engine.capacity import memory_plan
from tee_runner.engine.runtime import RuntimeOptions
from tee_runner.models import load_model, parse_config
from tee_runner.models.checkpoint import INDEX_FILE
from tee_runner.models.presets import PRESETS
from tee_runner.models.safetensors_file import Array, TensorSource, write_safetensors
from tee_runner.models.weights import expected_tensors
from tee_runner.protection.integrity import DEFAULT_PROBES, Integrity, spectral_norm
from tee_runner.worker.client import RemoteWeight, upload_requests, weight_digest

_MISTRAL: Final[Mapping[str, Any]] = {
    # mistralai/Mistral-7B-v0.1 with 4 of its 32 layers.
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000,
    "sliding_window": 4096,
}
_QWEN2: Final[Mapping[str, Any]] = {
    # Qwen/Qwen2.5-0.5B
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    **PRESETS,
    "qwen2.5-0.5b": _QWEN2,
    "mistral-7b, 4 layers": _MISTRAL,
}
DEFAULT: Final = (
    "smollm2-135m-instruct",
    "gemma-3-270m",
    "qwen2.5-0.5b",
    "qwen3-1.7b",
    "mistral-7b, 4 layers",
)
_TILE: Final = 1 << 20
COLUMNS: Final = (
    "model", "family", "checkpoint GB", "embeddings GB", "largest shard GB", "bound GB", "peak GB",
    "peak anonymous GB", "open s", "hash s", "upload s", "project s",
)  # fmt: skip


def write_checkpoint(values: Mapping[str, Any], directory: Path, *, shard_bytes: int) -> None:
    """A model directory of this ``config.json``: random float16 weights, a tokenizer of 256 bytes.

    Shards hold ``shard_bytes`` at most, or a single tensor that is larger.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(values)))
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))

    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in expected_tensors(parse_config(values)).items():
        size = 2 * math.prod(shape)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    tile = (np.random.default_rng(0).standard_normal(_TILE, np.float32) * 0.02).astype(np.float16)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(shard, file)
        write_safetensors(
            directory / file,
            {n: TensorSource("F16", s, partial(_tiled, tile, s)) for n, s in shard.items()},
        )
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": where}))


def _tiled(tile: Array, shape: tuple[int, ...]) -> Array:
    return np.resize(tile, math.prod(shape)).reshape(shape)


def status(key: str) -> int:
    """Bytes that ``/proc/self/status`` gives for ``key``."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Stages:
    """Times stages, and keeps the largest resident and anonymous size above the one at the start."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
        self._before, self._anonymous = status("VmRSS"), status("RssAnon")
        self.peak_anonymous = 0
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def sample(self, stage: str = "", done: int = 0, total: int = 0) -> None:
        """Note the anonymous size, for which the kernel keeps no peak."""
        self.peak_anonymous = max(self.peak_anonymous, status("RssAnon") - self._anonymous)

    def end(self, name: str) -> None:
        """The stage ``name`` is over."""
        self.sample()
        now = time.perf_counter()
        self.seconds[name] = now - self._start
        self._start = now

    @property
    def peak(self) -> int:
        """Bytes resident at most, mapped files included, above the start."""
        return status("VmHWM") - self._before


def measure(directory: Path, *, check: bool) -> dict[str, Any]:
    """Load the model in ``directory`` in this process, as ``gelo serve`` does."""
    spectral_norm(np.ones((32, 32), np.float16))  # compiled before memory is counted
    stages = Stages()
    model = load_model(directory, progress=stages.sample)
    stages.end("open s")
    weights: list[tuple[RemoteWeight, float]] = []
    for spec in model.weights.linears():
        values = spec.load()
        digest, norm = weight_digest(values), spectral_norm(values) if check else 0.0
        stages.sample()
        del values
        remote = RemoteWeight(name=spec.name, d_in=spec.d_in, d_out=spec.d_out, sha256=digest, load=spec.load)
        weights.append((remote, norm))
    stages.end("hash s")
    for remote, _ in weights:
        for request in upload_requests(remote):
            del request
            stages.sample()
    stages.end("upload s")
    if check:
        integrity = Integrity(DEFAULT_PROBES)
        for weight_id, (remote, norm) in enumerate(weights):
            integrity.add(weight_id, remote.load, norm)
            stages.sample()
        stages.end("project s")
    return {"peak": stages.peak, "peak anonymous": stages.peak_anonymous, **stages.seconds}


def rows(names: list[str], directory: Path | None, shard_bytes: int, check: bool) -> Iterator[dict[str, Any]]:
    """One row per model; each checkpoint exists only while it is measured."""
    for name in names:
        with tempfile.TemporaryDirectory(dir=directory, prefix="bench-load.") as scratch:
            path = Path(scratch) / "model"
            write_checkpoint(SHAPES[name], path, shard_bytes=shard_bytes)
            command = [sys.executable, "-m", "bench.load", "--measure", str(path)]
            done = subprocess.run(
                command + ([] if check else ["--no-check"]), stdout=subprocess.PIPE, text=True, check=True
            )
            shards = [file.stat().st_size for file in path.glob("*.safetensors")]
        config = parse_config(SHAPES[name])
        plan = memory_plan(config, RuntimeOptions(worker="")).parts
        figures = json.loads(done.stdout)
        bound = plan["embeddings"] + plan["norms and biases"] + max(shards)
        yield {
            "model": name,
            "family": config.family,
            "checkpoint GB": sum(shards) / 1e9,
            "embeddings GB": plan["embeddings"] / 1e9,
            "largest shard GB": max(shards) / 1e9,
            "bound GB": bound / 1e9,
            "peak GB": figures.pop("peak") / 1e9,
            "peak anonymous GB": figures.pop("peak anonymous") / 1e9,
            **figures,
        }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=SHAPES, help="may be repeated")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written")
    parser.add_argument(
        "--shard-gb", type=float, default=2.0, help="largest shard, unless a tensor is larger"
    )
    parser.add_argument("--no-check", action="store_true", help="without what the integrity check needs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, check=not arguments.no_check)))
        return
    names = arguments.model or list(DEFAULT)
    shard_bytes = int(arguments.shard_gb * 1e9)
    found = list(rows(names, arguments.directory, shard_bytes, not arguments.no_check))
    report.show("loading", COLUMNS, found)
    report.write(arguments.json, found)


if __name__ == "__main__":
    main()
