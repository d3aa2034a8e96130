"""`gelo`: run, use and check a confidential inference service."""

from __future__ import annotations

import typer

from gelo_cli import (
    attack,
    demo,
    generate,
    measure,
    models,
    proxy,
    score,
    serve,
    up,
    verify,
    verify_report,
    worker,
)

app = typer.Typer(
    name="gelo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Confidential LLM inference. A trusted [bold]runner[/] keeps the prompt, activations and tokens; "
        "an untrusted [bold]worker[/] multiplies protected operands by public weights."
        '\n\nTry it: [bold]gelo demo "Why is the sky blue?"[/]'
    ),
)
app.add_typer(models.app, name="models")
app.add_typer(attack.app, name="attack")
app.command("worker")(worker.worker)
app.command("serve")(serve.serve)
app.command("up")(up.up)
app.command("generate")(generate.generate)
app.command("verify")(verify.verify)
app.command("verify-report")(verify_report.verify_report)
app.command("measure")(measure.measure)
app.command("proxy")(proxy.proxy)
app.command("score")(score.score)
app.command("demo")(demo.demo)
