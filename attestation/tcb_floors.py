"""The lowest acceptable patch levels per processor, from a versioned data file with its sources.

The levels are component-wise (56860, table TCB_VERSION): a high microcode level never makes up for
a low firmware level. They are keyed by CPUID family, model and stepping, as microcode is numbered
per stepping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from attestation.errors import Fault, InvalidPolicyError, Mismatch
from attestation.report import TCB_NAMES, Product, Tcb, product_of
from attestation.strict_data import Table, invalid, parse_toml
from attestation.verify import GenuineReport

FORMAT = "gelo-tcb-floors/1"
_ADVICE = (
    "Its firmware or microcode has known holes: update the host (BIOS with the current AGESA), then reboot."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The floor of one processor. ``mitigations``: bits a version 5 report's vectors must have."""

    name: str
    cpuid: tuple[int, int, int]
    reported: Tcb
    committed: Tcb
    launch: Tcb
    current: Tcb
    mitigations: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TcbFloors:
    """Floors by CPUID, with the version of the table they come from.

    Raises:
        InvalidPolicyError: no floor at all.
    """

    version: str
    floors: Mapping[tuple[int, int, int], Floor]

    def __post_init__(self) -> None:
        if not self.floors:
            raise InvalidPolicyError("A table of TCB floors must have at least one floor.")
        object.__setattr__(self, "floors", MappingProxyType(dict(self.floors)))

    def mismatches(self, genuine: GenuineReport) -> list[Mismatch]:
        """Every component that is too low, and every mitigation that is missing."""
        cpuid = genuine.report.cpuid
        floor = None if cpuid is None else self.floors.get(cpuid)
        if floor is None:
            return [
                Mismatch(
                    "cpuid",
                    f"a processor with known TCB floors (table {self.version})",
                    "none (report version 2)" if cpuid is None else "{:02x}/{:02x}/{:x}".format(*cpuid),
                    "Add a floor for this processor from AMD's bulletins, or do not use this machine.",
                    Fault.CLIENT,
                )
            ]
        found = []
        for name in TCB_NAMES:
            wanted, got = getattr(floor, name).as_dict(), genuine.tcbs[name].as_dict()
            for part, level in wanted.items():
                if got.get(part, -1) < level:
                    field = f"{name}_tcb.{part}"
                    found.append(
                        Mismatch(field, f"at least {level}", str(got.get(part, "none")), _ADVICE, Fault.HOST)
                    )
        return [*found, *_mitigation_mismatches(genuine, floor.mitigations)]


def _mitigation_mismatches(genuine: GenuineReport, wanted: int) -> list[Mismatch]:
    """Reports before version 5 have no vectors; their patch levels must speak for them."""
    report = genuine.report
    vectors = {"launch": report.launch_mitigations, "current": report.current_mitigations}
    return [
        Mismatch(
            f"{name}_mit_vector",
            f"bits {wanted:#x}",
            f"{vector:#x}, without {wanted & ~vector:#x}",
            "A mitigation of the firmware was not active: update the host, then launch the guest anew.",
            Fault.HOST,
        )
        for name, vector in vectors.items()
        if vector is not None and wanted & ~vector
    ]


def parse_floors(data: bytes) -> TcbFloors:
    """Read a table of floors in TOML.

    Raises:
        InvalidPolicyError: not such a table, a key missing or unknown, or a processor named twice.
    """
    table = Table(parse_toml(data, "table of TCB floors"))
    if table.take("format", str) != FORMAT:
        raise invalid(f"The format of the table of TCB floors is not {FORMAT}.")
    version = table.take("version", str)
    sources = table.take("sources", dict)
    floors = floors_from(table.items("floor", dict), known_sources=frozenset(sources))
    table.close()
    return TcbFloors(version, floors)


def floors_from(
    entries: list[dict[str, object]], *, known_sources: frozenset[str] | None = None
) -> dict[tuple[int, int, int], Floor]:
    """Floors by CPUID from tables with ``name``, ``cpuid``, ``tcb``, ``mitigations`` and ``sources``.

    ``tcb`` holds for all four TCB_VERSION fields; a key ``reported``, ``committed``, ``launch`` or
    ``current`` overrides it for one.

    Raises:
        InvalidPolicyError: a key missing or unknown, a source that is not known, or a CPUID twice.
    """
    floors: dict[tuple[int, int, int], Floor] = {}
    for number, entry in enumerate(entries):
        floor = _floor(Table(entry, f"floor[{number}]."), known_sources)
        if floor.cpuid in floors:
            raise invalid(f"floor[{number}].cpuid is there twice.")
        floors[floor.cpuid] = floor
    return floors


def _floor(table: Table, known_sources: frozenset[str] | None) -> Floor:
    family, model, stepping = table.integers("cpuid", 3, 0xFF)
    cpuid = (family, model, stepping)
    product = product_of(cpuid)
    if product is None:
        raise invalid(f"{table.name('cpuid')} is not a Milan, Genoa or Turin processor.")
    general = _tcb(table.table("tcb"), product)
    levels = {name: _tcb(table.table(name), product) if table.has(name) else general for name in TCB_NAMES}
    sources = tuple(table.items("sources", str))
    if not sources or (known_sources is not None and not known_sources.issuperset(sources)):
        raise invalid(f"{table.name('sources')} must name at least one source, each of them listed.")
    floor = Floor(
        name=table.take("name", str),
        cpuid=cpuid,
        mitigations=table.integer("mitigations", 0, 2**64 - 1),
        sources=sources,
        **levels,
    )
    table.close()
    return floor


def _tcb(table: Table, product: Product) -> Tcb:
    fmc = table.integer("fmc", 0, 255) if product is Product.TURIN else None
    parts = (table.integer(name, 0, 255) for name in ("bootloader", "tee", "snp", "microcode"))
    tcb = Tcb(fmc, *parts)
    table.close()
    return tcb


@cache
def bundled_floors() -> TcbFloors:
    """The table that ships with this package."""
    return parse_floors((resources.files("attestation") / "data" / "tcb_floors.toml").read_bytes())
