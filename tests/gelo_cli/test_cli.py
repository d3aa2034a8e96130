"""The commands, through real processes on the real model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gelo_cli.generate import request_body
from gelo_cli.processes import started
from gelo_cli.up import serve_arguments

PROMPT = "What is the capital of France?"
_TIMEOUT_S = 500


def gelo(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "gelo_cli", *arguments],
        capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False,
    )  # fmt: skip


@contextmanager
def service(model: Path, protection: str) -> Iterator[str]:
    with (
        started(["worker", "--listen", "127.0.0.1:0", "--engine", "cpu", "--log-level", "error"]) as worker,
        started(
            serve_arguments(
                worker, model=str(model), protection=protection, port=0, metrics_port=0, log_level="error"
            )
        ) as runner,
    ):
        yield f"https://127.0.0.1:{runner.ready['port']}"


@pytest.fixture(scope="module")
def url(smollm2_dir: Path) -> Iterator[str]:
    with service(smollm2_dir, "lpn") as address:
        yield address


@pytest.mark.parametrize(
    "command",
    [
        "", "worker", "serve", "up", "generate", "verify", "proxy", "score", "demo", "models", "models pull",
        "models import", "models list",
    ],
)  # fmt: skip
def test_every_command_has_help(command: str) -> None:
    result = gelo(*command.split(), "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_generate_streams_a_verified_answer(url: str) -> None:
    result = gelo("generate", url, PROMPT, "--allow-simulated", "--max-tokens", "16")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "SIMULATED" in result.stderr
    assert "lpn" in result.stderr
    assert "PROTECTION" not in result.stderr  # nothing to warn of
    assert "TTFT" in result.stderr


def test_thinking_is_a_template_input() -> None:
    assert "chat_template_kwargs" not in request_body("Hi")
    for thinking in (True, False):
        body = request_body("Hi", system="Be brief.", thinking=thinking)
        assert body["chat_template_kwargs"] == {"enable_thinking": thinking}
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
    refused = gelo("generate", "https://127.0.0.1:1", "Hi", "--raw", "--no-thinking")
    assert refused.returncode != 0
    assert "--raw" in refused.stderr


def test_plain_is_refused_unless_asked_for_and_a_seed_repeats_its_answer(smollm2_dir: Path) -> None:
    with service(smollm2_dir, "plain") as address:
        arguments = ["generate", address, "Tell me a story.", "--allow-simulated", "-q"]
        refused = gelo(*arguments)
        assert refused.returncode == 1
        assert "protection" in refused.stderr
        assert not refused.stdout.strip()
        # Without masks a forward pass is deterministic, so equal seeds give equal answers.
        arguments += ["--allow-plain", "--max-tokens", "12", "--temperature", "1.0", "--seed"]
        first, again, other = (gelo(*arguments, seed) for seed in ("11", "11", "12"))
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout != other.stdout


def test_simulated_evidence_is_refused_unless_asked_for(url: str) -> None:
    for command in (("generate", url, PROMPT), ("verify", url)):
        refused = gelo(*command)
        assert refused.returncode == 2
        assert "--allow-simulated" in refused.stderr
        pinned = gelo(*command, "--measurement", "00" * 48)
        assert pinned.returncode != 0
        assert "simulated" in pinned.stderr.lower()
        assert not pinned.stdout.strip()


def test_verify_reports_what_was_checked(url: str, smollm2_dir: Path) -> None:
    result = gelo("verify", url, "--allow-simulated", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["acceptable"] is True
    verdict = document["verdict"]
    assert verdict["simulated"] is True
    assert verdict["protection"] == "lpn"
    assert verdict["protection_parameters"]["security_bits"] >= 128
    assert verdict["fresh_evidence"] is True
    identity = verdict["model_identity"]
    assert gelo("verify", url, "--allow-simulated", "--model-identity", identity).returncode == 0
    wrong = gelo("verify", url, "--allow-simulated", "--model-identity", "00" * 32)
    assert wrong.returncode == 3
    assert "model" in wrong.stderr


def test_an_unreachable_service_is_named() -> None:
    result = gelo("verify", "https://127.0.0.1:9", "--allow-simulated")
    assert result.returncode == 7
    assert "cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr


def test_serve_without_a_worker_says_so(smollm2_dir: Path) -> None:
    result = gelo(
        "serve", "--worker", "127.0.0.1:9", "--model", str(smollm2_dir), "--port", "0", "--metrics-port", "0",
        "--evidence", "simulated",
    )  # fmt: skip
    assert result.returncode == 1
    assert "worker cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr


def test_score_equals_transformers_and_keeps_full_precision(smollm2_dir: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12 + "Then it sleeps.")
    documents = {}
    for scheme in ("plain", "gelo-hd3"):
        result = gelo(
            "score", "--model", str(smollm2_dir), "--text", str(text), "--protection", scheme, "--json"
        )
        assert result.returncode == 0, result.stderr
        documents[scheme] = json.loads(result.stdout)
    tokens = documents["plain"]["tokens"]
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
        log_probs = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]].numpy()
    for scheme, document in documents.items():
        assert document["tokens"] == tokens
        measured = np.array(document["log_probs"])
        assert len(measured) == len(tokens) - 1
        assert math.isclose(document["nll"], -measured.mean(), rel_tol=1e-12)
        # f16 operands: relative error 2^-11 per product, a few times that under a mask, through
        # 30 layers; log-probabilities are differences of logits of order 10.
        assert np.abs(measured - log_probs).max() < (0.05 if scheme == "plain" else 0.2)
        assert abs(document["nll"] + log_probs.mean()) < 0.01


def test_score_refuses_what_it_cannot_score(smollm2_dir: Path, tmp_path: Path) -> None:
    for content, words in ((b"a", "two tokens"), (b"\xff\xfe\xff", "UTF-8")):
        text = tmp_path / "text.txt"
        text.write_bytes(content)
        result = gelo("score", "--model", str(smollm2_dir), "--text", str(text))
        assert result.returncode == 1
        assert words in result.stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [((), "lpn"), (("--protection", "gelo-haar"), "PROTECTION gelo-haar ACCEPTED")],
    ids=["by default", "gelo-haar"],
)
def test_demo_runs_the_whole_path(smollm2_dir: Path, arguments: tuple[str, ...], shown: str) -> None:
    result = gelo("demo", PROMPT, "--engine", "cpu", "--max-tokens", "8", *arguments)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    for words in (shown, "TTFT", "TPOT", "MB of protected operands"):
        assert words in result.stderr


def test_models_list_shows_the_default_model(smollm2_dir: Path) -> None:
    result = gelo("models", "list")
    assert result.returncode == 0
    assert "smollm2-135m-instruct" in result.stdout
    assert "ready" in result.stdout


def test_import_refuses_an_existing_target(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    target = tmp_path / "out"
    assert gelo("models", "import", str(file), "--output", str(target)).returncode == 1
    assert not target.exists()
    target.mkdir()
    result = gelo("models", "import", str(file), "--output", str(target))
    assert result.returncode == 1
    assert "exists already" in result.stderr
