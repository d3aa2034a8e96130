"""`gelo serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gelo_cli.console import CliError, err, progress_bars, reported_errors, set_up_logging
from gelo_cli.options import (
    DecodeMaskChoice,
    DecodeMaskOption,
    EvidenceChoice,
    EvidenceOption,
    FreshMaskOption,
    IntegrityOption,
    KvChoice,
    KvOption,
    LogOption,
    LpnBitsOption,
    LpnMemoryOption,
    LpnPoolsOption,
    LpnWeightsChoice,
    LpnWeightsOption,
    MaxLenOption,
    ModelOption,
    ObliviousOption,
    PresetOption,
    ProtectionChoice,
    ProtectionOption,
    ReadyOption,
    TransportChoice,
    TransportOption,
)
from gelo_cli.processes import report_ready
from tee_runner.protection.lpn.options import DEFAULT_MEMORY, DEFAULT_MIN_BITS

if TYPE_CHECKING:
    from attestation.providers.select import EvidenceKind
    from tee_runner.engine.runtime import RuntimeOptions
    from tee_runner.models import ModelHeader


def serve(
    worker: Annotated[str, typer.Option(help="host:port of the worker.")] = "127.0.0.1:7070",
    model: ModelOption = "smollm2-135m-instruct",
    preset: PresetOption = None,
    protection: ProtectionOption = ProtectionChoice.LPN,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0)] = 8443,
    metrics_port: Annotated[
        int, typer.Option(help="Prometheus port on loopback; 0 takes a free one.")
    ] = 9464,
    transport: TransportOption = TransportChoice.AUTO,
    max_sequences: Annotated[int, typer.Option(help="Sequences served at once.", min=1, max=256)] = 8,
    max_len: MaxLenOption = 0,
    kv_dtype: KvOption = KvChoice.FLOAT32,
    integrity: IntegrityOption = True,
    worker_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for one matrix product.", min=1)
    ] = 60.0,
    decode_mask: DecodeMaskOption = DecodeMaskChoice.SEQUENCE,
    mask_per_offload: FreshMaskOption = False,
    oblivious_embedding: ObliviousOption = False,
    lpn_memory: LpnMemoryOption = DEFAULT_MEMORY,
    lpn_bits: LpnBitsOption = DEFAULT_MIN_BITS,
    lpn_weights: LpnWeightsOption = LpnWeightsChoice.INT8,
    lpn_pools: LpnPoolsOption = None,
    evidence: EvidenceOption = EvidenceChoice.AUTO,
    log_level: LogOption = "info",
    ready_fd: ReadyOption = None,
) -> None:
    """Run the trusted runner: the HTTPS front-end, the model, and everything secret."""
    set_up_logging(log_level)
    with reported_errors():
        from attestation.providers.select import EvidenceKind, open_provider
        from tee_runner.api.serve import Listening, ServeOptions
        from tee_runner.api.serve import serve as serve_runner
        from tee_runner.engine.runtime import RuntimeOptions
        from tee_runner.hardening import forbid_memory_dumps
        from tee_runner.models import load_model, read_header, resolve_model
        from tee_runner.protection.base import MaskOptions
        from tee_runner.protection.integrity import DEFAULT_PROBES
        from tee_runner.protection.lpn.options import LpnOptions

        forbid_memory_dumps()
        kind = _evidence_kind(evidence)
        provider = open_provider(kind)
        provider.evidence(bytes(64))  # so that a platform that signs nothing shows before the model is loaded

        def ready(listening: Listening) -> None:
            shown = f"https://{host}:{listening.port}"
            name = "[bold yellow]SIMULATED[/]" if kind is EvidenceKind.SIMULATED else kind.value
            err.print(f"[green]ready[/] {shown}  evidence: {name}", highlight=False)
            report_ready(ready_fd, {"port": listening.port, "metrics_port": listening.metrics_port})

        options = RuntimeOptions(
            worker=worker,
            protection=protection.value,
            transport=transport.value,
            max_sequences=max_sequences,
            max_len=max_len,
            kv_dtype=kv_dtype.value,
            worker_timeout=worker_timeout,
            masks=MaskOptions(
                shared_decode=decode_mask is DecodeMaskChoice.SHARED, per_offload=mask_per_offload
            ),
            integrity_probes=DEFAULT_PROBES if integrity else 0,
            lpn=LpnOptions(
                bytes_per_parameter=lpn_memory,
                min_bits=lpn_bits,
                wide_weights=lpn_weights is LpnWeightsChoice.INT16,
                pool_directory=lpn_pools,
            ),
        )
        with progress_bars() as progress:
            directory = resolve_model(model, progress=progress)
        check_memory(model, read_header(directory, preset=preset), options)
        with progress_bars() as progress:
            loaded = load_model(
                directory, preset=preset, progress=progress, oblivious_embedding=oblivious_embedding
            )
        listen = ServeOptions(host=host, port=port, metrics_port=metrics_port)
        with progress_bars() as progress:
            serve_runner(loaded, options, listen, provider=provider, progress=progress, on_ready=ready)


def check_memory(model: str, header: ModelHeader, options: RuntimeOptions) -> None:
    """Print what serving ``model`` will need.

    Raises:
        CapacityError: this machine does not have it.
    """
    from tee_runner.engine.capacity import available_memory, gigabytes, memory_plan, require_memory

    plan = memory_plan(header.config, options, embedding_bytes_per_value=header.embedding_bytes_per_value)
    available = available_memory()
    had = "unknown" if available is None else gigabytes(available)
    require_memory(model, plan, available)
    err.print(f"memory: {plan.describe()}; available: {had}", highlight=False)


def _evidence_kind(choice: EvidenceChoice) -> EvidenceKind:
    """The provider to use.

    Raises:
        CliError: auto on a machine without one.
    """
    from attestation.errors import EvidenceUnavailableError
    from attestation.providers.select import EvidenceKind, resolve_kind

    try:
        return resolve_kind(EvidenceKind(choice.value))
    except EvidenceUnavailableError as error:
        raise CliError(
            error.message,
            remedy="Run in an SEV-SNP VM; for development only, --evidence simulated, which proves nothing.",
        ) from None
