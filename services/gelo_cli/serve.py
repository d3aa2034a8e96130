"""`gelo serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from gelo_cli.console import err, progress_bars, reported_errors, set_up_logging
from gelo_cli.options import (
    DecodeMaskChoice,
    DecodeMaskOption,
    FreshMaskOption,
    IntegrityOption,
    KvChoice,
    KvOption,
    LogOption,
    MaxLenOption,
    ModelOption,
    ProtectionChoice,
    ProtectionOption,
    ReadyOption,
    TransportChoice,
    TransportOption,
)
from gelo_cli.processes import report_ready


def serve(
    worker: Annotated[str, typer.Option(help="host:port of the worker.")] = "127.0.0.1:7070",
    model: ModelOption = "smollm2-135m-instruct",
    protection: ProtectionOption = ProtectionChoice.HD3,
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
    log_level: LogOption = "info",
    ready_fd: ReadyOption = None,
) -> None:
    """Run the trusted runner: the HTTPS front-end, the model, and everything secret.

    Evidence is SIMULATED: this build serves simulated SNP reports, which prove nothing.
    """
    set_up_logging(log_level)
    with reported_errors():
        from tee_runner.api.serve import Listening, ServeOptions
        from tee_runner.api.serve import serve as serve_runner
        from tee_runner.engine.runtime import RuntimeOptions
        from tee_runner.hardening import forbid_memory_dumps
        from tee_runner.models import load_model, resolve_model
        from tee_runner.protection.base import MaskOptions
        from tee_runner.protection.integrity import DEFAULT_PROBES

        forbid_memory_dumps()

        def ready(listening: Listening) -> None:
            shown = f"https://{host}:{listening.port}"
            err.print(f"[green]ready[/] {shown}  evidence: [bold yellow]SIMULATED[/]", highlight=False)
            report_ready(ready_fd, {"port": listening.port, "metrics_port": listening.metrics_port})

        with progress_bars() as progress:
            directory = resolve_model(model, progress=progress)
            loaded = load_model(directory, progress=progress)
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
        )
        listen = ServeOptions(host=host, port=port, metrics_port=metrics_port)
        with progress_bars() as progress:
            serve_runner(loaded, options, listen, progress=progress, on_ready=ready)
