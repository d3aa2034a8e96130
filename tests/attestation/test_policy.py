"""Acceptable or not: every expectation, alone and all together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from attestation.certificates import AMD_ROOTS, TrustRoots
from attestation.errors import (
    ChannelBindingError,
    Fault,
    InvalidPolicyError,
    PolicyRefusedError,
    SimulatedEvidenceRefusedError,
)
from attestation.evidence import Evidence
from attestation.policy import (
    MASKS,
    MASKS_WARNING,
    MILAN_REASON,
    SIMULATED_MEASUREMENT,
    SIMULATED_WARNING,
    UNPINNED,
    UNPROTECTED_WARNING,
    Policy,
    UnsafeAllowSimulated,
    standard_platform,
    validate,
    validate_report,
)
from attestation.report import Product
from attestation.rules import StrictRules
from attestation.simulated import SimulatedPsp
from attestation.statement import Statement
from attestation.verify import GenuineReport, verify_evidence

MODEL = bytes(range(32))
DATA = bytes(range(64))
SIMULATED = replace(AMD_ROOTS, unsafe_allow_simulated=True)
WITHOUT_REVOCATION = replace(standard_platform(), revocation_required=False)
MakeStatement = Callable[..., Statement]


def genuine_report(psp: SimulatedPsp, **changes: Any) -> GenuineReport:
    """What a simulated guest with the given changes shows."""
    return verify_evidence(psp.altered(**changes).evidence(DATA), roots=SIMULATED, at=datetime.now(UTC))


def make_policy(**changes: Any) -> Policy:
    values: dict[str, Any] = {
        "measurements": frozenset({bytes(48)}),
        "products": frozenset({Product.GENOA}),
        "model_identity": MODEL,
        "service": "gelo",
    }
    return Policy(**{**values, **changes})


def refused_fields(
    genuine: GenuineReport, statement: Statement, policy: Policy | UnsafeAllowSimulated
) -> list[str]:
    with pytest.raises(PolicyRefusedError) as caught:
        validate(genuine, statement, policy=policy, expected_report_data=DATA)
    for mismatch in caught.value.mismatches:
        assert mismatch.expected != mismatch.got
        assert mismatch.remedy
        assert mismatch.field in str(caught.value)
    return [mismatch.field for mismatch in caught.value.mismatches]


def test_simulated_evidence_passes_with_a_loud_warning(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    warnings = validate(genuine_report(psp), statement(), policy=policy, expected_report_data=DATA)
    assert warnings == (SIMULATED_WARNING,)


def test_simulated_evidence_is_refused_by_a_plain_policy(psp: SimulatedPsp, statement: MakeStatement) -> None:
    policy = make_policy(measurements=frozenset({SIMULATED_MEASUREMENT}))
    with pytest.raises(SimulatedEvidenceRefusedError):
        validate(genuine_report(psp), statement(), policy=policy, expected_report_data=DATA)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": 0x30000 | 1 << 19}, "policy.debug"),
        ({"policy": 0x30000 | 1 << 18}, "policy.migrate_ma"),
        ({"policy": 0x10000}, "policy.reserved"),
        ({"policy": 0x30000 | 1 << 26}, "policy.reserved"),
        ({"policy": 0x30000 | 1 << 63}, "policy.reserved"),
        ({"vmpl": 1}, "vmpl"),
        ({"vmpl": 0xFFFFFFFF}, "vmpl"),
        ({"version": 4}, "version"),
        ({"key_info": 2}, "mask_chip_key"),
        ({"platform_info": 0x05}, "platform_info.alias_check_complete"),
        ({"policy": 0x30000 | 1 << 21}, "policy.cxl_allow"),
        ({"host_data": b"\x01" * 32}, "host_data"),
        ({"measurement": bytes(48)}, "measurement"),
    ],
)
def test_each_report_mismatch_is_refused(
    psp: SimulatedPsp,
    statement: MakeStatement,
    policy: UnsafeAllowSimulated,
    changes: dict[str, Any],
    field: str,
) -> None:
    assert refused_fields(genuine_report(psp, **changes), statement(), policy) == [field]


@pytest.mark.parametrize("version", [3, 5])
def test_current_report_versions_pass(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated, version: int
) -> None:
    genuine = genuine_report(psp, version=version)
    assert validate(genuine, statement(), policy=policy, expected_report_data=DATA)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_identity": bytes(32)}, "model_identity"),
        ({"service": "other"}, "service"),
        ({"protection": "plain"}, "protection"),
        ({"protection": "plain-int8"}, "protection"),
        ({"protection": "GELO-HD3"}, "protection"),
        ({"protection_parameters": {}}, "security_bits"),
        ({"protection_parameters": {"security_bits": 127.99}}, "security_bits"),
        ({"protection_parameters": {"security_bits": True}}, "security_bits"),
        ({"protection_parameters": {"security_bits": "256"}}, "security_bits"),
    ],
)
def test_each_statement_mismatch_is_refused(
    psp: SimulatedPsp,
    statement: MakeStatement,
    policy: UnsafeAllowSimulated,
    changes: dict[str, Any],
    field: str,
) -> None:
    assert refused_fields(genuine_report(psp), statement(**changes), policy) == [field]


@pytest.mark.parametrize("scheme", ["gelo-haar", "gelo-hd3", "gelo-dct4", "gelo-auto", "lpn"])
def test_protecting_schemes_pass_by_default(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated, scheme: str
) -> None:
    made = statement(protection=scheme)
    warnings = validate(genuine_report(psp), made, policy=policy, expected_report_data=DATA)
    masks = (f"PROTECTION {scheme} ACCEPTED: it {MASKS_WARNING}",) if scheme in MASKS else ()
    assert warnings == (SIMULATED_WARNING, *masks)
    assert bool(masks) == (scheme != "lpn")


@pytest.mark.parametrize("scheme", ["plain", "plain-int8"])
def test_an_unprotected_scheme_passes_by_name_only_and_with_a_warning(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated, scheme: str
) -> None:
    made = statement(protection=scheme, protection_parameters={})
    assert refused_fields(genuine_report(psp), made, policy) == ["protection"]
    named = UnsafeAllowSimulated(replace(policy.policy, allowed_protection=frozenset({scheme})))
    warnings = validate(genuine_report(psp), made, policy=named, expected_report_data=DATA)
    assert warnings == (SIMULATED_WARNING, f"PROTECTION {scheme} ACCEPTED: it {UNPROTECTED_WARNING}")


@pytest.mark.parametrize(("stated", "wanted"), [(128, 128), (90.5, 90), (1, 0.0), (-5, 0), (300, 299.5)])
def test_the_level_is_what_the_policy_asks(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated, stated: float, wanted: float
) -> None:
    made = statement(protection_parameters={"security_bits": stated})
    asked = UnsafeAllowSimulated(replace(policy.policy, min_security_bits=wanted))
    if stated >= wanted:
        assert validate(genuine_report(psp), made, policy=asked, expected_report_data=DATA)
    else:
        assert refused_fields(genuine_report(psp), made, asked) == ["security_bits"]
    above = UnsafeAllowSimulated(replace(policy.policy, min_security_bits=max(stated, 0) + 0.25))
    assert refused_fields(genuine_report(psp), made, above) == ["security_bits"]


def test_a_scheme_nobody_knows_needs_a_level(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    named = UnsafeAllowSimulated(replace(policy.policy, allowed_protection=frozenset({"new"})))
    made = statement(protection="new", protection_parameters={"shield_rows": 8})
    assert refused_fields(genuine_report(psp), made, named) == ["security_bits"]


def test_all_mismatches_come_together(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    genuine = genuine_report(
        psp, policy=1 << 26 | 3 << 18, vmpl=3, version=4, measurement=bytes(48), key_info=2
    )
    wrong = statement(protection="plain", service="x", model_identity=bytes(32))
    assert refused_fields(genuine, wrong, policy) == [
        "policy.debug",
        "policy.migrate_ma",
        "policy.reserved",
        "vmpl",
        "mask_chip_key",
        "version",
        "measurement",
        "model_identity",
        "service",
        "protection",
    ]


def test_a_version_2_report_names_no_processor(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    assert refused_fields(genuine_report(psp, version=2), statement(), policy) == ["version", "cpuid"]


def test_wrong_report_data_is_a_binding_failure_that_lists_the_rest(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    genuine = genuine_report(psp, vmpl=1)
    for expected in (bytes(64), DATA[:-1] + b"\0", b"", DATA[:63]):
        with pytest.raises(ChannelBindingError) as caught:
            validate(genuine, statement(), policy=policy, expected_report_data=expected)
        assert [mismatch.field for mismatch in caught.value.mismatches] == ["report_data", "vmpl"]


def test_unpinned_says_so_and_accepts_any(psp: SimulatedPsp, statement: MakeStatement) -> None:
    policy = UnsafeAllowSimulated.only(model_identity=UNPINNED, service=UNPINNED)
    made = statement(model_identity=bytes(32), service="whatever")
    assert validate(genuine_report(psp), made, policy=policy, expected_report_data=DATA)


def test_real_evidence_under_a_real_policy(
    vector: Callable[[str], Evidence], statement: MakeStatement
) -> None:
    at = datetime(2026, 10, 1, tzinfo=UTC)
    genuine = verify_evidence(vector("genoa"), roots=AMD_ROOTS, at=at)
    policy = make_policy(measurements=frozenset({genuine.report.measurement}), platform=WITHOUT_REVOCATION)
    data = genuine.report.report_data
    required = replace(policy, platform=standard_platform())
    with pytest.raises(PolicyRefusedError, match="revocation"):
        validate(genuine, statement(), policy=required, expected_report_data=data)
    assert validate(genuine, statement(), policy=policy, expected_report_data=data) == ()
    wrapped = UnsafeAllowSimulated(policy)
    assert validate(genuine, statement(), policy=wrapped, expected_report_data=data) == ()
    only_simulated = UnsafeAllowSimulated.only(model_identity=MODEL, service="gelo")
    with pytest.raises(PolicyRefusedError, match="measurement"):
        validate(genuine, statement(), policy=only_simulated, expected_report_data=data)
    other = replace(policy, products=frozenset({Product.TURIN}))
    with pytest.raises(PolicyRefusedError, match="product"):
        validate(genuine, statement(), policy=other, expected_report_data=data)


@pytest.mark.parametrize(
    ("name", "at", "fields"),
    [
        ("milan-debug", datetime(2026, 10, 1, tzinfo=UTC), {"policy.debug", "version", "cpuid"}),
        ("milan-vlek", datetime(2025, 6, 1, tzinfo=UTC), {"vmpl", "signing_key", "chip_id", "committed_tcb"}),
    ],
)
def test_real_negatives_are_refused(
    vector: Callable[[str], Evidence], statement: MakeStatement, name: str, at: datetime, fields: set[str]
) -> None:
    genuine = verify_evidence(vector(name), roots=AMD_ROOTS, at=at)
    policy = make_policy(
        measurements=frozenset({genuine.report.measurement}), products=frozenset({Product.MILAN})
    )
    with pytest.raises(PolicyRefusedError) as caught:
        validate(genuine, statement(), policy=policy, expected_report_data=genuine.report.report_data)
    found = {mismatch.field for mismatch in caught.value.mismatches}
    assert fields <= found
    assert not found & {"product", "measurement", "host_data"}


def test_milan_is_refused_with_the_reason_and_accepted_with_a_warning(
    vector: Callable[[str], Evidence], statement: MakeStatement
) -> None:
    at = datetime(2026, 10, 1, tzinfo=UTC)
    genuine = verify_evidence(vector("genoa"), roots=AMD_ROOTS, at=at)
    milan = replace(genuine, product=Product.MILAN)
    policy = make_policy(measurements=frozenset({genuine.report.measurement}), platform=WITHOUT_REVOCATION)
    data = genuine.report.report_data
    with pytest.raises(PolicyRefusedError, match="arXiv") as caught:
        validate(milan, statement(), policy=policy, expected_report_data=data)
    assert [mismatch.field for mismatch in caught.value.mismatches] == ["product"]
    opted_in = replace(policy, products=frozenset({Product.MILAN}))
    warnings = validate(milan, statement(), policy=opted_in, expected_report_data=data)
    assert MILAN_REASON in warnings[0]


def test_a_report_alone_can_be_judged(psp: SimulatedPsp, policy: UnsafeAllowSimulated) -> None:
    genuine = genuine_report(psp)
    for data in (DATA, UNPINNED):
        warnings = validate_report(genuine, policy=policy, expected_report_data=data)
        assert warnings == (SIMULATED_WARNING,)
    with pytest.raises(PolicyRefusedError) as caught:
        validate_report(genuine_report(psp, vmpl=2), policy=policy, expected_report_data=bytes(64))
    assert [mismatch.field for mismatch in caught.value.mismatches] == ["report_data", "vmpl"]
    with pytest.raises(SimulatedEvidenceRefusedError):
        validate_report(genuine, policy=make_policy(), expected_report_data=DATA)


def test_every_mismatch_says_whose_fault_it_is(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    genuine = genuine_report(psp, vmpl=1, version=4, platform_info=0)
    with pytest.raises(ChannelBindingError) as caught:
        validate(genuine, statement(service="x"), policy=policy, expected_report_data=bytes(64))
    faults = {mismatch.field: mismatch.fault for mismatch in caught.value.mismatches}
    assert faults == {
        "report_data": Fault.CHANNEL,
        "vmpl": Fault.OPERATOR,
        "platform_info.alias_check_complete": Fault.HOST,
        "version": Fault.HOST,
        "service": Fault.OPERATOR,
    }
    for mismatch in caught.value.mismatches:
        assert str(mismatch.fault) in str(mismatch)
        assert set(mismatch.as_dict()) == {"field", "expected", "got", "fault", "remedy"}


def test_extra_rules_are_held_too(
    psp: SimulatedPsp, statement: MakeStatement, policy: UnsafeAllowSimulated
) -> None:
    strict = UnsafeAllowSimulated(replace(policy.policy, extra=(StrictRules(),)))
    assert "policy.smt" in refused_fields(genuine_report(psp), statement(), strict)


@pytest.mark.parametrize(
    "changes",
    [
        {"measurements": frozenset()},
        {"measurements": frozenset({bytes(47)})},
        {"measurements": frozenset({"00" * 24})},
        {"measurements": {bytes(48)}},
        {"products": frozenset()},
        {"products": frozenset({"Genoa"})},
        {"allowed_protection": frozenset()},
        {"min_security_bits": None},
        {"min_security_bits": True},
        {"min_security_bits": -1},
        {"min_security_bits": float("nan")},
        {"min_security_bits": float("inf")},
        {"model_identity": b""},
        {"model_identity": None},
        {"model_identity": MODEL.hex()},
        {"service": ""},
        {"service": None},
        {"roots": TrustRoots(AMD_ROOTS.pins, unsafe_allow_simulated=True)},
        {"platform": None},
        {"launch": {}},
        {"extra": (None,)},
        {"extra": [StrictRules()]},
    ],
)
def test_an_expectation_cannot_be_left_out(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError):
        make_policy(**changes)


@pytest.mark.parametrize("name", ["measurements", "products", "model_identity", "service"])
def test_an_expectation_cannot_be_forgotten(name: str) -> None:
    values = {"measurements": frozenset({bytes(48)}), "products": frozenset(Product)}
    values |= {"model_identity": MODEL, "service": "gelo"}  # type: ignore[dict-item]
    del values[name]
    with pytest.raises(TypeError):
        Policy(**values)  # type: ignore[arg-type]


def test_the_model_of_a_simulated_policy_may_be_hex() -> None:
    assert UnsafeAllowSimulated.only(model_identity=MODEL.hex(), service="s").policy.model_identity == MODEL
    with pytest.raises(InvalidPolicyError):
        UnsafeAllowSimulated.only(model_identity="abc", service="s")
