"""`gelo attack`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TaskID
from rich.table import Table

from gelo_cli.console import CliError, bars, err, out, progress_bars, reported_errors, set_up_logging
from gelo_cli.options import ModelOption

if TYPE_CHECKING:
    from evals.attacks.report import Report

app = typer.Typer(
    no_args_is_help=True, help="Measure what the worker learns: run the attacks, show their results."
)

_DIRECTORY = "attack-results"


@app.command()
def run(
    conditions: Annotated[
        str, typer.Option(help="Protections under attack, by name, with commas; all of `gelo attack list`.")
    ] = "all",
    attacks: Annotated[str, typer.Option(help="Attacks by name, with commas.")] = "all",
    prompts: Annotated[
        int, typer.Option(help="Short prompts. The published runs have 64 and 512.", min=1)
    ] = 64,
    model: ModelOption = "smollm2-135m-instruct",
    directory: Annotated[
        Path,
        typer.Option("--out", help="Results and report. A run goes on where one ended.", file_okay=False),
    ] = Path(_DIRECTORY),
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal numbers.")] = 0,
    redo: Annotated[bool, typer.Option("--redo", help="Run what has a result already, too.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Processes that share the work, about 3 GB each. Results do not depend on it. "
            "Default: one for each core.",
        ),
    ] = None,
) -> None:
    """Capture from a worker's side of the wire under each protection, and attack what it saw.

    Every process starts a worker of its own. Writes results.json, report.html and summary.md.
    """
    set_up_logging("warning")
    # Ends like Ctrl-C does: the worker is stopped, its recordings are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _errors():
        from evals.attacks.conditions import CONDITIONS
        from evals.attacks.drivers import ATTACKS
        from evals.attacks.publish import publish
        from evals.attacks.report import make_report
        from evals.attacks.run import Options, default_jobs
        from evals.attacks.run import run as run_attacks
        from tee_runner.models import load_model, resolve_model

        options = Options(
            conditions=_names(conditions, CONDITIONS),
            attacks=_names(attacks, ATTACKS),
            prompts=prompts,
            seed=seed,
            out=directory,
            redo=redo,
            jobs=jobs or default_jobs(),
        )
        with progress_bars() as stages:
            loaded = load_model(resolve_model(model, progress=stages), progress=stages)
        with _run_bars() as progress:
            results = run_attacks(loaded, options, progress)
        report = make_report(results, ATTACKS)
        html, _ = publish(report, directory)
    _show(report)
    err.print(f"[green]report[/] {html}", highlight=False)
    failed = [key for key, result in results.results.items() if result.outcome is None]
    if failed:
        err.print(f"[bold red]{len(failed)} attacks raised an error[/]; run again to retry them.")
        raise typer.Exit(1)


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="Where `gelo attack run` wrote.", file_okay=False)] = Path(
        _DIRECTORY
    ),
) -> None:
    """Verdicts and the matrix of a run."""
    with _errors():
        from evals.attacks.drivers import ATTACKS
        from evals.attacks.report import make_report
        from evals.attacks.results import load

        report = make_report(load(directory), ATTACKS)
    _show(report)


@app.command("list")
def list_() -> None:
    """Conditions and attacks."""
    with _errors():
        from evals.attacks.conditions import CONDITIONS
        from evals.attacks.drivers import ATTACKS
        from evals.attacks.run import condition_corpora

    table = _table("condition", "what", "corpora")
    for condition in CONDITIONS.values():
        table.add_row(condition.name, condition.title, ", ".join(condition_corpora(condition)))
    out.print(table)
    out.print()
    table = _table("attack", "what", "corpora")
    for attack in ATTACKS.values():
        table.add_row(attack.name, attack.title, ", ".join(attack.corpora))
    out.print(table)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Typed errors of the harness, shown like all others."""
    with reported_errors():
        try:
            import evals.attacks.drivers  # noqa: F401 - what they need is found missing here
            from evals.attacks.pool import JobError
            from evals.attacks.results import ResultsError
        except ModuleNotFoundError as error:
            raise CliError(
                f"The attacks need the package {str(error.name).partition('.')[0]}.",
                remedy="Install the development packages: pip install 'gelo-llm[dev]'.",
            ) from error
        try:
            yield
        except (JobError, ResultsError) as error:
            raise CliError(error.message, remedy=error.remedy) from error


def _names(text: str, known: Mapping[str, object]) -> list[str]:
    return list(known) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]


@contextlib.contextmanager
def _run_bars() -> Iterator[Callable[[int, int, Mapping[int, tuple[str, float]]], None]]:
    """One bar for the run, one for what each process is at."""
    with bars() as shown:
        whole = shown.add_task("attacks", total=1.0)
        single: dict[int, TaskID] = {}

        def progress(done: int, total: int, running: Mapping[int, tuple[str, float]]) -> None:
            fractions = sum(fraction for _, fraction in running.values())
            shown.update(whole, total=float(total), completed=min(done + fractions, float(total)))
            for job in sorted(running.keys() | single.keys()):
                if job not in single:
                    single[job] = shown.add_task("", total=1.0)
                current, fraction = running.get(job, ("", 1.0))
                shown.update(single[job], description=current, completed=fraction, visible=job in running)

        yield progress


def _show(report: Report) -> None:
    from evals.attacks.report import cell

    for line in report.headlines():
        out.print(line, markup=False, highlight=False)
    out.print()
    names = list(report.results.conditions)
    table = _table("attack", "corpus", *names)
    for attack, corpus in report.rows():
        cells = (cell(report.results.results.get((name, attack.name, corpus))) for name in names)
        table.add_row(attack.name, corpus, *cells)
    out.print(table)
    out.print(f"value (chance). Gates: {report.counted()}.", markup=False, highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
