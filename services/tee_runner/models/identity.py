"""One digest for everything that decides what a model computes.

The digest is SHA-256 over a sequence of fields. Each field is its length as 8 bytes little-endian,
then its bytes, so that no two different sequences give the same input. In order:

1. the domain tag ``gelo/model-identity/v1``;
2. ``config.json``, parsed and written again as canonical JSON (keys sorted, no spaces, ASCII);
3. one byte: 1 when queries and keys are normalised, else 0;
4. the number of tensors, as decimal ASCII; then for each tensor in order of its name: the name,
   the dtype as safetensors spells it, the shape as decimal numbers joined by ``,``, the raw bytes;
5. the bytes of ``tokenizer.json``;
6. the chat template in effect, UTF-8, or nothing when there is none;
7. the special tokens a template may print, and the ids that end a text, as canonical JSON.

Field 4 makes the identity independent of how the weights are spread over files.

The digest is computed anew at every load. Storing it beside the model, keyed by sizes and
modification times, would let whoever can write to the disk forge both. For the same reason the
directory must lie on storage that the untrusted host cannot change while the model is in use
(memory, or a disk with verified integrity): weights are read through a memory map.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tee_runner.decoder.config import DecoderConfig
from tee_runner.models.checkpoint import Checkpoint
from tee_runner.models.families import parse_config
from tee_runner.models.json_file import read_bytes, read_json_object
from tee_runner.models.progress import Progress, no_progress
from tee_runner.models.tokenizer import Tokenizer

DOMAIN: Final = b"gelo/model-identity/v1"
_CHUNK: Final = 1 << 24
# Not released once it was read: rows of it that are fetched from the disk again show which they are.
_INDEXED: Final = "embed_tokens.weight"


def model_identity(directory: Path, *, progress: Progress = no_progress) -> bytes:
    """The 32-byte identity of the model in ``directory``. Raises ``ModelError`` when it is malformed."""
    values = read_json_object(directory / "config.json")
    return compute_identity(
        directory,
        values=values,
        config=parse_config(values),
        checkpoint=Checkpoint(directory),
        tokenizer=Tokenizer(directory),
        progress=progress,
    )


def compute_identity(
    directory: Path,
    *,
    values: Mapping[str, Any],
    config: DecoderConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    progress: Progress = no_progress,
) -> bytes:
    """The 32-byte identity of a model whose parts are open already; ``values`` is its config.json."""
    digest = _FieldDigest()
    digest.field(DOMAIN)
    digest.field(_canonical_json(values))
    digest.field(bytes([config.qk_norm]))
    names = list(checkpoint)
    total = sum(checkpoint.entry(name).nbytes for name in names)
    done = 0
    digest.field(str(len(names)).encode())
    for name in names:
        entry = checkpoint.entry(name)
        digest.field(name.encode())
        digest.field(entry.dtype.encode())
        digest.field(",".join(map(str, entry.shape)).encode())
        digest.field(checkpoint.raw(name))
        if not name.endswith(_INDEXED):
            checkpoint.release(name)
        done += entry.nbytes
        progress("identity", done, total)
    digest.field(read_bytes(directory / "tokenizer.json"))
    digest.field(tokenizer.chat_template.source.encode() if tokenizer.chat_template else b"")
    digest.field(
        _canonical_json({"special_tokens": tokenizer.special_tokens, "eos_ids": sorted(tokenizer.eos_ids)})
    )
    return digest.finish()


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


class _FieldDigest:
    """SHA-256 over length-prefixed fields."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def field(self, data: bytes | memoryview) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        for start in range(0, len(data), _CHUNK):
            self._hash.update(data[start : start + _CHUNK])

    def finish(self) -> bytes:
        return self._hash.digest()
