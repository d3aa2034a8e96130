"""`gelo measure`: which launch digests a guest image can have."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from gelo_cli.console import CliError, err, out, progress_bars, reported_errors

_COMMAND_LINE_LIMIT = 64 * 1024
_POLICY_LIMIT = 256 * 1024


def measure(
    firmware: Annotated[Path, typer.Option(help="OVMF built from AmdSevX64.dsc, the file QEMU gets.")],
    kernel: Annotated[Path, typer.Option(help="The kernel, as given to QEMU's -kernel.")],
    initrd: Annotated[Path, typer.Option(help="The initrd, as given to QEMU's -initrd.")],
    vcpus: Annotated[list[int], typer.Option(help="Number of vCPUs; may be repeated.")],
    vcpu_type: Annotated[list[str], typer.Option(help="QEMU's name, such as EPYC-v4; may be repeated.")],
    append: Annotated[
        str | None, typer.Option(help="The kernel's command line, as given to QEMU's -append.")
    ] = None,
    append_file: Annotated[
        Path | None, typer.Option(help="The same from a file; a line end at its end is dropped.")
    ] = None,
    guest_features: Annotated[
        str, typer.Option(help="SEV_FEATURES of the vCPUs; 0x1 is SNP and nothing else.")
    ] = "0x1",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model in the image: name or directory.")
    ] = None,
    model_identity: Annotated[
        str | None, typer.Option(help="Its identity instead (64 hex digits), as `gelo verify` shows it.")
    ] = None,
    service: Annotated[str, typer.Option(help="The service name that clients expect.")] = "gelo",
    policy: Annotated[
        Path | None,
        typer.Option(help="Policy to fill the digests into (.toml or .json). Default: the standard one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the manifest here instead of to stdout.")
    ] = None,
) -> None:
    """Compute the launch digests of a guest image and write a manifest, ready to be signed.

    Equal inputs give equal bytes, so that others can build the image and compare. The manifest holds
    the digests, the model's identity, the policy for clients and the versions of what was measured.
    """
    with reported_errors():
        from attestation.launch import GuestImage, manifest
        from attestation.launch import measure as measure_launch

        measured = measure_launch(
            GuestImage(
                firmware=firmware,
                kernel=kernel,
                initrd=initrd,
                command_line=_command_line(append, append_file),
            ),
            vcpus=vcpus,
            vcpu_types=vcpu_type,
            guest_features=_word(guest_features),
        )
        document = manifest(
            measured,
            model_identity=_identity(model, model_identity),
            service=service,
            versions={"gelo-llm": version("gelo-llm")},
            policy=None if policy is None else _policy(policy),
        )
        table = Table("vCPUs", "type", "launch digest", box=None)
        for launch in measured.launches:
            table.add_row(str(launch.vcpus), launch.vcpu_type, launch.measurement.hex())
        err.print(table)
        if output is None:
            out.file.write(document.decode("ascii"))
        else:
            output.write_bytes(document)
            err.print(f"[green]written[/] {output}", highlight=False)


def _command_line(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise CliError(
            "The kernel's command line is measured, and has to be given once.",
            remedy="Give --append TEXT or --append-file FILE (--append '' for an empty one).",
            code=2,
        )
    if file is None:
        return text or ""
    with file.open("rb") as stream:
        content = stream.read(_COMMAND_LINE_LIMIT + 1)
    return content.decode("utf-8", "replace").removesuffix("\n")


def _identity(model: str | None, identity: str | None) -> bytes | str:
    if (model is None) == (identity is None):
        raise CliError(
            "A manifest names the model, in one way.",
            remedy="Give --model NAME or --model-identity HEX.",
            code=2,
        )
    if identity is not None:
        return identity
    from tee_runner.models import resolve_model
    from tee_runner.models.identity import model_identity

    with progress_bars() as progress:
        return model_identity(resolve_model(model or "", progress=progress), progress=progress)


def _word(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise CliError(f"{text!r} is not a number.", remedy="Give --guest-features 0x1.", code=2) from None


def _policy(path: Path) -> Mapping[str, object]:
    from attestation.strict_data import parse_json, parse_toml

    parsers = {".toml": parse_toml, ".json": parse_json}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise CliError("The name of a policy file must end in .toml or .json.", code=2)
    with path.open("rb") as file:
        return parse(file.read(_POLICY_LIMIT + 1), "policy")
