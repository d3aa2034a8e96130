"""`gelo proxy`."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gelo_cli.console import CliError, err, reported_errors, set_up_logging
from gelo_cli.options import (
    AllowPlainOption,
    AllowSimulatedOption,
    LogOption,
    MeasurementOption,
    ModelIdentityOption,
    PolicyOption,
    ReadyOption,
)
from gelo_cli.processes import report_ready

if TYPE_CHECKING:
    from attestation import Verdict
    from attestation.document import Document
    from attestation.proxy import LocalProxy

log = logging.getLogger(__name__)


def proxy(
    url: Annotated[str, typer.Argument(help="https://host:port of the service.")],
    port: Annotated[int, typer.Option(help="Local port; 0 takes a free one.", min=0, max=65535)] = 8080,
    host: Annotated[str, typer.Option(help="Local address; only loopback is accepted.")] = "127.0.0.1",
    policy_file: PolicyOption = None,
    allow_simulated: AllowSimulatedOption = False,
    allow_plain: AllowPlainOption = False,
    model_identity: ModelIdentityOption = None,
    measurement: MeasurementOption = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web origin whose pages may use the proxy, as https://app.example; repeatable."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the newest verification document to this file.")
    ] = None,
    log_level: LogOption = "warning",
    ready_fd: ReadyOption = None,
) -> None:
    """Open a local plain-HTTP port that leads to a verified service, for any HTTP client.

    The service is verified before the port opens, and again on each new connection before a byte of a
    request is sent. Requests and responses are streamed, on any path. Exit codes are those of
    `gelo verify`.

    Responses name the verification document of their connection in x-gelo-verification; it is at
    /.well-known/gelo-verification/<that value>. Web pages are kept out unless --allow-origin names them.
    """
    from gelo_cli.policies import client_policy_from, verdict_table
    from gelo_cli.verify import exit_code, judge, show_refusal

    set_up_logging(log_level)
    with reported_errors():
        address = _loopback(host)
        expected = client_policy_from(
            allow_simulated=allow_simulated, allow_plain=allow_plain, model_identity=model_identity,
            measurements=measurement, policy_file=policy_file,
        )  # fmt: skip
        first, verdict, error = judge(url, expected.policy, expected.source, timeout=10.0)
        keeper = _Keeper(save)
        keeper.save(first)
        if verdict is None or error is not None:
            if error is not None:
                show_refusal(error)
            raise typer.Exit(1 if error is None else exit_code(error))
        keeper.key = verdict.key_sha256
        err.print(verdict_table(verdict))
        for warning in verdict.warnings:
            err.print(Text(warning, "bold yellow"))

        from attestation.proxy import LocalProxy

        with _listen(address, port) as listener:
            chosen = listener.getsockname()[1]
            app = LocalProxy(
                url, expected.policy, hosts=_hosts(chosen), origins=allow_origin or (),
                source=expected.source, on_document=keeper,
            )  # fmt: skip
            shown = f"[{address}]" if address.version == 6 else str(address)

            def ready() -> None:
                err.print(Text.assemble(("ready ", "green"), f"http://{shown}:{chosen} -> {url}"))
                report_ready(ready_fd, {"port": chosen})

            _serve(app, listener, ready)


class _Keeper:
    """Saves documents, and says when the service changed its key."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.key = path, ""

    def __call__(self, document: Document, verdict: Verdict) -> None:
        if verdict.key_sha256 != self.key:
            log.warning("The service has a new TLS key, %s; it was verified.", verdict.key_sha256)
            self.key = verdict.key_sha256
        try:
            self.save(document)
        except OSError as error:
            log.error("The verification document cannot be saved (%s).", error.strerror)

    def save(self, document: Document) -> None:
        if self.path is not None:
            from attestation.document import save

            save(self.path, document)


def _loopback(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address to listen on.

    Raises:
        CliError: it is not on loopback: prompts would cross a network in clear.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise CliError(
            "The proxy speaks plain HTTP and listens on loopback only.",
            remedy="Use 127.0.0.1 or ::1. On another machine, run `gelo proxy` there.",
            code=2,
        )
    return address


def _hosts(port: int) -> list[str]:
    names = ("127.0.0.1", "localhost", "[::1]")
    return [f"{name}:{port}" for name in names] + (list(names) if port == 80 else [])


def _listen(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> socket.socket:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return socket.create_server((str(address), port), family=family)


def _serve(app: LocalProxy, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            await app.aclose()

    Server(
        uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, date_header=False, proxy_headers=False, timeout_graceful_shutdown=3,
        )
    ).run(sockets=[listener])  # fmt: skip
