"""Launch digests against arithmetic written down independently, and the manifest.

The reference here follows AMD's publications and QEMU. It is itself checked against the digests that
sev-snp-measure publishes for an ``AmdSev`` build of OVMF (tests/test_guest.py, version 0.0.13).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tomllib
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.errors import InvalidPolicyError, LaunchMeasurementError
from attestation.launch import (
    FORMAT,
    MAX_COMMAND_LINE,
    ExpectedLaunch,
    GuestImage,
    Measured,
    canonical_json,
    manifest,
    measure,
)
from attestation.policy import Policy
from attestation.policy_file import policy_from, template

SEC_MEM, SECRETS, CPUID, SVSM_CAA, KERNEL_HASHES = 1, 2, 3, 4, 0x10
SECTIONS = (
    (0x800000, 0x9000, SEC_MEM),
    (0x80A000, 0x3000, SEC_MEM),
    (0x80D000, 0x1000, SECRETS),
    (0x80E000, 0x1000, CPUID),
    (0x80F000, 0x1000, SVSM_CAA),
    (0x810000, 0x1000, KERNEL_HASHES),
    (0x811000, 0xF000, SEC_MEM),
)
"""Memory that an AmdSev build has measured."""

HASH_TABLE = 0x810C00
RESET_VECTOR = 0x80B004
SIGNATURES = {"EPYC-v4": 0x800F12, "EPYC-Milan": 0xA00F11, "EPYC-Genoa": 0xA10F10, "EPYC-Turin": 0xB00F00}
"""CPUID Fn0000_0001_EAX: family 17h model 1, 19h 1, 19h 11h, 1Ah 0."""

# The reference


def page(digest: bytes, kind: int, gpa: int, contents: bytes) -> bytes:
    """SHA-384 of PAGE_INFO (56860): the digest after one more page."""
    return hashlib.sha384(digest + contents + struct.pack("<HBB4xQ", 0x70, kind, 0, gpa)).digest()


def hash_page(kernel: bytes, initrd: bytes, command_line: str) -> bytes:
    """The page that QEMU fills: a GUIDed table of three SHA-256 (target/i386/sev.c)."""

    def entry(guid: str, data: bytes) -> bytes:
        return uuid.UUID(guid).bytes_le + struct.pack("<H", 50) + hashlib.sha256(data).digest()

    table = (
        uuid.UUID("9438d606-4f22-4cc9-b479-a793d411fd21").bytes_le
        + struct.pack("<H", 168)
        + entry("97d02dd8-bd20-4c94-aa78-e7714d36ab2a", command_line.encode() + b"\0")
        + entry("44baf731-3a2f-4bd7-9af1-41e29169781d", initrd)
        + entry("4de79437-abd2-427f-b835-d5b172d2045b", kernel)
    )
    return (bytes(HASH_TABLE & 0xFFF) + table).ljust(4096, b"\0")


def vmsa(start: int, signature: int, features: int) -> bytes:
    """A vCPU's page at reset under QEMU and KVM; offsets of AMD's manual, volume 2, table B-4."""
    save = bytearray(4096)
    segments = {
        0x00: (0, 0x93, 0xFFFF, 0), 0x10: (0xF000, 0x9B, 0xFFFF, start & 0xFFFF0000),
        0x20: (0, 0x93, 0xFFFF, 0), 0x30: (0, 0x93, 0xFFFF, 0), 0x40: (0, 0x93, 0xFFFF, 0),
        0x50: (0, 0x93, 0xFFFF, 0), 0x60: (0, 0, 0xFFFF, 0), 0x70: (0, 0x82, 0xFFFF, 0),
        0x80: (0, 0, 0xFFFF, 0), 0x90: (0, 0x8B, 0xFFFF, 0),
    }  # fmt: skip
    for offset, values in segments.items():
        struct.pack_into("<HHIQ", save, offset, *values)
    registers = {
        0xD0: 0x1000, 0x148: 0x40, 0x158: 0x10, 0x160: 0x400, 0x168: 0xFFFF0FF0, 0x170: 2,
        0x178: start & 0xFFFF, 0x268: 0x0007040600070406, 0x310: signature, 0x3B0: features, 0x3E8: 1,
    }  # fmt: skip
    for offset, value in registers.items():
        struct.pack_into("<Q", save, offset, value)
    struct.pack_into("<I", save, 0x408, 0x1F80)
    struct.pack_into("<H", save, 0x410, 0x37F)
    return bytes(save)


def reference(firmware_digest: bytes, hashes: bytes, vcpus: int, signature: int, features: int) -> bytes:
    digest = firmware_digest
    for gpa, size, kind in SECTIONS:
        if kind == KERNEL_HASHES:
            digest = page(digest, 1, gpa, hashlib.sha384(hashes).digest())
        else:
            page_type = {SEC_MEM: 3, SVSM_CAA: 3, SECRETS: 5, CPUID: 6}[kind]
            for offset in range(0, size if page_type == 3 else 0x1000, 0x1000):
                digest = page(digest, page_type, gpa + offset, bytes(48))
    for number in range(vcpus):
        start = RESET_VECTOR if number else 0xFFFFFFF0
        save = vmsa(start, signature, features)
        digest = page(digest, 2, 0xFFFFFFFFF000, hashlib.sha384(save).digest())
    return digest


def firmware_pages(firmware: bytes) -> bytes:
    digest = bytes(48)
    for offset in range(0, len(firmware), 4096):
        gpa = (1 << 32) - len(firmware) + offset
        digest = page(digest, 1, gpa, hashlib.sha384(firmware[offset : offset + 4096]).digest())
    return digest


PUBLISHED = {
    (1, "", 0x1): (
        "ddc5224521617a536ee7ce9dd6224d1b58a8d4fda1c741f3ac99fc4bfa04ba6e9fc98646d4a07a9079397fa3852819b5"
    ),
    (1, "", 0x21): (
        "329c8ce0972ae52343b64d34a434a86f245dfd74f5ed7aae15d22efc78fb9683632b9b50e4e1d7fa41179ef98a7ef198"
    ),
    (1, "console=ttyS0 loglevel=7", 0x1): (
        "6d287813eb5222d770f75005c664e34c204f385ce832cc2ce7d0d6f354454362f390ef83a92046c042e706363b4b08fa"
    ),
    (1, "console=ttyS0 loglevel=7", 0x21): (
        "803f691094946e42068aaa3a8f9e26a5c89f36f7b73ecfb28c653360fe4b3aba7e534442e7e1e17895dfe778d0228977"
    ),
    (4, "", 0x1): (
        "5061fffb019493a903613d56d54b94912a1a2f9e4502385f5c194616753720a92441310ba6c4933de877c36e23046ad5"
    ),
    (4, "", 0x21): (
        "4953b1fb416fa874980e8442b3706d345926d5f38879134e00813c5d7abcbe78eafe7b422907be0b4698e2414a631942"
    ),
}
PUBLISHED_FIRMWARE = bytes.fromhex(
    "086e2e9149ebf45abdc3445fba5b2da8270bdbb04094d7a2c37faaa4b24af3aa16aff8c374c2a55c467a50da6d466b74"
)


@pytest.mark.parametrize("configuration", PUBLISHED)
def test_the_reference_gives_the_published_digests(configuration: tuple[int, str, int]) -> None:
    vcpus, command_line, features = configuration
    hashes = hash_page(b"", b"", command_line)
    digest = reference(PUBLISHED_FIRMWARE, hashes, vcpus, SIGNATURES["EPYC-v4"], features)
    assert digest.hex() == PUBLISHED[configuration]


# A tiny guest


def table_entry(guid: str, data: bytes) -> bytes:
    return data + struct.pack("<H", len(data) + 18) + uuid.UUID(guid).bytes_le


def make_firmware(
    sections: tuple[tuple[int, int, int], ...] = SECTIONS,
    *,
    hash_table: int = HASH_TABLE,
    pages: int = 2,
    count: int | None = None,
) -> bytes:
    """Firmware with nothing in it but the metadata an AmdSev build of OVMF has at its end."""
    metadata = b"ASEV" + struct.pack(
        "<III", 16 + 12 * len(sections), 1, len(sections) if count is None else count
    )
    metadata += b"".join(struct.pack("<III", *section) for section in sections)
    entries = (
        table_entry("00f771de-1a7e-4fcb-890e-68c77e2fb44e", struct.pack("<I", RESET_VECTOR))
        + table_entry("7255371f-3a3b-4b04-927b-1da6efa8d454", struct.pack("<II", hash_table, 0x400))
        + table_entry("dc886566-984a-4798-a75e-5585a7bf67cc", struct.pack("<I", 1024))
    )
    footer = (
        entries
        + struct.pack("<H", len(entries) + 18)
        + uuid.UUID("96b582de-1fb2-45f7-baea-a366c55a082d").bytes_le
        + bytes(32)
    )
    tail = metadata.ljust(1024 - len(footer), b"\0") + footer
    return tail.rjust(4096 * pages, b"\x90")


KERNEL, INITRD, COMMAND_LINE = b"tiny kernel", b"tiny initrd\n", "console=ttyS0 panic=-1"


@pytest.fixture
def image(tmp_path: Path) -> GuestImage:
    parts = {"firmware": make_firmware(), "kernel": KERNEL, "initrd": INITRD}
    for name, data in parts.items():
        (tmp_path / name).write_bytes(data)
    return GuestImage(**{name: tmp_path / name for name in parts}, command_line=COMMAND_LINE)


def test_a_known_value(image: GuestImage) -> None:
    """Computed once with the reference; anything that moves it moves every published digest."""
    measured = measure(image, vcpus=[2], vcpu_types=["EPYC-v4"])
    assert measured.measurements[0].hex() == (
        "d923a311e634542cc9e2b2b70893dac667420d7fbed90ca0e6eb1f81e8c55650c5c8d322199ddc7bb47ac1626434e293"
    )


@pytest.mark.parametrize("features", [0x1, 0x21])
def test_digests_are_those_of_the_reference(image: GuestImage, features: int) -> None:
    measured = measure(image, vcpus=[1, 2, 5], vcpu_types=SIGNATURES, guest_features=features)
    assert len(measured.launches) == 12
    base = firmware_pages(image.firmware.read_bytes())
    hashes = hash_page(KERNEL, INITRD, COMMAND_LINE)
    for launch in measured.launches:
        expected = reference(base, hashes, launch.vcpus, SIGNATURES[launch.vcpu_type], features)
        assert launch.measurement == expected
        assert launch.guest_features == features
    assert len(measured.measurements) == 12


def test_what_was_measured_is_named(image: GuestImage) -> None:
    inputs = measure(image, vcpus=[1], vcpu_types=["EPYC-v4"]).inputs
    assert inputs == {
        "firmware_sha256": hashlib.sha256(image.firmware.read_bytes()).hexdigest(),
        "kernel_sha256": hashlib.sha256(KERNEL).hexdigest(),
        "initrd_sha256": hashlib.sha256(INITRD).hexdigest(),
        "command_line": COMMAND_LINE,
    }


@pytest.mark.parametrize("part", ["firmware", "kernel", "initrd", "command_line"])
def test_every_part_changes_the_digest(image: GuestImage, part: str) -> None:
    before = measure(image, vcpus=[1], vcpu_types=["EPYC-v4"]).measurements
    if part == "command_line":
        image = replace(image, command_line=COMMAND_LINE + " ")
    elif part == "firmware":
        image.firmware.write_bytes(make_firmware(pages=3))
    else:
        getattr(image, part).write_bytes(b"another")
    assert measure(image, vcpus=[1], vcpu_types=["EPYC-v4"]).measurements != before


def test_equal_numbers_and_types_count_once(image: GuestImage) -> None:
    measured = measure(image, vcpus=[2, 1, 2], vcpu_types=["EPYC", "EPYC-v4", "EPYC"])
    assert [(launch.vcpu_type, launch.vcpus) for launch in measured.launches] == [
        ("EPYC", 1), ("EPYC", 2), ("EPYC-v4", 1), ("EPYC-v4", 2),
    ]  # fmt: skip
    assert len(measured.measurements) == 2  # both names stand for one processor


without_hashes = tuple(section for section in SECTIONS if section[2] != KERNEL_HASHES)
NOT_CHECKING: dict[str, bytes] = {
    "no page for hashes": make_firmware(without_hashes),
    "no table of hashes": make_firmware(hash_table=0),
    "table on another page": make_firmware(hash_table=0x80FC00),
    "page of another size": make_firmware(
        (*without_hashes, (0x810000, 0x2000, KERNEL_HASHES)), hash_table=HASH_TABLE
    ),
    "no metadata": bytes(4096),
}


@pytest.mark.parametrize("name", NOT_CHECKING)
def test_firmware_that_would_boot_any_kernel_is_refused(image: GuestImage, name: str) -> None:
    image.firmware.write_bytes(NOT_CHECKING[name])
    with pytest.raises(LaunchMeasurementError, match="does not check the kernel") as caught:
        measure(image, vcpus=[1], vcpu_types=["EPYC-v4"])
    assert "AmdSev" in caught.value.remedy


BROKEN: dict[str, bytes] = {
    "no whole pages": make_firmware()[1:],
    "unknown section": make_firmware((*SECTIONS, (0x900000, 0x1000, 0x77))),
    "endless sections": make_firmware(count=0xFFFFFFFF),
    "enormous section": make_firmware((*SECTIONS, (0x900000, 0xFFFFF000, SEC_MEM))),
    "section of half a page": make_firmware((*SECTIONS, (0x900000, 0x800, SEC_MEM))),
    "no reset vector": make_firmware().replace(
        uuid.UUID("00f771de-1a7e-4fcb-890e-68c77e2fb44e").bytes_le, bytes(16)
    ),
    "another signature": make_firmware().replace(b"ASEV", b"XSEV"),
    "metadata before the start": make_firmware().replace(
        struct.pack("<IH", 1024, 22), struct.pack("<IH", 2**31, 22)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_firmware_is_refused(image: GuestImage, name: str) -> None:
    image.firmware.write_bytes(BROKEN[name])
    with pytest.raises(LaunchMeasurementError, match="cannot be measured"):
        measure(image, vcpus=[1], vcpu_types=["EPYC-v4"])


@given(cut=st.integers(0, 1023), noise=st.binary(min_size=1, max_size=40))
def test_noise_in_the_metadata_never_crashes(
    cut: int, noise: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("noise")
    data = bytearray(make_firmware())
    start = len(data) - 1024 + cut
    data[start : start + len(noise)] = noise
    (directory / "firmware").write_bytes(bytes(data)[: 2 * 4096])
    (directory / "file").write_bytes(b"x")
    image = GuestImage(
        firmware=directory / "firmware", kernel=directory / "file", initrd=directory / "file", command_line=""
    )
    with contextlib.suppress(LaunchMeasurementError):
        measure(image, vcpus=[1], vcpu_types=["EPYC-v4"])


@pytest.mark.parametrize("part", ["firmware", "kernel", "initrd"])
def test_files_that_cannot_be_used_are_named(image: GuestImage, part: str, tmp_path: Path) -> None:
    getattr(image, part).write_bytes(b"")
    with pytest.raises(LaunchMeasurementError, match=part):
        measure(image, vcpus=[1], vcpu_types=["EPYC-v4"])
    for path, words in ((tmp_path / "absent", "No such file"), (tmp_path, "not a file")):
        with pytest.raises(LaunchMeasurementError, match=words):
            measure(replace(image, **{part: path}), vcpus=[1], vcpu_types=["EPYC-v4"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vcpus": []}, "At least one"),
        ({"vcpu_types": []}, "At least one"),
        ({"vcpus": [0]}, "1 to 512"),
        ({"vcpus": [513]}, "1 to 512"),
        ({"vcpu_types": ["EPYC-v4", "Pentium"]}, "Pentium"),
        ({"guest_features": 0}, "bit 0"),
        ({"guest_features": 2}, "bit 0"),
        ({"guest_features": 1 + 2**64}, "64-bit"),
    ],
)
def test_a_configuration_that_cannot_be(image: GuestImage, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchMeasurementError, match=words):
        measure(image, **{"vcpus": [1], "vcpu_types": ["EPYC-v4"], **changes})


@pytest.mark.parametrize("text", ["console=ü", "a\nb", "a\0b", "x" * (MAX_COMMAND_LINE + 1)])
def test_a_command_line_that_linux_would_not_see_as_written(image: GuestImage, text: str) -> None:
    with pytest.raises(LaunchMeasurementError, match="command line"):
        measure(replace(image, command_line=text), vcpus=[1], vcpu_types=["EPYC-v4"])


# The manifest

IDENTITY = bytes(range(32))
MEASURED = Measured(
    inputs={"firmware_sha256": "00" * 32, "command_line": "quiet"},
    launches=tuple(
        ExpectedLaunch(
            vcpus=count, vcpu_type="EPYC-v4", guest_features=1, measurement=bytes([9 - count]) * 48
        )
        for count in (1, 2)
    ),
)
Make = Callable[..., bytes]


@pytest.fixture
def make() -> Make:
    def build(**changes: Any) -> bytes:
        values: dict[str, Any] = {
            "model_identity": IDENTITY, "service": "gelo", "versions": {"gelo-llm": "0.1.0"},
        }  # fmt: skip
        return manifest(MEASURED, **{**values, **changes})

    return build


def test_the_manifest_says_everything(make: Make) -> None:
    document = json.loads(make())
    digests = ["07" * 48, "08" * 48]
    assert document["format"] == FORMAT
    assert document["measurements"] == digests
    assert document["model_identity"] == IDENTITY.hex()
    assert document["inputs"] == MEASURED.inputs
    assert document["launches"][0] == {
        "guest_features": 1, "measurement": "08" * 48, "vcpu_type": "EPYC-v4", "vcpus": 1, "vmm": "qemu",
    }  # fmt: skip
    assert document["versions"].keys() == {"gelo-llm", "sev-snp-measure"}


def test_a_client_can_use_the_policy_in_it(make: Make) -> None:
    policy = policy_from(json.loads(make())["policy"])
    assert isinstance(policy, Policy)
    assert policy.measurements == {b"\x07" * 48, b"\x08" * 48}
    assert policy.model_identity == IDENTITY
    assert policy.service == "gelo"


def test_equal_inputs_give_equal_canonical_bytes(make: Make) -> None:
    assert make() == make(versions={"gelo-llm": "0.1.0"}, model_identity=IDENTITY.hex())
    text = make().decode("ascii")
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert not text.endswith("\n")


def test_a_policy_of_ones_own_is_filled_in(make: Make) -> None:
    own = tomllib.loads(template(measurement=bytes(48)).replace('"standard"', '"strict"'))
    policy = json.loads(make(policy=own))["policy"]
    assert policy["platform"]["profile"] == "strict"
    assert policy["guest"]["measurements"] == ["07" * 48, "08" * 48]
    assert own["guest"]["measurements"] == ["00" * 48]


def test_a_policy_that_accepts_simulated_evidence_is_refused(make: Make) -> None:
    own = tomllib.loads(template(measurement=bytes(48)))
    with pytest.raises(InvalidPolicyError, match="simulated"):
        make(policy={**own, "unsafe_allow_simulated": True})


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": {}},
        {"policy": {"guest": 1, "service": {}}},
        {"model_identity": "00"},
        {"model_identity": bytes(31)},
        {"service": ""},
        {"service": "gelö"},
        {"versions": {"a": 1.5}},
        {"versions": {"a": None}},
    ],
)
def test_what_cannot_be_right_is_refused(make: Make, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicyError):
        make(**changes)


@pytest.mark.parametrize("value", [1.0, None, b"x", "ü", 2**53, {1: "x"}, (1,), [{"a": [2.5]}]])
def test_canonical_json_refuses_what_has_no_canonical_form(value: object) -> None:
    with pytest.raises(InvalidPolicyError):
        canonical_json(value)
