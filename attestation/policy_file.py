"""A policy as a TOML or JSON document in which every expectation must be written down.

A key that is missing, unknown, twice there or of another type is an error: a policy never checks
less than its author thought. ``docs/attestation.md`` describes the keys; ``template`` writes a
document to start from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from attestation.certificates import AMD_ROOTS
from attestation.pins import UNPINNED, PinnedOr
from attestation.policy import MEASUREMENT_SIZE, MILAN_REASON, AnyPolicy, Policy, UnsafeAllowSimulated
from attestation.report import Product
from attestation.rules import CHIP_ID_SIZE, LAUNCH_SIZES, LaunchRules, PlatformRules, Rule, StrictRules, Vlek
from attestation.statement import MODEL_IDENTITY_SIZE, parse_digest
from attestation.strict_data import MAX_DATA_SIZE, Table, invalid, parse_json, parse_toml
from attestation.tcb_floors import TcbFloors, bundled_floors, floors_from

FORMAT: Final = "gelo-policy/1"
_UNPINNED: Final = "unpinned"
_ZERO: Final = "zero"
_PROFILES: Final[Mapping[str, tuple[Rule, ...]]] = {"standard": (), "strict": (StrictRules(),)}
_PARSERS: Final[Mapping[str, Callable[[bytes, str], Mapping[str, object]]]] = {
    ".toml": parse_toml,
    ".json": parse_json,
}


def load_policy(path: str | Path) -> AnyPolicy:
    """The policy in the file ``path``, which ends in ``.toml`` or ``.json``.

    Raises:
        InvalidPolicyError: it cannot be read, or is not a complete policy.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_DATA_SIZE + 1)
    except OSError as error:
        raise invalid(f"The policy {path} cannot be read ({error.strerror}).") from None
    return parse_policy(data, syntax=path.suffix.lower())


def parse_policy(data: bytes, *, syntax: str) -> AnyPolicy:
    """The policy in a document; ``syntax`` is ``.toml`` or ``.json``.

    Raises:
        InvalidPolicyError: it is not a complete policy.
    """
    parser = _PARSERS.get(syntax)
    if parser is None:
        raise invalid("The name of a policy file must end in .toml or .json.")
    return policy_from(parser(data, "policy"))


def policy_from(values: Mapping[str, object]) -> AnyPolicy:
    """The policy in a document that is parsed already.

    Raises:
        InvalidPolicyError: a key is missing, unknown, or has a value that cannot be right.
    """
    document = Table(values)
    if document.take("format", str) != FORMAT:
        raise invalid(f"The format of the policy is not {FORMAT}.")
    unsafe = document.take("unsafe_allow_simulated", bool)
    service, guest, platform = (document.table(name) for name in ("service", "guest", "platform"))
    document.close()

    profile = platform.take("profile", str)
    if profile not in _PROFILES:
        raise invalid(f"{platform.name('profile')} must be one of: {', '.join(sorted(_PROFILES))}.")
    name = service.take("name", str)
    identity = service.take("model_identity", str)
    policy = Policy(
        measurements=frozenset(_digests(guest, "measurements", MEASUREMENT_SIZE)),
        products=_products(platform),
        model_identity=UNPINNED
        if identity == _UNPINNED
        else parse_digest(identity, MODEL_IDENTITY_SIZE, service.name("model_identity")),
        service=UNPINNED if name == _UNPINNED else name,
        allowed_protection=frozenset(service.items("protection", str)),
        min_security_bits=service.integer("min_security_bits", 0, 1024),
        roots=AMD_ROOTS,
        platform=_platform(platform),
        launch=_launch(guest),
        extra=_PROFILES[profile],
    )
    for table in (service, guest, platform):
        table.close()
    return UnsafeAllowSimulated(policy) if unsafe else policy


def _digests(table: Table, key: str, size: int) -> list[bytes]:
    return [parse_digest(text, size, table.name(key)) for text in table.items(key, str)]


def _launch(table: Table) -> LaunchRules:
    pinned = {}
    for name, size in LAUNCH_SIZES.items():
        text = table.take(name, str)
        pinned[name] = bytes(size) if text == _ZERO else parse_digest(text, size, table.name(name))
    return LaunchRules(guest_svn=table.integer("guest_svn", 0, 2**32 - 1), **pinned)


