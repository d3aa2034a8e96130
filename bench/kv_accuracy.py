"""What a smaller element type of the KV cache costs: the answer's distribution against float32's.

python bench/kv_accuracy.py [--model smollm2-135m-instruct] [--text docs/security.md] [--tokens 768]
                            [--chunk 128] [--json FILE]

The text runs through the decoder in this process, with float32 products of the real weights, once
per element type; every token's keys and values are read back from the cache. "KL" is the divergence
of the next-token distribution from that with a float32 cache, in nats, over all positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bench import report
from tee_runner.decoder.forward import Decoder, LinearHandles, RaggedBatch
from tee_runner.decoder.kv_cache import KvCache, KvDtype, kv_cache_bytes
from tee_runner.models import LoadedModel, load_model, resolve_model
from tee_runner.protection.base import ForwardSession, Linear

COLUMNS = (
    "KV", "bytes/position", "KL mean", "KL 99 %", "KL max", "same best token %", "perplexity",
)  # fmt: skip
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Local(ForwardSession):
    """Products in this process, in float32."""

    def __init__(self, weights: Sequence[Float32]) -> None:
        self._weights = weights

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        """See :meth:`ForwardSession.linear`."""
        np.matmul(rows, self._weights[weight.weight_id].T, out=out)


class Scored:
    """A model whose distributions over a text can be computed for each element type."""

    def __init__(self, model: LoadedModel, tokens: NDArray[np.int64], chunk: int) -> None:
        specs = list(model.weights.linears())
        handles = LinearHandles(
            handles=tuple(
                Linear(weight_id=i, name=spec.name, d_in=spec.d_in, d_out=spec.d_out)
                for i, spec in enumerate(specs)
            )
        )
        self.config = model.config
        self.tokens = tokens
        self._chunk = chunk
        self._session = Local([spec.load().astype(np.float32) for spec in specs])
        self._decoder = Decoder(model.config, model.weights, handles, max_len=len(tokens))
        self._caches: dict[KvDtype, KvCache] = {}

    def steps(self, first: int, dtype: KvDtype) -> Float64:
        """ln p of every next token ``(n, vocab)`` at the positions from ``first`` on, a chunk of them.

        Chunks must be asked for in order.
        """
        if dtype not in self._caches:
            cache = KvCache(
                self.config, slots=1, max_len=len(self.tokens), dtype=dtype, longest_chunk=self._chunk
            )
            self._caches[dtype] = cache
        part = self.tokens[first : first + self._chunk]
        batch = RaggedBatch(tokens=part, slots=[0], counts=[len(part)], sampled=[len(part)])
        logits = self._decoder.forward(batch, self._caches[dtype], self._session).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def bytes_per_position(self, dtype: KvDtype) -> int:
        """Of a layer stack that keeps every position."""
        return kv_cache_bytes(self.config, slots=1, max_len=1, dtype=dtype)


def compare(scored: Scored, chunk: int, dtypes: Sequence[KvDtype]) -> Iterator[dict[str, Any]]:
    """The table's rows, one per element type; float32 is what the others are compared with."""
    divergences: dict[KvDtype, list[Float64]] = {dtype: [] for dtype in dtypes}
    agreements: dict[KvDtype, list[NDArray[np.bool_]]] = {dtype: [] for dtype in dtypes}
    surprises: dict[KvDtype, list[Float64]] = {dtype: [] for dtype in dtypes}
    count = len(scored.tokens) - 1
    for first in range(0, count + 1, chunk):
        reference = scored.steps(first, "float32")
        following = scored.tokens[first + 1 : first + 1 + chunk]
        for dtype in dtypes:
            found = reference if dtype == "float32" else scored.steps(first, dtype)
            divergences[dtype].append((np.exp(reference) * (reference - found)).sum(axis=1))
            agreements[dtype].append(reference.argmax(axis=1) == found.argmax(axis=1))
            surprises[dtype].append(-found[np.arange(len(following)), following])
    for dtype in dtypes:
        kl = np.concatenate(divergences[dtype])
        yield {
            "KV": dtype,
            "bytes/position": scored.bytes_per_position(dtype),
            "KL mean": f"{kl.mean():.1e}",
            "KL 99 %": f"{np.quantile(kl, 0.99):.1e}",
            "KL max": f"{kl.max():.1e}",
            "same best token %": 100.0 * float(np.concatenate(agreements[dtype]).mean()),
            "perplexity": f"{np.exp(np.concatenate(surprises[dtype]).mean()):.3f}",
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, default=Path("docs/security.md"))
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = load_model(resolve_model(arguments.model))
    tokens = model.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
    scored = Scored(model, np.asarray(tokens, dtype=np.int64), arguments.chunk)
    rows = list(compare(scored, arguments.chunk, get_args(KvDtype)))
    report.show(f"KV element types, {arguments.model}, {len(tokens)} tokens", COLUMNS, rows)
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
