"""A model, a protection scheme and a worker, put together."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gelo.formats import WeightFormat
from gelo.slab import SlabSizes
from tee_runner.decoder.config import DecoderConfig
from tee_runner.decoder.forward import Decoder, LinearHandles, RaggedBatch
from tee_runner.decoder.kv_cache import KvCache, KvDtype
from tee_runner.decoder.weights import LinearSpec
from tee_runner.errors import IntegrityError, WorkerError
from tee_runner.models.loader import LoadedModel
from tee_runner.profile import Profile
from tee_runner.protection.base import (
    Float32,
    Linear,
    MaskOptions,
    Progress,
    Protection,
    SchemeOptions,
)
from tee_runner.protection.integrity import DEFAULT_PROBES, spectral_norm
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.schemes import DEFAULT_SCHEME, scheme
from tee_runner.worker.client import RemoteWeight, TransportName, WorkerClient, WorkerInfo, weight_digest
from tee_runner.worker.transport import WireStats

log = logging.getLogger(__name__)

# Rows of an LM-head operand that the buffers can hold at least: enough to score in blocks.
_HEAD_ROWS = 128
_RECONNECT_WAIT_S = 3.0
_DEFAULT_MAX_LEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """How to run.

    ``step_rows`` bounds the prompt rows of one forward pass; 504 + 8 shield rows is a power of
    two. ``max_len`` bounds prompt plus answer, 0 for the model's own limit up to 4096.
    ``integrity_probes`` is the number of secret projections that every result is checked against,
    0 for no check.
    """

    worker: str
    protection: str = DEFAULT_SCHEME
    transport: TransportName = "auto"
    max_sequences: int = 8
    max_len: int = 0
    step_rows: int = 504
    kv_dtype: KvDtype = "float32"
    worker_timeout: float = 60.0
    integrity_probes: int = DEFAULT_PROBES
    masks: MaskOptions = field(default_factory=MaskOptions)
    lpn: LpnOptions = field(default_factory=LpnOptions)

    @property
    def scheme_options(self) -> SchemeOptions:
        """What concerns the protection scheme."""
        return SchemeOptions(masks=self.masks, lpn=self.lpn)


def served_length(config: DecoderConfig, options: RuntimeOptions) -> int:
    """Positions of a sequence."""
    limit = config.max_position_embeddings
    return min(options.max_len, limit) if options.max_len else min(limit, _DEFAULT_MAX_LEN)


def operand_limits(options: RuntimeOptions) -> tuple[int, int]:
    """Rows that an operand may have: of a layer's weight, and of the LM head."""
    rows = scheme(options.protection).operand_rows
    sequences = [1] * options.max_sequences
    return rows([options.step_rows, *sequences]), max(_HEAD_ROWS, rows(sequences))


def longest_chunk(options: RuntimeOptions) -> int:
    """Rows that one sequence can have in a pass: no more than an operand has."""
    return max(operand_limits(options))


