"""`gelo attack` on the real model, a few prompts, through a real worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evals.attacks.conditions import CONDITIONS
from evals.attacks.drivers import ATTACKS
from tee_runner.protection.schemes import SCHEMES

_TIMEOUT_S = 500
_RUN = ("--attacks", "row-space,metadata", "--prompts", "3", "--seed", "5")


def gelo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "gelo_cli", "attack", *arguments],
        capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False,
    )  # fmt: skip


def stored(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return document


def values(directory: Path, corpus: str) -> dict[tuple[str, str], float]:
    return {
        (r["condition"], r["attack"]): r["outcome"]["value"]
        for r in stored(directory)["results"]
        if r["corpus"] == corpus
    }


@pytest.fixture(scope="module")
def finished(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("attack")
    result = gelo(
        "run",
        "--model",
        str(smollm2_dir),
        "--conditions",
        "c6",
        *_RUN,
        "--jobs",
        "2",
        "--out",
        str(directory),
    )
    assert result.returncode == 0, result.stderr
    return directory


@pytest.mark.model
def test_run_writes_results_a_page_and_a_summary(finished: Path) -> None:
    document = stored(finished)
    assert document["settings"]["seed"] == 5
    assert document["settings"]["prompts"] == 3
    assert len(document["settings"]["model_identity"]) == 64
    assert {"python", "numpy", "gelo-llm"} <= set(document["settings"]["versions"])
    corpora = {(r["attack"], r["corpus"]) for r in document["results"]}
    assert ("row-space", "short") in corpora
    assert ("metadata", "game") in corpora
    assert all(r["error"] == "" and r["seconds"] >= 0 for r in document["results"])
    assert all(g["status"] != "pass" for g in document["gates"] if g["attack"] == "nn")
    assert (finished / "report.html").read_text().startswith("<!doctype html>")
    assert "row" in (finished / "summary.md").read_text()


@pytest.mark.model
def test_a_run_goes_on_and_repeats_its_numbers(finished: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    before = stored(finished)["results"]
    again = gelo("run", "--model", str(smollm2_dir), "--conditions", "c6", *_RUN, "--out", str(finished))
    assert again.returncode == 0, again.stderr
    # Nothing was missing: nothing ran.
    assert stored(finished)["results"] == before
    chosen = ("--model", str(smollm2_dir), "--conditions", "c6", *_RUN)
    fresh = gelo("run", *chosen, "--jobs", "1", "--out", str(tmp_path))
    assert fresh.returncode == 0, fresh.stderr
    # One process or two: the same numbers, in the same order.
    assert list(values(tmp_path, "short")) == list(values(finished, "short"))
    for corpus in ("short", "decode"):
        assert values(tmp_path, corpus) == values(finished, corpus)


@pytest.mark.model
def test_results_of_other_settings_are_not_mixed(finished: Path, smollm2_dir: Path) -> None:
    refused = gelo(
        "run", "--model", str(smollm2_dir), "--conditions", "c6", "--attacks", "metadata", "--prompts", "3",
        "--seed", "6", "--out", str(finished),
    )  # fmt: skip
    assert refused.returncode == 1
    assert "another seed" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.model
def test_show_prints_verdicts_and_the_matrix(finished: Path) -> None:
    result = gelo("show", str(finished))
    assert result.returncode == 0, result.stderr
    first, second, *_ = result.stdout.splitlines()
    assert first.startswith("Controls")
    assert "NOT RUN" in second
    assert "row-space" in result.stdout
    assert "c6" in result.stdout


def test_show_of_nothing_and_unknown_names_are_explained(tmp_path: Path) -> None:
    result = gelo("show", str(tmp_path))
    assert result.returncode == 1
    assert "gelo attack run" in result.stderr


@pytest.mark.model
def test_unknown_names_are_refused(smollm2_dir: Path, tmp_path: Path) -> None:
    for option, known in (("--conditions", "c0"), ("--attacks", "row-space")):
        result = gelo("run", "--model", str(smollm2_dir), option, "nonsense", "--out", str(tmp_path))
        assert result.returncode == 1
        assert "nonsense" in result.stderr
        assert known in result.stderr
    assert not list(tmp_path.iterdir())


def test_list_has_every_condition_and_attack() -> None:
    result = gelo("list")
    assert result.returncode == 0, result.stderr
    for name in (*CONDITIONS, *ATTACKS):
        assert name in result.stdout


@pytest.mark.parametrize("command", ["", "run", "show", "list"])
def test_every_command_has_help(command: str) -> None:
    result = gelo(*command.split(), "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_masks_warn_in_one_line_and_point_to_the_measurements() -> None:
    for name, scheme in SCHEMES.items():
        if name.startswith("gelo-"):
            assert "docs/attacks.md" in scheme.warning
            assert "\n" not in scheme.warning


def test_missing_packages_are_named() -> None:
    blocked = (
        "import sys; sys.modules['scipy'] = None; from gelo_cli.main import app; app(['attack', 'list'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    assert result.returncode == 1
    assert "need the package scipy" in result.stderr
    assert "Traceback" not in result.stderr
