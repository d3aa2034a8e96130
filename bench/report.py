"""What the benchmarks share: the machine's description, the table, the JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> str:
    """Processor and core count."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def show(title: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print ``rows`` as a table; numbers are right-aligned and get sensible digits."""
    table = Table(title=f"{title} ({machine()})", title_justify="left")
    for column in columns:
        number = any(isinstance(row.get(column), int | float) for row in rows)
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(width=150).print(table)


def write(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write the figures and the machine as JSON."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "rows": list(rows)}, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)
