"""What the service says of its protection: to its operator, and to the client's policy."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from attestation.errors import PolicyRefusedError
from attestation.policy import MASKS, UNPROTECTED, UnsafeAllowSimulated, validate
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement
from attestation.verify import verify_evidence
from tee_runner.api.serve import report_protection
from tee_runner.protection.base import SchemeOptions
from tee_runner.protection.lpn.options import LpnOptions
from tee_runner.protection.schemes import SCHEMES

DATA = bytes(64)
WIDTHS = {64, 128}
WEAK = SchemeOptions(lpn=LpnOptions(min_bits=60.0))


def warnings_under_the_default_policy(name: str, options: SchemeOptions) -> tuple[str, ...]:
    statement = Statement(
        model_identity=bytes(32),
        protection=name,
        protection_parameters=SCHEMES[name].parameters_for(WIDTHS, options),
        service="gelo",
        software_version="0",
    )
    policy = UnsafeAllowSimulated.only(model_identity=bytes(32), service="gelo")
    genuine = verify_evidence(SimulatedPsp().evidence(DATA), roots=policy.roots, at=datetime.now(UTC))
    return validate(genuine, statement, policy=policy, expected_report_data=DATA)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_default_policy_knows_every_scheme(name: str) -> None:
    """lpn in silence, masks with a warning, the unprotected not at all."""
    if name in UNPROTECTED:
        with pytest.raises(PolicyRefusedError, match="protection"):
            warnings_under_the_default_policy(name, SchemeOptions())
    else:
        warned = any(name in text for text in warnings_under_the_default_policy(name, SchemeOptions()))
        assert warned == (name in MASKS)
        assert warned != (name == "lpn")


def test_a_weak_lpn_is_refused_by_the_default_policy() -> None:
    with pytest.raises(PolicyRefusedError, match="security_bits: expected at least 128, got 6"):
        warnings_under_the_default_policy("lpn", WEAK)


def reported(caplog: pytest.LogCaptureFixture, name: str, options: SchemeOptions) -> tuple[str, list[str]]:
    caplog.set_level(logging.INFO)
    caplog.clear()
    report_protection(SCHEMES[name], SCHEMES[name].parameters_for(WIDTHS, options))
    texts = [(record.levelno, record.getMessage()) for record in caplog.records]
    (info,) = [text for level, text in texts if level == logging.INFO]
    return info, [text for level, text in texts if level == logging.WARNING]


def test_the_operator_is_told_the_level(caplog: pytest.LogCaptureFixture) -> None:
    assert reported(caplog, "lpn", SchemeOptions()) == (
        "protection: lpn, 134.0 bits against known attacks",
        [],
    )
    info, (warning,) = reported(caplog, "lpn", WEAK)
    assert "lpn, 6" in info
    assert "clients refuse less than 128" in warning
    for name in MASKS | UNPROTECTED:
        info, warnings = reported(caplog, name, SchemeOptions())
        assert info == f"protection: {name}"
        assert len(warnings) == 1
