"""configfs-tsm on a directory tree that behaves like the kernel's."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attestation.errors import EvidenceBusyError, EvidenceUnavailableError
from attestation.providers.certificate_table import MAX_TABLE_SIZE
from attestation.providers.configfs_tsm import ATTEMPTS, Configfs, ConfigfsTsm
from attestation.report import parse_report
from attestation.simulated import SimulatedPsp

DATA = bytes(range(64))


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def source(root: Path, configfs: Any, waits: list[float]) -> ConfigfsTsm:
    return ConfigfsTsm(root, configfs=configfs, sleep=waits.append)


def failing(operation: str, name: str, number: int, times: int = 1000) -> Callable[[str, Path], None]:
    """Raises OSError ``number`` the first ``times`` times the operation meets the attribute."""
    left = [times]

    def before(what: str, path: Path) -> None:
        if what == operation and (name in (path.name, "*")) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))

    return before


def test_a_report_and_its_table(source: ConfigfsTsm, configfs: Any, psp: SimulatedPsp, root: Path) -> None:
    configfs.sign = lambda data: (psp.evidence(data).report, b"table of the host")
    signed = source.signed_report(DATA)
    assert parse_report(signed.report).report_data == DATA
    assert signed.certificate_table == b"table of the host"
    assert list(root.iterdir()) == []


def test_every_request_has_a_private_directory(source: ConfigfsTsm, configfs: Any) -> None:
    for _ in range(3):
        source.signed_report(DATA)
    assert len({path.name for path in configfs.made}) == 3
    assert all(str(os.getpid()) in path.name for path in configfs.made)


def test_concurrent_requests_do_not_mix(root: Path, configfs: Any) -> None:
    source, results = ConfigfsTsm(root, configfs=configfs), {}

    def work(number: int) -> None:
        results[number] = source.signed_report(bytes([number]) * 64).report

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, report in results.items():
        assert parse_report(report).report_data == bytes([number]) * 64
    assert len(results) == 8
    assert list(root.iterdir()) == []


def test_the_table_is_optional(source: ConfigfsTsm, configfs: Any) -> None:
    configfs.hidden = ("auxblob",)
    assert source.signed_report(DATA).certificate_table == b""


def test_a_table_that_is_too_large_is_left_out(source: ConfigfsTsm, configfs: Any, psp: SimulatedPsp) -> None:
    configfs.sign = lambda data: (psp.evidence(data).report, b"x" * (MAX_TABLE_SIZE + 1))
    assert source.signed_report(DATA).certificate_table == b""


@pytest.mark.parametrize("provider", ["tdx_guest", "", "sev_guest2", "x" * 1000, "arm_cca_guest"])
def test_another_provider_is_refused(source: ConfigfsTsm, configfs: Any, root: Path, provider: str) -> None:
    configfs.provider = provider
    with pytest.raises(EvidenceUnavailableError, match="served by"):
        source.signed_report(DATA)
    assert list(root.iterdir()) == []


def test_a_guest_below_vmpl_0_is_told(source: ConfigfsTsm, configfs: Any, root: Path) -> None:
    configfs.floor = 2
    with pytest.raises(EvidenceUnavailableError, match="VMPL 0"):
        source.signed_report(DATA)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(("operation", "name"), [("read", "outblob"), ("read", "auxblob")])
def test_a_request_that_another_process_changes_is_made_again(
    source: ConfigfsTsm, configfs: Any, waits: list[float], operation: str, name: str
) -> None:
    disturbed = []

    def before(what: str, path: Path) -> None:
        if (what, path.name) == (operation, name) and not disturbed:
            disturbed.append(path.parent)
            configfs.disturb(path.parent)

    configfs.before = before
    assert parse_report(source.signed_report(DATA).report).report_data == DATA
    assert disturbed
    assert len(configfs.made) == 2
    assert len(waits) == 1


@pytest.mark.parametrize("name", ["inblob", "outblob", "auxblob"])
def test_a_request_that_is_always_changed_fails(
    source: ConfigfsTsm, configfs: Any, root: Path, name: str
) -> None:
    def before(what: str, path: Path) -> None:
        if path.name == name:
            configfs.disturb(path.parent)

    configfs.before = before
    with pytest.raises(EvidenceBusyError, match="request"):
        source.signed_report(DATA)
    assert len(configfs.made) == ATTEMPTS
    assert list(root.iterdir()) == []


def test_a_request_that_the_kernel_did_not_take_is_noticed(source: ConfigfsTsm, configfs: Any) -> None:
    with pytest.raises(EvidenceBusyError, match="not taken"):
        source.signed_report(b"x" * 65)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT])
@pytest.mark.parametrize(
    ("operation", "name"), [("mkdir", "*"), ("write", "inblob"), ("read", "outblob"), ("read", "generation")]
)
def test_a_busy_platform_is_asked_again(
    source: ConfigfsTsm, configfs: Any, waits: list[float], root: Path, operation: str, name: str, number: int
) -> None:
    configfs.before = failing(operation, name, number, times=2)
    source.signed_report(DATA)
    assert waits == [0.1, 0.2]
    configfs.before = failing(operation, name, number)
    with pytest.raises(EvidenceBusyError):
        source.signed_report(DATA)
    assert list(root.iterdir()) == []
    assert sum(waits) < 3


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.ENXIO, errno.ENOTTY, errno.EACCES])
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("mkdir", "*"), ("read", "provider"), ("write", "privlevel"), ("write", "inblob"),
        ("read", "generation"), ("read", "outblob"), ("read", "auxblob"),
    ],
)  # fmt: skip
def test_failures_say_what_and_leave_nothing_behind(
    source: ConfigfsTsm, configfs: Any, root: Path, operation: str, name: str, number: int
) -> None:
    configfs.before = failing(operation, name, number)
    with pytest.raises(EvidenceUnavailableError) as caught:
        source.signed_report(DATA)
    assert not isinstance(caught.value, EvidenceBusyError)
    assert caught.value.remedy
    assert len(configfs.made) <= 1
    assert list(root.iterdir()) == []


def test_a_directory_that_cannot_be_removed_does_not_hide_the_report(
    source: ConfigfsTsm, configfs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    configfs.before = failing("rmdir", "*", errno.EBUSY)
    assert source.signed_report(DATA).report
    assert "Could not remove" in caplog.text


@pytest.mark.parametrize("size", [0, 1183, 1185, 4096, 40000])
def test_an_answer_of_another_size_is_refused(
    source: ConfigfsTsm, configfs: Any, root: Path, size: int
) -> None:
    configfs.sign = lambda data: (bytes(size), b"")
    with pytest.raises(EvidenceUnavailableError, match="1184 bytes"):
        source.signed_report(DATA)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("text", ["", "-1", "x", "1.0", "²"])
def test_a_generation_that_is_no_number_is_refused(source: ConfigfsTsm, configfs: Any, text: str) -> None:
    configfs._count = lambda path: (path / "generation").write_text(text)
    with pytest.raises(EvidenceUnavailableError, match="not a number"):
        source.signed_report(DATA)


def test_a_machine_without_configfs(tmp_path: Path) -> None:
    with pytest.raises(EvidenceUnavailableError, match="No such file") as caught:
        ConfigfsTsm(tmp_path / "absent").signed_report(DATA)
    assert "configfs" in caught.value.remedy


def test_reading_stops_one_byte_after_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(5000))
    assert len(Configfs().read(tmp_path / "file", 1184)) == 1185
