"""`gelo proxy` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gelo_cli.main import app
from gelo_cli.processes import started


def test_any_http_client_reaches_the_verified_service(service: Any, tmp_path: Path) -> None:
    saved = tmp_path / "verification.json"
    arguments = ["proxy", service.url, "--allow-simulated", "--port", "0", "--save", str(saved)]
    with started([*arguments, "--log-level", "error"]) as child:
        url = f"http://localhost:{child.ready['port']}"
        assert json.loads(saved.read_bytes())["acceptable"] is True
        response = httpx.get(f"{url}/v1/models")
        assert response.text == "/v1/models"
        assert "SIMULATED" in response.headers["x-gelo-warning"]
        digest = response.headers["x-gelo-verification"]
        found = httpx.get(f"{url}/.well-known/gelo-verification/{digest}")
        assert found.content == saved.read_bytes()
        assert httpx.get(url, headers={"origin": "https://evil.example"}).status_code == 403
    assert child.process.returncode in (0, -signal.SIGTERM)


def test_a_service_that_is_refused_opens_no_port(service: Any, tmp_path: Path) -> None:
    saved = tmp_path / "refusal.json"
    result = subprocess.run(
        [sys.executable, "-m", "gelo_cli", "proxy", service.url, "--port", "0", "--allow-simulated",
         "--model-identity", "00" * 32, "--save", str(saved)],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert result.returncode == 3
    assert "model_identity" in result.stderr
    assert "ready" not in result.stderr
    assert json.loads(saved.read_bytes())["error"]["code"] == "policy-refused"


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.168.1.1", "::ffff:127.0.0.1", "example.com", "", "127.0.0.1.example"],  # noqa: S104
)
def test_only_loopback_addresses_are_listened_on(service: Any, host: str) -> None:
    before = len(service.paths)
    result = CliRunner().invoke(
        app, ["proxy", service.url, "--allow-simulated", "--port", "0", "--host", host]
    )
    assert result.exit_code == 2
    assert "loopback only" in result.stderr
    assert len(service.paths) == before
