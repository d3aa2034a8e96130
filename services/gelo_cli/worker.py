"""`gelo worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from gelo_cli.console import CliError, reported_errors, set_up_logging
from gelo_cli.options import EngineChoice, EngineOption, LogOption, ReadyOption
from gelo_cli.processes import report_ready


def worker(
    listen: Annotated[
        str, typer.Option(help="host:port to serve gRPC on; port 0 takes a free one.")
    ] = "127.0.0.1:7070",
    engine: EngineOption = EngineChoice.AUTO,
    threads: Annotated[
        int | None, typer.Option(help="CPU engine: threads. Default: all cores.", min=1)
    ] = None,
    weight_memory_gib: Annotated[
        float, typer.Option("--weight-memory", help="Most GiB of weights to hold.", min=0.1)
    ] = 64.0,
    doorbell: Annotated[bool, typer.Option(help="Offer shared memory to runners on this host.")] = True,
    log_level: LogOption = "info",
    ready_fd: ReadyOption = None,
) -> None:
    """Run the untrusted GPU worker: it sees protected operands only, and needs no secret to run."""
    set_up_logging(log_level)
    from gpu_worker.engines import EngineError, create_engine
    from gpu_worker.server import WorkerSettings
    from gpu_worker.server import serve as serve_worker

    settings = WorkerSettings(
        address=listen, weight_memory=int(weight_memory_gib * (1 << 30)), doorbell=doorbell
    )
    with reported_errors():
        try:
            chosen = create_engine(engine.value, threads=threads)
        except EngineError as error:
            raise CliError(f"The {engine.value} engine cannot run here: {error}") from error
        serve_worker(chosen, settings, on_ready=lambda port: report_ready(ready_fd, {"port": port}))
