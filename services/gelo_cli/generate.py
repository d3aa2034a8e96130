"""`gelo generate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gelo_cli.console import CliError, err, out, reported_errors
from gelo_cli.options import (
    AllowPlainOption,
    AllowSimulatedOption,
    MeasurementOption,
    ModelIdentityOption,
    PolicyOption,
)


def generate(
    url: Annotated[str, typer.Argument(help="https://host:port of the service.")],
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")
    ] = False,
    thinking: Annotated[
        bool | None,
        typer.Option(help="Let a model that can reason first do so, or not. Default: the template's own."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps every token.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    policy_file: PolicyOption = None,
    allow_simulated: AllowSimulatedOption = False,
    allow_plain: AllowPlainOption = False,
    model_identity: ModelIdentityOption = None,
    measurement: MeasurementOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer only.")] = False,
) -> None:
    """Verify a service, then stream its answer. No byte of the prompt is sent before it is verified."""
    from gelo_cli.policies import policy_from

    with reported_errors():
        body = request_body(prompt, system=system, raw=raw, thinking=thinking)
        body |= {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        if seed is not None:
            body["seed"] = seed
        if stop:
            body["stop"] = stop
        policy = policy_from(
            allow_simulated=allow_simulated, allow_plain=allow_plain,
            model_identity=model_identity, measurements=measurement, policy_file=policy_file,
        )  # fmt: skip
        timing = ask(url, policy, body, quiet=quiet)
    if not quiet:
        err.print(timing_line(timing), highlight=False)


def request_body(
    prompt: str, *, system: str | None = None, raw: bool = False, thinking: bool | None = None
) -> dict[str, Any]:
    """The prompt part of a request.

    Raises:
        CliError: a raw prompt has no template that could let the model think.
    """
    if raw:
        if thinking is not None:
            raise CliError("--thinking and --no-thinking need the chat template, which --raw leaves out.")
        return {"prompt": prompt}
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": prompt}]}
    if thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
    return body


def ask(url: str, policy: Any, body: dict[str, Any], *, quiet: bool) -> Any:
    """Verify, show the verdict, stream the answer over the same connection; returns the timing."""
    import httpx

    from attestation.client import RaTlsTransport
    from gelo_cli.client import Timing, stream
    from gelo_cli.policies import verdict_table

    timing = Timing()
    transport = RaTlsTransport(policy)
    try:
        with httpx.Client(base_url=url, transport=transport) as client:
            # Connects and verifies; nothing of the prompt is in this request.
            client.get("/health")
            verdict = transport.verdict
            if verdict is None:
                raise CliError("The connection was made without a verdict.")
            if not quiet:
                err.print(verdict_table(verdict))
                err.print()
            for piece in stream(client, body, timing):
                out.file.write(piece)
                out.file.flush()
        out.file.write("\n")
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise CliError(f"{url} is not an https:// address.") from error
    except httpx.HTTPError as error:
        raise CliError(
            f"{url} cannot be reached ({type(error).__name__}).", remedy="Is `gelo serve` running there?"
        ) from error
    return timing


def timing_line(timing: Any) -> str:
    """TTFT, TPOT and token counts on one line."""
    usage = timing.done["usage"]
    return (
        f"[dim]{usage['prompt_tokens']} + {usage['completion_tokens']} tokens · "
        f"TTFT {timing.ttft * 1e3:.0f} ms · TPOT {timing.tpot * 1e3:.1f} ms · "
        f"{timing.done['finish_reason']}[/]"
    )