class Runtime:
    """Runs forward passes. One thread uses it."""

    def __init__(self, model: LoadedModel, options: RuntimeOptions, progress: Progress | None = None) -> None:
        """Hashes the weights and allocates the KV cache; :meth:`connect` reaches the worker.

        Raises:
            GeloError: there is no such scheme, or it cannot protect this model as the options ask.
        """
        self.model = model
        self.options = options
        self.scheme = scheme(options.protection)
        widths = {spec.d_in for spec in model.weights.linears()}
        # What clients are told of the protection.
        self.protection_parameters = {
            **self.scheme.parameters_for(widths, options.scheme_options),
            "integrity_probes": options.integrity_probes,
        }
        self.max_len = served_length(model.config, options)
        self._weights, self._linears = _read_weights(model, self.scheme, options, progress)
        # Public data that outlives a session.
        self._store = self.scheme.new_store()
        handles = LinearHandles(handles=self._linears)
        self.profile = Profile()
        self._decoder = Decoder(
            model.config, model.weights, handles, max_len=self.max_len, profile=self.profile
        )
        self.max_operand_rows, self.head_rows = operand_limits(options)
        self.cache = KvCache(
            model.config,
            slots=options.max_sequences,
            max_len=self.max_len,
            dtype=options.kv_dtype,
            longest_chunk=longest_chunk(options),
        )
        self._client = WorkerClient(options.worker, timeout=options.worker_timeout)
        self._protection: Protection | None = None
        self._finished = WireStats()
        # Results that failed their check, over all sessions.
        self.integrity_failures = 0
        self.worker_info: WorkerInfo | None = None

    @property
    def connected(self) -> bool:
        """Whether a worker session is open, as far as known."""
        return self._protection is not None

    def connect(self, progress: Progress | None = None, *, wait: float = 30.0) -> None:
        """Reach the worker, upload what it lacks, open a session.

        Raises:
            WorkerError: it cannot be reached or refuses.
        """
        self.worker_info = self._client.info(wait=wait)
        sent = self._client.provision(self._weights, progress)
        transport = self._client.open_session(self._weights, self._slab_sizes(), self.options.transport)
        # A hint from the worker: it decides when work is done, and nothing else.
        transport.worker_apart = self.worker_info.hardware_gpu or not self.worker_info.on_this_host
        protection = self.scheme.open(transport, self.options.scheme_options, self._store)
        protection.profile = self.profile
        if progress is not None:
            protection.progress = progress
        try:
            protection.provision(self._linears, probes=self.options.integrity_probes)
        except BaseException:
            protection.close()
            raise
        self._protection = protection
        info = self.worker_info
        log.info("worker: engine %s on %s; uploaded %d MB", info.engine, info.adapter, sent // 1_000_000)

    def forward(self, batch: RaggedBatch) -> Float32:
        """Logits ``(sum(sampled), vocab)`` float32, valid until the next call.

        A session that failed is closed; the next call opens another.

        Raises:
            WorkerError: the worker failed. The cache is as before.
        """
        if self._protection is None:
            self.connect(wait=_RECONNECT_WAIT_S)
        protection = self._protection
        if protection is None:
            raise WorkerError("There is no worker session.")
        try:
            begin, accounted = time.perf_counter_ns(), self.profile.total()
            with protection.forward_session() as session:
                logits = self._decoder.forward(batch, self.cache, session)
            rest = time.perf_counter_ns() - begin - (self.profile.total() - accounted)
            self.profile.add("norms/rope/act", max(0, rest))
            return logits
        except WorkerError as error:
            if isinstance(error, IntegrityError):
                self.integrity_failures += 1
                log.error("integrity check failed: %s", error.message)
            self.disconnect()
            raise

    def operand_rows(self, counts: Sequence[int]) -> int:
        """Rows that data rows ``counts`` take on the wire; at most ``max_operand_rows`` a pass."""
        return self.scheme.operand_rows(counts)

    def wire_stats(self) -> WireStats:
        """Totals over all sessions."""
        total = replace(self._finished)
        if self._protection is not None:
            _add(total, self._protection.transport.stats)
        return total

    def reset_stats(self) -> None:
        """Start the totals afresh."""
        self.profile.reset()
        self._finished = WireStats()
        if self._protection is not None:
            self._protection.transport.stats = WireStats()

    def idle(self) -> bool:
        """Let the scheme work ahead; False when there is nothing to do."""
        return self._protection is not None and self._protection.idle()

    def close(self) -> None:
        """End the session and the channel."""
        self.disconnect()
        self._client.close()

    def disconnect(self) -> None:
        """End the worker session, if there is one. The next pass opens another."""
        protection, self._protection = self._protection, None
        if protection is not None:
            _add(self._finished, protection.transport.stats)
            protection.close()

    def _slab_sizes(self) -> SlabSizes:
        *layers, head = self._linears
        rows = max(self.max_operand_rows, self.scheme.provision_rows)
        operand = max(rows * max(w.d_in for w in layers), self.head_rows * head.d_in)
        result = max(rows * max(w.d_out for w in layers), self.head_rows * head.d_out)
        return SlabSizes(operand=operand * self.scheme.operand_item_bytes, result=result * 4)


def _add(total: WireStats, part: WireStats) -> None:
    total.offloads += part.offloads
    total.bytes_sent += part.bytes_sent
    total.bytes_received += part.bytes_received
    total.exchange_ns += part.exchange_ns
    total.worker_ns += part.worker_ns


def _read_weights(
    model: LoadedModel, kind: type[Protection], options: RuntimeOptions, progress: Progress | None
) -> tuple[tuple[RemoteWeight, ...], tuple[Linear, ...]]:
    """One pass over the weights: what the worker must hold, and how the decoder names it."""
    specs = list(model.weights.linears())
    total = sum(spec.d_in * spec.d_out * 2 for spec in specs)
    norms = options.integrity_probes > 0 and kind.rounded_results
    done = 0
    remote, linears = [], []
    for weight_id, spec in enumerate(specs):
        values = np.ascontiguousarray(spec.load())
        sent = np.ascontiguousarray(kind.wire_weight(values, options.scheme_options))
        remote.append(
            RemoteWeight(
                name=spec.name,
                d_in=spec.d_in,
                d_out=spec.d_out,
                sha256=weight_digest(sent),
                load=partial(_wire_weight, spec, kind, options.scheme_options),
                format=WeightFormat.of(sent.dtype),
            )
        )
        linears.append(
            Linear(
                weight_id=weight_id,
                name=spec.name,
                d_in=spec.d_in,
                d_out=spec.d_out,
                load=spec.load,
                spectral_norm=spectral_norm(values) if norms else 0.0,
            )
        )
        done += spec.d_in * spec.d_out * 2
        if progress is not None:
            progress("hash weights", done, total)
    return tuple(remote), tuple(linears)


def _wire_weight(spec: LinearSpec, kind: type[Protection], options: SchemeOptions) -> NDArray[Any]:
    return kind.wire_weight(spec.load(), options)
