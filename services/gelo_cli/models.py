"""`gelo models`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from gelo_cli.console import CliError, err, out, progress_bars, reported_errors

app = typer.Typer(
    no_args_is_help=True, help="Get models: pull a known one, import a GGUF file, list what is here."
)


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="A known model, or a hub id such as org/name.")
    ] = "smollm2-135m-instruct",
    revision: Annotated[str | None, typer.Option(help="Hub revision to pin.")] = None,
) -> None:
    """Fetch a model into the cache."""
    with reported_errors():
        from tee_runner.models import KNOWN_MODELS, resolve_model

        if (known := KNOWN_MODELS.get(name)) is not None and known.license:
            err.print(f"{name}: license {known.license}", highlight=False)
        with progress_bars() as progress:
            directory = resolve_model(name, revision=revision, progress=progress)
    err.print(f"[green]ready[/] {directory}", highlight=False)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A GGUF file.", exists=True, dir_okay=False)],
    name: Annotated[str | None, typer.Option(help="Name in the cache. Default: the file's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write here instead of the cache.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
) -> None:
    """Convert a GGUF file (llama, qwen3, gemma3) into a directory in Hugging Face layout."""
    with reported_errors():
        from tee_runner.models import import_gguf
        from tee_runner.models.registry import cache_directory

        destination = output or cache_directory() / (name or file.stem.lower())
        stored = _dtype(dtype)
        if destination.exists():
            raise CliError(f"{destination} exists already.", remedy="Choose another --name or --output.")
        with progress_bars() as progress:
            directory = import_gguf(file, destination, dtype=stored, progress=progress)
    err.print(f"[green]imported[/] {directory}", highlight=False)


def _dtype(name: str) -> Literal["float16", "float32"]:
    if name == "float16":
        return "float16"
    if name == "float32":
        return "float32"
    raise CliError(f"There is no dtype {name!r}.", remedy="Choose float16 or float32.")


@app.command("list")
def list_(
    identities: Annotated[bool, typer.Option(help="Hash cached models to show their identity.")] = False,
) -> None:
    """Known and cached models, and what serving each takes of the runner's memory.

    Memory is for the default settings of `gelo serve`; the KV cache is part of it.
    """
    with reported_errors():
        from tee_runner.engine.capacity import gigabytes, memory_plan
        from tee_runner.engine.runtime import RuntimeOptions
        from tee_runner.models import list_models

        listings = list_models(identities=identities)
        options = RuntimeOptions(worker="")
        plans = [memory_plan(entry.config, options) for entry in listings]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("name", "family", "params", "size", "memory", "KV cache", "state"):
        table.add_column(column, no_wrap=True)
    if identities:
        table.add_column("identity", overflow="fold")
    for entry, plan in zip(listings, plans, strict=True):
        size = entry.parameters * 2 if entry.size_bytes is None else entry.size_bytes
        row = [
            entry.name,
            entry.family,
            f"{entry.parameters / 1e6:.0f} M",
            gigabytes(size),
            gigabytes(plan.total),
            gigabytes(plan.parts["KV cache"]),
            entry.availability,
        ]
        if identities:
            row.append("" if entry.identity is None else entry.identity.hex())
        table.add_row(*row)
    out.print(table)