def _products(table: Table) -> frozenset[Product]:
    names = table.items("products", str)
    known = {product.value: product for product in Product}
    if unknown := sorted(set(names) - set(known)):
        raise invalid(
            f"{table.name('products')} names {', '.join(unknown)[:100]}; known: {', '.join(known)}."
        )
    reason = table.take("milan_reason", str).strip()
    if Product.MILAN.value in names and not reason:
        raise invalid(f"{table.name('milan_reason')} must say why Milan is accepted. {MILAN_REASON}")
    return frozenset(known[name] for name in names)


def _platform(table: Table) -> PlatformRules:
    major, minor, build = table.integers("minimum_firmware", 3, 255)
    abi_major, abi_minor = table.integers("minimum_guest_abi", 2, 255)
    revocation = table.take("revocation", str)
    if revocation not in ("required", "if-sent"):
        raise invalid(f"{table.name('revocation')} must be required or if-sent.")
    return PlatformRules(
        versions=frozenset(table.items("report_versions", int)),
        minimum_firmware=(major, minor, build),
        minimum_guest_abi=(abi_major, abi_minor),
        floors=_floors(table),
        vlek=_vlek(table),
        chip_ids=_chip_ids(table),
        revocation_required=revocation == "required",
    )


def _floors(table: Table) -> TcbFloors:
    value = table.take_any("tcb_floors")
    if value == "bundled":
        return bundled_floors()
    entries = Table({"tcb_floors": value}, table.name("")).items("tcb_floors", dict)
    return TcbFloors("of the policy", floors_from(entries))


def _vlek(table: Table) -> Vlek | None:
    value = table.take_any("vlek")
    if value == "refused":
        return None
    inner = Table(value, table.name("vlek."))
    vlek = Vlek(csp_ids=frozenset(inner.items("csp_ids", str)), zero_chip_id=inner.take("zero_chip_id", bool))
    inner.close()
    return vlek


def _chip_ids(table: Table) -> PinnedOr[frozenset[bytes]]:
    value = table.take_any("chip_ids")
    if value == _UNPINNED:
        return UNPINNED
    return frozenset(_digests(Table({"chip_ids": value}, table.name("")), "chip_ids", CHIP_ID_SIZE))


def template(*, measurement: bytes, model_identity: bytes | None = None, service: str = _UNPINNED) -> str:
    """A TOML policy that accepts one launch measurement on patched Genoa and Turin machines.

    Raises:
        InvalidPolicyError: a digest of another size.
    """
    digest = parse_digest(measurement, MEASUREMENT_SIZE, "measurement").hex()
    identity = _UNPINNED
    if model_identity is not None:
        identity = parse_digest(model_identity, MODEL_IDENTITY_SIZE, "model_identity").hex()
    return _TEMPLATE.format(format=FORMAT, digest=digest, identity=identity, service=service)


_TEMPLATE = """\
format = "{format}"
unsafe_allow_simulated = false         # true accepts evidence that proves nothing

[service]
name = "{service}"                     # or "unpinned"
model_identity = "{identity}"          # or "unpinned"
protection = ["lpn", "gelo-auto", "gelo-dct4", "gelo-haar", "gelo-hd3"]
min_security_bits = 128                # of schemes that have a level: lpn; the others go by name

[guest]
measurements = ["{digest}"]
host_data = "zero"                     # or hexadecimal digits, as the five below
family_id = "zero"
image_id = "zero"
guest_svn = 0
id_key_digest = "zero"
author_key_digest = "zero"

[platform]
profile = "standard"                   # or "strict": no SMT, ciphertext hiding, no page swapping, no RAPL
products = ["Genoa", "Turin"]
milan_reason = ""                      # with "Milan" in products: why its known break is acceptable
report_versions = [3, 5]
minimum_firmware = [1, 55, 0]
minimum_guest_abi = [0, 0]
tcb_floors = "bundled"                 # or a list of floors, as in attestation/data/tcb_floors.toml
chip_ids = "unpinned"                  # or a list of CHIP_IDs
vlek = "refused"                       # or {{ csp_ids = ["..."], zero_chip_id = true }}
revocation = "required"                # or "if-sent"
"""
