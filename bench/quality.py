"""What each scheme costs in quality: its next-token distributions against float32's, and perplexity.

python -m bench.quality --text FILE [--tokens 5120] [--window 512] [--model NAME] [--json FILE]

The text runs through the decoder in this process in windows of ``--window`` tokens, once with float32
products (the reference) and once per scheme. The schemes are the real ones; only the worker is played by
exact BLAS products here. `lpn` gives the very logits of `plain-int8`, so one row stands for both: W8 has
weights of 8 bits, W16 (``--lpn-weights int16``) as many as leave activations 12. "KL" is the divergence
from the reference, in nats, over all positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import report
from bench.kv_accuracy import Local
from tee_runner.decoder.forward import Decoder, LinearHandles, RaggedBatch
from tee_runner.decoder.kv_cache import KvCache
from tee_runner.models import LoadedModel, load_model, resolve_model
from tee_runner.protection.base import ForwardSession, Linear, Protection, SchemeOptions
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.schemes import scheme
from tee_runner.worker.transport import Transport

SCHEMES = {
    "plain (float16)": ("plain", False), "gelo-hd3": ("gelo-hd3", False),
    "lpn, plain-int8 W8": ("plain-int8", False), "lpn, plain-int8 W16": ("plain-int8", True),
}  # fmt: skip
COLUMNS = ("scheme", "bits W / A", "KL mean", "KL 99 %", "KL max", "same best token %", "perplexity")
# Rows of logits at a time: a block of float64 of a large vocabulary stays small.
_CHUNK = 64
Float64 = NDArray[np.float64]


class Here(Transport):
    """Multiplies in this process: float32 for float16 operands, float64 (exact below 2^53) for integers."""

    def __init__(self, weights: list[NDArray[Any]]) -> None:
        super().__init__()
        kind = np.float32 if weights[0].dtype == np.float16 else np.float64
        self._weights: list[Any] = [weight.astype(kind) for weight in weights]
        self._operand: NDArray[Any] = np.empty(0)

    def operand(self, rows: int, d_in: int) -> NDArray[np.float16]:
        """See :meth:`Transport.operand`."""
        self._operand = np.empty((rows, d_in), dtype=np.float16)
        return self._operand

    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.float32]:
        """See :meth:`Transport.exchange`."""
        product: NDArray[np.float32] = self._operand.astype(np.float32) @ self._weights[weight_id].T
        return product

    def operand_words(self, rows: int, d_in: int) -> NDArray[np.uint32]:
        """See :meth:`Transport.operand_words`."""
        self._operand = np.empty((rows, d_in), dtype=np.uint32)
        return self._operand

    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> NDArray[np.uint32]:
        """See :meth:`Transport.exchange_words`. Operands in clear: products are small integers."""
        signed = self._operand.view(np.int32).astype(np.float64)
        product: NDArray[np.float64] = signed @ self._weights[weight_id].T
        return product.astype(np.int64).astype(np.uint32)

    def close(self) -> None:
        """Nothing to close."""


class Scored:
    """A model with one way to compute its products."""

    def __init__(self, model: LoadedModel, window: int, name: str) -> None:
        specs = list(model.weights.linears())
        linears = tuple(
            Linear(weight_id=i, name=s.name, d_in=s.d_in, d_out=s.d_out, load=s.load)
            for i, s in enumerate(specs)
        )
        self._decoder = Decoder(model.config, model.weights, LinearHandles(handles=linears), max_len=window)
        self._cache = KvCache(model.config, slots=1, max_len=window)
        self._local: Local | None = None
        self._protection: Protection | None = None
        self.bits = "32"
        if not name:
            self._local = Local([spec.load().astype(np.float32) for spec in specs])
            return
        kind, wide = SCHEMES[name]
        options = SchemeOptions(lpn=LpnOptions(wide_weights=wide))
        chosen = scheme(kind)
        weights = [chosen.wire_weight(np.ascontiguousarray(s.load()), options) for s in specs]
        self._protection = chosen.open(Here(weights), options)
        self._protection.provision(linears, probes=0)
        self.bits = "16"
        if weights[0].dtype != np.float16:
            held: Any = self._protection
            w = sorted(int(abs(x.astype(np.int32)).max()).bit_length() + 1 for x in weights)
            a = sorted(int(v.levels).bit_length() + 1 for v in held.weights.values())
            self.bits = f"{w[0]}-{w[-1]} / {a[0]}-{a[-1]}"

    def windows(self, tokens: NDArray[np.int64], window: int) -> Iterator[Float64]:
        """ln p of the next token ``(n, vocab)``, a chunk of rows at a time; no context across windows."""
        for start in range(0, len(tokens), window):
            slot = self._cache.take()
            for first in range(start, min(start + window, len(tokens)), _CHUNK):
                part = tokens[first : min(first + _CHUNK, start + window)]
                batch = RaggedBatch(tokens=part, slots=[slot], counts=[len(part)], sampled=[len(part)])
                with self._session() as session:
                    logits = self._decoder.forward(batch, self._cache, session).astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                yield logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            self._cache.release(slot)

    def _session(self) -> ForwardSession:
        if self._protection is not None:
            return self._protection.forward_session()
        assert self._local is not None
        return self._local


def compare(model: LoadedModel, tokens: NDArray[np.int64], window: int) -> list[dict[str, Any]]:
    """The table's rows."""
    systems = {name: Scored(model, window, name) for name in ("", *SCHEMES)}
    streams = {name: system.windows(tokens, window) for name, system in systems.items()}
    found: dict[str, list[tuple[Float64, NDArray[np.bool_], Float64]]] = {name: [] for name in systems}
    position = 0
    for reference in streams[""]:
        rows = len(reference)
        following = tokens[position + 1 : position + 1 + rows]
        # The last row of a window predicts a token that its window does not have, but the text does.
        for name in systems:
            other = reference if not name else next(streams[name])
            found[name].append(
                (
                    (np.exp(reference) * (reference - other)).sum(axis=1),
                    reference.argmax(axis=1) == other.argmax(axis=1),
                    -other[np.arange(len(following)), following],
                )
            )
        position += rows
    table = []
    for name, parts in found.items():
        kl, same, surprise = (np.concatenate(column) for column in zip(*parts, strict=True))
        table.append(
            {
                "scheme": name or "float32 (reference)",
                "bits W / A": systems[name].bits,
                "KL mean": f"{kl.mean():.1e}",
                "KL 99 %": f"{np.quantile(kl, 0.99):.1e}",
                "KL max": f"{kl.max():.1e}",
                "same best token %": 100.0 * float(same.mean()),
                "perplexity": f"{np.exp(surprise.mean()):.3f}",
            }
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    model = load_model(resolve_model(arguments.model))
    tokens = model.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
    rows = compare(model, np.asarray(tokens, dtype=np.int64), arguments.window)
    report.show(f"Quality, {arguments.model}, {len(tokens)} tokens", COLUMNS, rows)
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
