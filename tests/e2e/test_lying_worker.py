"""A worker process that lies in the middle of an answer: no token made of a lie leaves the runner."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tee_runner.engine.runtime import Runtime
from tee_runner.errors import IntegrityError
from tee_runner.models import LoadedModel
from tee_runner.protection.lpn.ring import RingProtection
from tee_runner.worker.client import TransportName

from .conftest import chat
from .lying_worker import LIES
from .processes import start_python
from .running import Answer, Running, running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TOKENS = 10
SETTINGS: tuple[tuple[str, TransportName], ...] = (
    ("gelo-hd3", "slab"),
    ("gelo-haar", "grpc"),
    ("plain", "slab"),
    ("lpn", "slab"),
    ("plain-int8", "grpc"),
)


@dataclass(frozen=True)
class Case:
    """A runner, the control file of its worker, and what honest answers are."""

    served: Running
    control: Path
    prompts: list[list[int]]
    honest: list[Answer]


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def case(
    request: pytest.FixtureRequest, model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    protection, transport = request.param
    control = tmp_path_factory.mktemp("liar") / "control"
    prompts = [chat(model, "Name three rivers in Europe."), chat(model, "What is a prime number?")]
    worker = start_python(["-m", "tests.e2e.lying_worker", str(control), "127.0.0.1:0"])
    with ExitStack() as stack:
        stack.callback(worker.kill)
        served = stack.enter_context(running(model, worker.address, protection, transport=transport))
        honest = served.generate(prompts, TOKENS)
        assert [len(answer.tokens) for answer in honest] == [TOKENS, TOKENS]
        yield Case(served, control, prompts, honest)


def probes(runtime: Runtime) -> dict[int, tuple[NDArray[np.generic], ...]]:
    """The secrets that the open session checks results with, by weight."""
    protection = runtime._protection
    if isinstance(protection, RingProtection):
        return {weight: (p.v, p.w) for weight, p in protection.probes._probes.items()}
    assert protection is not None
    assert protection.integrity is not None
    return {weight: (p.v, p.z) for weight, p in protection.integrity._projections.items()}


@pytest.mark.parametrize("lie", LIES)
def test_no_token_made_of_a_lie_leaves(
    case: Case, lie: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    served, runtime = case.served, case.served.runtime
    if lie == "changed after the fact" and "grpc" in request.node.name:
        lie = "scaled result"  # no memory is shared
    offloads = len(runtime._linears)
    # In a step that decodes; a replayed answer needs one of the same shape before it.
    moment = random.Random(request.node.name).randrange(3 * offloads, (TOKENS - 2) * offloads)
    failures, secrets = runtime.integrity_failures, probes(runtime)
    case.control.write_text(f"{lie} {moment}")
    with caplog.at_level(logging.INFO):
        answers = served.generate(case.prompts, TOKENS)

    for answer, honest in zip(answers, case.honest, strict=True):
        finish = answer.finish
        assert finish is not None
        assert finish.reason == "error"
        assert isinstance(finish.error, IntegrityError)
        assert finish.error.code == "integrity_failed"
        assert finish.completion_tokens == len(answer.tokens)
        assert 0 < len(answer.tokens) < TOKENS
        assert answer.tokens == honest.tokens[: len(answer.tokens)]
    assert runtime.integrity_failures == failures + 1
    assert not runtime.connected
    # Of the secrets nothing is left.
    assert not any(array.any() for arrays in secrets.values() for array in arrays)
    (line,) = [r.getMessage() for r in caplog.records if "integrity check failed" in r.getMessage()]
    name = next(weight.name for weight in runtime._linears if f" {weight.name} " in line)
    assert line.replace(name, "") == (
        "integrity check failed: The worker's result for  is not the product it was asked for."
    )

    again = served.generate(case.prompts, TOKENS)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in case.honest]
    assert runtime.integrity_failures == failures + 1
    fresh = probes(runtime)
    assert fresh.keys() == secrets.keys()
    assert all(array.any() for arrays in fresh.values() for array in arrays)
