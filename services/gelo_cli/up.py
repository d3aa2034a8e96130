"""`gelo up`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gelo_cli.console import CliError, err, reported_errors
from gelo_cli.options import (
    EngineChoice,
    EngineOption,
    EvidenceChoice,
    LogOption,
    ModelOption,
    ProtectionChoice,
    ProtectionOption,
)
from gelo_cli.processes import Child, started


def up(
    model: ModelOption = "smollm2-135m-instruct",
    protection: ProtectionOption = ProtectionChoice.LPN,
    engine: EngineOption = EngineChoice.AUTO,
    port: Annotated[int, typer.Option(help="Port of the service.", min=0)] = 8443,
    metrics_port: Annotated[int, typer.Option(help="Prometheus port on loopback.", min=0)] = 9464,
    log_level: LogOption = "warning",
) -> None:
    """Run worker and runner on this machine, with simulated evidence, until Ctrl-C."""
    with reported_errors():
        worker_arguments = [
            "worker",
            "--listen",
            "127.0.0.1:0",
            "--engine",
            engine.value,
            "--log-level",
            log_level,
        ]
        with started(worker_arguments) as worker:
            arguments = serve_arguments(
                worker, model=model, protection=protection.value, port=port,
                metrics_port=metrics_port, log_level=log_level,
            )  # fmt: skip
            with started(arguments) as runner:
                address = f"https://127.0.0.1:{runner.ready['port']}"
                err.print(
                    f'try: gelo generate {address} "Why is the sky blue?" --allow-simulated', highlight=False
                )
                err.print("stop with Ctrl-C", highlight=False)
                _wait(worker, runner)


def serve_arguments(
    worker: Child, *, model: str, protection: str, port: int, metrics_port: int, log_level: str
) -> list[str]:
    """`gelo serve` with simulated evidence, against a worker this command started."""
    return [
        "serve", "--worker", f"127.0.0.1:{worker.ready['port']}", "--model", model,
        "--protection", protection, "--port", str(port), "--metrics-port", str(metrics_port),
        "--evidence", EvidenceChoice.SIMULATED.value, "--log-level", log_level,
    ]  # fmt: skip


def _wait(*children: Child) -> None:
    try:
        while True:
            for child in children:
                if child.process.poll() is not None:
                    raise CliError("A process ended by itself.", remedy="See its messages above.")
            time.sleep(0.5)
    except KeyboardInterrupt:
        err.print("stopping")
