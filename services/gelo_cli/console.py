"""Terminal output shared by the commands: errors, progress bars, logging."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from attestation.errors import AttestationError
from tee_runner.models.progress import Progress as StageProgress

out = Console()
err = Console(stderr=True)


class CliError(Exception):
    """A problem to show to the person at the terminal, with the exit code to leave with."""

    def __init__(self, message: str, *, remedy: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code


def set_up_logging(level: str) -> None:
    """Plain lines on stderr. What the services log never contains prompts, tokens or keys."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpcore", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Show typed errors as two lines, what happened and what to do, instead of a traceback."""
    from tee_runner.errors import GeloError

    try:
        yield
    except (CliError, GeloError, AttestationError) as error:
        err.print(f"[bold red]error:[/] {_escape(error.message)}", highlight=False)
        if error.remedy:
            err.print(f"       {_escape(error.remedy)}", highlight=False)
        raise typer.Exit(error.code if isinstance(error, CliError) else 1) from None
    except OSError as error:
        err.print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def bars() -> Progress:
    """Progress bars on stderr; gone at the end unless someone watches them."""
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=not err.is_terminal,
    )


@contextlib.contextmanager
def progress_bars() -> Iterator[StageProgress]:
    """Bars on stderr, one per stage; ``progress(stage, done, total)`` moves them."""
    with bars() as shown:
        tasks: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=max(total, 1))
            shown.update(tasks[stage], completed=done, total=max(total, 1))

        yield progress
