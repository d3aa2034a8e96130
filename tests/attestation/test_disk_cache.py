"""The cache of public objects: private, whole, and only what its name says."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from attestation.disk_cache import DiskCache, default_cache_dir
from attestation.errors import CollateralError

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
URL = "https://kdsintf.amd.com/vcek/v1/Genoa/crl"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "nested" / "cache"


@pytest.fixture
def cache(directory: Path) -> DiskCache:
    return DiskCache(directory)


def file_of(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_what_is_stored_comes_back(cache: DiskCache, directory: Path) -> None:
    cache.store(URL, b"content", NOW)
    cached = DiskCache(directory).load(URL, limit=7)
    assert cached is not None
    assert (cached.data, cached.stored) == (b"content", NOW)
    assert cache.load(URL + "2", limit=7) is None


def test_directory_and_files_are_private_and_named_by_hash(cache: DiskCache, directory: Path) -> None:
    cache.store(URL, b"content", NOW)
    assert directory.stat().st_mode & 0o777 == 0o700
    path = file_of(directory)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name == f"{hashlib.sha256(URL.encode()).hexdigest()}.{hashlib.sha256(b'content').hexdigest()}"


@pytest.mark.parametrize("mode", [0o750, 0o755, 0o777, 0o701])
def test_a_directory_that_others_can_enter_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(CollateralError, match="open to others"):
        DiskCache(directory)


def test_somebody_elses_directory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CollateralError, match="another user"):
        DiskCache(directory)


@pytest.mark.parametrize("content", [b"", b"contenT", b"content-", b"conten"])
def test_a_damaged_file_is_removed_and_not_used(cache: DiskCache, directory: Path, content: bytes) -> None:
    cache.store(URL, b"content", NOW)
    file_of(directory).write_bytes(content)
    assert cache.load(URL, limit=100) is None
    assert list(directory.iterdir()) == []


def test_a_file_above_the_limit_is_not_used(cache: DiskCache) -> None:
    cache.store(URL, b"content", NOW)
    assert cache.load(URL, limit=6) is None


def test_a_link_is_not_followed(cache: DiskCache, directory: Path, tmp_path: Path) -> None:
    cache.store(URL, b"content", NOW)
    path = file_of(directory)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.load(URL, limit=100) is None
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("kind", ["fifo"])
def test_a_file_that_is_no_file_does_not_block(cache: DiskCache, directory: Path, kind: str) -> None:
    cache.store(URL, b"content", NOW)
    path = file_of(directory)
    path.unlink()
    os.mkfifo(path)
    assert cache.load(URL, limit=100) is None


def test_a_new_object_replaces_the_old_one(cache: DiskCache, directory: Path) -> None:
    cache.store(URL, b"old", NOW)
    cache.store("https://other.example/", b"other", NOW)
    cache.store(URL, b"new", NOW + timedelta(days=1))
    assert len(list(directory.iterdir())) == 2
    cached = cache.load(URL, limit=100)
    assert cached is not None
    assert cached.data == b"new"
    cache.store(URL, b"new", NOW + timedelta(days=2))
    cached = cache.load(URL, limit=100)
    assert cached is not None
    assert cached.stored == NOW + timedelta(days=2)
    assert cache.load("https://other.example/", limit=100) is not None


def test_of_two_the_newest_whole_one_is_used(cache: DiskCache, directory: Path) -> None:
    cache.store(URL, b"old", NOW)
    head = file_of(directory).name.partition(".")[0]
    damaged = directory / f"{head}.{'0' * 64}"
    damaged.write_bytes(b"new")
    os.utime(damaged, (NOW.timestamp() + 10, NOW.timestamp() + 10))
    cached = cache.load(URL, limit=100)
    assert cached is not None
    assert cached.data == b"old"
    assert not damaged.exists()


def test_a_failed_write_leaves_nothing(
    cache: DiskCache, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(CollateralError, match="No space left") as caught:
        cache.store(URL, b"content", NOW)
    assert "XDG_CACHE_HOME" in caught.value.remedy
    assert list(directory.iterdir()) == []


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CollateralError, match="cannot be used"):
        DiskCache(tmp_path / "file")


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "gelo" / "amd-kds"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "gelo" / "amd-kds"
