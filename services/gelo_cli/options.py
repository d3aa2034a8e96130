"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gelo_cli.processes import READY_FD_OPTION


class EngineChoice(StrEnum):
    """Worker engines."""

    AUTO = "auto"
    CPU = "cpu"
    WGPU = "wgpu"


class TransportChoice(StrEnum):
    """How operands travel."""

    AUTO = "auto"
    SLAB = "slab"
    GRPC = "grpc"


class DecodeMaskChoice(StrEnum):
    """Who shares a mask in a decode step."""

    SEQUENCE = "sequence"
    SHARED = "shared"


class KvChoice(StrEnum):
    """KV cache element types."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


class EvidenceChoice(StrEnum):
    """Evidence providers, with the names of ``attestation.providers.select``."""

    AUTO = "auto"
    CONFIGFS = "configfs"
    SEV_GUEST = "sev-guest"
    SIMULATED = "simulated"


class ProtectionChoice(StrEnum):
    """Protection schemes."""

    PLAIN = "plain"
    PLAIN_INT8 = "plain-int8"
    HAAR = "gelo-haar"
    HD3 = "gelo-hd3"
    DCT4 = "gelo-dct4"
    AUTO = "gelo-auto"
    LPN = "lpn"


class LpnWeightsChoice(StrEnum):
    """Widths of quantised weights."""

    INT8 = "int8"
    INT16 = "int16"


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A name `gelo models list` shows, a directory, or a hub id.")
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset", help="Refuse a model whose configuration is not the published one of this name."
    ),
]
ProtectionOption = Annotated[
    ProtectionChoice, typer.Option("--protection", "-p", help="How operands are hidden from the worker.")
]
EngineOption = Annotated[
    EngineChoice,
    typer.Option("--engine", help="auto takes a hardware GPU through Vulkan if there is one, else the CPU."),
]
TransportOption = Annotated[
    TransportChoice, typer.Option(help="slab: shared memory on one host. grpc: any topology. auto picks.")
]
KvOption = Annotated[
    KvChoice,
    typer.Option(
        "--kv-dtype",
        help="Element type of the KV cache. bfloat16 takes a half, int8 (one scale per head and position) "
        "about a quarter of float32; docs/models.md states their accuracy.",
    ),
]
DecodeMaskOption = Annotated[
    DecodeMaskChoice,
    typer.Option(help="One secret mask per decoding sequence, or one shared by all that decode in a step."),
]
FreshMaskOption = Annotated[
    bool, typer.Option("--mask-per-offload", help="A fresh mask for every product, not one per pass.")
]
MaxLenOption = Annotated[
    int, typer.Option(help="Prompt plus answer, in tokens. 0: the model's limit, at most 4096.", min=0)
]
EvidenceOption = Annotated[
    EvidenceChoice,
    typer.Option(
        "--evidence",
        help="Who signs the evidence. auto takes what this confidential VM has, else refuses. "
        "simulated proves nothing: for development only.",
    ),
]
IntegrityOption = Annotated[
    bool, typer.Option(help="Check that each of the worker's results is the product it was asked for.")
]
ObliviousOption = Annotated[
    bool,
    typer.Option(
        "--oblivious-embedding",
        help="Look tokens up by reading the whole embedding table in order, so that which memory is touched "
        "does not depend on the prompt. docs/performance.md states what it costs.",
    ),
]
LpnMemoryOption = Annotated[
    float,
    typer.Option(
        "--lpn-memory",
        help="lpn: most bytes of runner memory per model parameter, for weights of int8 and pools.",
        min=1.5,
    ),
]
LpnBitsOption = Annotated[
    float,
    typer.Option(
        "--lpn-bits",
        help="lpn: security level to reach, log2 of operations. Clients refuse less than 128.",
        min=40,
        max=256,
    ),
]
LpnWeightsOption = Annotated[
    LpnWeightsChoice,
    typer.Option("--lpn-weights", help="lpn: int16 is near-lossless, and slower at the worker."),
]
LpnPoolsOption = Annotated[
    Path | None,
    typer.Option(
        "--lpn-pools",
        help="lpn: a directory that keeps the pools (public, verified when read) for a quick start.",
        file_okay=False,
    ),
]
LogOption = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
ReadyOption = Annotated[int | None, typer.Option(READY_FD_OPTION, hidden=True)]
AllowSimulatedOption = Annotated[
    bool,
    typer.Option(
        "--allow-simulated",
        help="Accept SIMULATED evidence, which proves nothing. For development only.",
    ),
]
ModelIdentityOption = Annotated[
    str | None, typer.Option("--model-identity", help="Refuse any other model than this (64 hex digits).")
]
MeasurementOption = Annotated[
    list[str] | None,
    typer.Option("--measurement", help="Accepted launch measurement (96 hex digits); may be repeated."),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", help="What to accept, as .toml or .json (docs/attestation.md).", dir_okay=False),
]
AllowPlainOption = Annotated[
    bool, typer.Option("--allow-plain", help="Accept a service that does not protect its operands at all.")
]
