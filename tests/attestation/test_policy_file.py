"""Policies from TOML and JSON: complete or refused."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import InvalidPolicyError
from attestation.pins import UNPINNED
from attestation.policy import NOTHING_GIVEN, REPORT_VERSIONS, Policy, UnsafeAllowSimulated, standard_platform
from attestation.policy_file import load_policy, parse_policy, policy_from, template
from attestation.report import Product
from attestation.rules import PlatformRules, StrictRules, Vlek
from attestation.strict_data import MAX_DATA_SIZE

MEASUREMENT = bytes(range(48))
MODEL = bytes(range(32))
TEXT = template(measurement=MEASUREMENT, model_identity=MODEL, service="gelo")
VALUES: dict[str, Any] = tomllib.loads(TEXT)


def changed(path: str, value: object) -> dict[str, Any]:
    """The document with another value at a dotted path; ``...`` removes it."""
    document = copy.deepcopy(VALUES)
    *tables, key = path.split(".")
    table = document
    for name in tables:
        table = table[name]
    if value is ...:
        del table[key]
    else:
        table[key] = value
    return document


def paths(table: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in table.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += paths(value, f"{prefix}{key}.")
    return found


def platform(policy: Any) -> PlatformRules:
    assert isinstance(policy, Policy)
    assert isinstance(policy.platform, PlatformRules)
    return policy.platform


def test_the_template_is_the_standard_profile() -> None:
    policy = parse_policy(TEXT.encode(), syntax=".toml")
    assert policy == Policy(
        measurements=frozenset({MEASUREMENT}),
        products=frozenset({Product.GENOA, Product.TURIN}),
        model_identity=MODEL,
        service="gelo",
        platform=standard_platform(),
        launch=NOTHING_GIVEN,
    )
    assert platform(policy).versions == REPORT_VERSIONS


def test_toml_and_json_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(TEXT)
    (tmp_path / "p.json").write_text(json.dumps(VALUES))
    assert load_policy(tmp_path / "p.toml") == load_policy(str(tmp_path / "p.json"))


@pytest.mark.parametrize("path", paths(VALUES))
def test_no_expectation_can_be_left_out(path: str) -> None:
    with pytest.raises(InvalidPolicyError, match=f"{path} is missing"):
        policy_from(changed(path, ...))


@pytest.mark.parametrize("path", ["extra", "service.extra", "guest.extra", "platform.extra"])
def test_unknown_keys_are_refused(path: str) -> None:
    with pytest.raises(InvalidPolicyError, match="unknown keys: extra"):
        policy_from(changed(path, 1))


WRONG_VALUES: list[object] = [None, 1.5, [None], {"a": 1}, "nonsense", -1, [], True]
VALID_VALUES = [
    ("service.name", "nonsense"),
    ("platform.milan_reason", "nonsense"),
    ("unsafe_allow_simulated", True),
]


@pytest.mark.parametrize(
    ("path", "value"),
    [(path, value) for path in paths(VALUES) for value in WRONG_VALUES if (path, value) not in VALID_VALUES],
)
def test_no_expectation_takes_just_any_value(path: str, value: object) -> None:
    with pytest.raises(InvalidPolicyError):
        policy_from(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("guest.measurements", ["00" * 47]),
        ("guest.measurements", ["zz" * 48]),
        ("guest.measurements", "00" * 48),
        ("guest.measurements", ["00" * 48, 1]),
        ("guest.host_data", "00" * 31),
        ("guest.guest_svn", 2**32),
        ("guest.guest_svn", True),
        ("service.min_security_bits", 1025),
        ("service.min_security_bits", 128.0),
        ("service.model_identity", "00" * 31),
        ("service.name", ""),
        ("platform.report_versions", [6]),
        ("platform.report_versions", [True]),
        ("platform.minimum_firmware", [1, 55]),
        ("platform.minimum_firmware", [1, 55, 256]),
        ("platform.products", ["Genoa", "Rome"]),
        ("platform.products", ["Milan"]),
        ("platform.profile", "lax"),
        ("platform.revocation", "off"),
        ("platform.vlek", {"csp_ids": []}),
        ("platform.vlek", {"csp_ids": [], "zero_chip_id": True}),
        ("platform.vlek", {"csp_ids": ["a"], "zero_chip_id": 1}),
        ("platform.vlek", {"csp_ids": ["a"], "zero_chip_id": True, "x": 1}),
        ("platform.chip_ids", ["00" * 64]),
        ("platform.chip_ids", ["01" * 8]),
        ("platform.tcb_floors", [{"name": "x"}]),
        ("guest.measurements", ["00" * 48] * 1025),
    ],
)
def test_values_that_cannot_be_right(path: str, value: object) -> None:
    with pytest.raises(InvalidPolicyError):
        policy_from(changed(path, value))


def test_opting_in_and_pinning() -> None:
    document = changed("platform.vlek", {"csp_ids": ["SP-A"], "zero_chip_id": True})
    document["platform"] |= {
        "products": ["Milan"],
        "milan_reason": "our own machines, in our own building",
        "chip_ids": ["01" * 64],
        "revocation": "if-sent",
        "profile": "strict",
        "tcb_floors": [
            {
                "name": "ours",
                "cpuid": [0x19, 1, 1],
                "tcb": {"bootloader": 4, "tee": 0, "snp": 24, "microcode": 219},
                "mitigations": 0,
                "sources": ["ours"],
            }
        ],
    }
    document["service"] |= {"model_identity": "unpinned", "name": "unpinned"}
    document["guest"] |= {"host_data": "07" * 32, "guest_svn": 3}
    policy = policy_from(document)
    rules = platform(policy)
    assert isinstance(policy, Policy)
    assert policy.products == {Product.MILAN}
    assert (policy.model_identity, policy.service) == (UNPINNED, UNPINNED)
    assert rules.vlek == Vlek(csp_ids=frozenset({"SP-A"}), zero_chip_id=True)
    assert rules.chip_ids == {b"\x01" * 64}
    assert not rules.revocation_required
    assert list(rules.floors.floors) == [(0x19, 1, 1)]
    assert [type(rule) for rule in policy.extra] == [StrictRules]
    assert getattr(policy.launch, "host_data") == b"\x07" * 32  # noqa: B009


def test_simulated_evidence_must_be_asked_for_by_name() -> None:
    assert isinstance(policy_from(VALUES), Policy)
    assert isinstance(policy_from(changed("unsafe_allow_simulated", True)), UnsafeAllowSimulated)


@pytest.mark.parametrize(
    ("data", "syntax"),
    [
        (b"", ".toml"),
        (b"", ".json"),
        (b"[]", ".json"),
        (b"null", ".json"),
        (b'{"format": "gelo-policy/1", "format": "gelo-policy/1"}', ".json"),
        (b'{"format": NaN}', ".json"),
        (b'{"format": ' + b"9" * 5000 + b"}", ".json"),
        (b"[" * 100_000, ".json"),
        (b'{"a":' * 20_000, ".json"),
        (b"a = " + b"[" * 100_000, ".toml"),
        (b"a = 1\na = 2", ".toml"),
        (b"a = " + b"9" * 5000, ".toml"),
        (TEXT.replace("guest_svn = 0", "guest_svn = 0x" + "f" * 5000).encode(), ".toml"),
        (b"\xff\xfe", ".toml"),
        (b"\xff\xfe", ".json"),
        (b" " * (MAX_DATA_SIZE + 1), ".toml"),
        (TEXT.encode(), ".json"),
        (TEXT.encode(), ".yaml"),
        (TEXT.encode(), ""),
    ],
)
def test_documents_that_are_none(data: bytes, syntax: str) -> None:
    with pytest.raises(InvalidPolicyError):
        parse_policy(data, syntax=syntax)


def test_a_key_that_occurs_twice_is_an_error() -> None:
    text = json.dumps(VALUES)
    assert parse_policy(text.encode(), syntax=".json")
    twice = text.replace('"profile": "standard"', '"profile": "strict", "profile": "standard"')
    assert twice != text
    with pytest.raises(InvalidPolicyError, match="occurs twice"):
        parse_policy(twice.encode(), syntax=".json")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(InvalidPolicyError):
            load_policy(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_arbitrary_documents_raise_nothing_unexpected(value: object) -> None:
    with pytest.raises(InvalidPolicyError):
        parse_policy(json.dumps(value).encode(), syntax=".json")
    for path in ("service", "guest", "platform", "platform.tcb_floors", "platform.vlek", "guest.host_data"):
        with pytest.raises(InvalidPolicyError):
            policy_from(changed(path, value))


@given(st.text(), st.integers(0, len(TEXT)), st.integers(0, 40))
def test_edited_documents_load_or_are_refused(text: str, start: int, length: int) -> None:
    edited = TEXT[:start] + text + TEXT[start + length :]
    try:
        policy = parse_policy(edited.encode("utf-8", "surrogatepass"), syntax=".toml")
    except InvalidPolicyError:
        return
    assert isinstance(policy, Policy | UnsafeAllowSimulated)
