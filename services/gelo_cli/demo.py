"""`gelo demo`."""

from __future__ import annotations

import urllib.request
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families

from gelo_cli.console import err, reported_errors
from gelo_cli.options import EngineChoice, EngineOption, ModelOption, ProtectionChoice, ProtectionOption
from gelo_cli.processes import started
from gelo_cli.up import serve_arguments


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: ModelOption = "smollm2-135m-instruct",
    protection: ProtectionOption = ProtectionChoice.LPN,
    engine: EngineOption = EngineChoice.AUTO,
    max_tokens: Annotated[int, typer.Option(min=1)] = 200,
) -> None:
    """The whole path once: start both processes, verify, stream an answer, show the figures, stop."""
    from attestation import UNPINNED, UnsafeAllowSimulated
    from attestation.policy import DEFAULT_PROTECTION
    from gelo_cli.generate import ask, request_body, timing_line

    with reported_errors():
        worker_arguments = [
            "worker",
            "--listen",
            "127.0.0.1:0",
            "--engine",
            engine.value,
            "--log-level",
            "error",
        ]
        with started(worker_arguments) as worker:
            arguments = serve_arguments(
                worker, model=model, protection=protection.value, port=0, metrics_port=0, log_level="error"
            )
            with started(arguments) as runner:
                policy = UnsafeAllowSimulated.only(
                    model_identity=UNPINNED,
                    service=UNPINNED,
                    allowed_protection=DEFAULT_PROTECTION | {protection.value},
                )
                body = {**request_body(prompt), "max_tokens": max_tokens}
                timing = ask(f"https://127.0.0.1:{runner.ready['port']}", policy, body, quiet=False)
                err.print()
                err.print(timing_line(timing), highlight=False)
                err.print(_traffic(runner.ready["metrics_port"]), highlight=False)


def _traffic(port: int) -> str:
    """Bytes that crossed to the worker and back, from the runner's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    sent, received = values["gelo_bytes_sent_total"], values["gelo_bytes_received_total"]
    return (
        f"[dim]{values['gelo_offloads_total']:.0f} products offloaded · "
        f"{sent / 1e6:.1f} MB of protected operands to the worker · "
        f"{received / 1e6:.1f} MB of results back[/]"
    )
