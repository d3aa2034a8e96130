"""Writes a run's report beside its results."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from evals.attacks.html import page
from evals.attacks.markdown import summary
from evals.attacks.report import Report

HTML_NAME: Final = "report.html"
MARKDOWN_NAME: Final = "summary.md"


def publish(report: Report, directory: Path) -> tuple[Path, Path]:
    """Write the page and the Markdown summary; returns where they are."""
    directory.mkdir(parents=True, exist_ok=True)
    html, markdown = directory / HTML_NAME, directory / MARKDOWN_NAME
    html.write_text(page(report), encoding="utf-8")
    markdown.write_text(summary(report), encoding="utf-8")
    return html, markdown
