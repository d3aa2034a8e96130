"""Mask families beside a plain memory copy and a BLAS product, all in one run.

python bench/masks.py [--repeats 7] [--families gelo-haar,gelo-hd3,gelo-dct4] [--json FILE]

Per family and shape: drawing A, mixing (data rows in, float16 operand out) and unmixing (the
worker's float32 answer in, data rows out). Bytes are what has to be read and written: the rows,
shield rows included, and the operand or the answer. "copy ms" copies an array so large that it
reads and writes as many bytes as apply and unapply together; "x operand" compares both with copying
the float16 operand twice. Each sequence has n = s - 8 data rows; HD3 has s a power of two, the next
one is taken where the shape's s is none. Drawing is medianed over fewer repeats where it is slow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from tee_runner.memory import on_lines
from tee_runner.protection.gaussian import fill_normals
from tee_runner.protection.gelo.base import SHIELD_ROWS, GeloProtection
from tee_runner.protection.gelo.dct4 import Dct4
from tee_runner.protection.gelo.haar import Haar
from tee_runner.protection.gelo.hd3 import Hd3
from tee_runner.protection.gelo.tiles import shield_size
from tee_runner.protection.rng import SecretKey
from tee_runner.worker.transport import Transport

FAMILIES: dict[str, type[GeloProtection]] = {family.name: family for family in (Haar, Hd3, Dct4)}
# (s, d); the first is one decode step: a single data row.
DECODE = (9, 2560)
SHAPES = (DECODE, (16, 2560), (256, 2560), (2056, 2560), (4096, 2560), (2056, 9728))
COLUMNS = (
    "family", "n", "s", "d", "sample ms", "apply ms", "apply GB/s", "unapply ms", "unapply GB/s", "copy ms",
    "x copy", "x operand", "GEMM ms",
)  # fmt: skip
_ENOUGH_S = 2.0


class NoWorker(Transport):
    """Masks are measured without a worker."""

    def operand(self, rows: int, d_in: int) -> Any:
        raise NotImplementedError

    def exchange(self, weight_id: int, rows: int, d_in: int, d_out: int) -> Any:
        raise NotImplementedError

    def operand_words(self, rows: int, d_in: int) -> Any:
        raise NotImplementedError

    def exchange_words(self, weight_id: int, rows: int, d_in: int, d_out: int) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""


def clocked(action: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1e3


def middle(action: Callable[[], object], repeats: int) -> float:
    """Median milliseconds after one warm-up; short actions are repeated more often."""
    action()  # compiles
    first = clocked(action)
    if first > _ENOUGH_S * 1e3:
        return first
    count = max(repeats, min(200, int(20 / max(first, 1e-3))))
    return statistics.median(clocked(action) for _ in range(count))


def measure(family: type[GeloProtection], s: int, d: int, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    key = SecretKey()
    protection = family(NoWorker(), key=key)
    n = s - SHIELD_ROWS
    masks = [protection.new_mask(min(n, 8))]  # imports and tables are not part of a draw
    started = time.perf_counter()

    def draw() -> None:
        masks[0] = protection.new_mask(n)

    sample = clocked(draw)
    if time.perf_counter() - started < _ENOUGH_S:
        sample = middle(draw, repeats)
    mask = masks[0]
    generator = np.random.default_rng(s)
    rows, result, out = (on_lines((count, d), np.float32) for count in (n, mask.s, n))
    for array in (rows, result):
        generator.standard_normal(dtype=np.float32, out=array)
    normals = on_lines(shield_size(n, mask.s, d), np.float32)
    fill_normals(key.stream("bench"), normals)
    scales = np.ones(n, np.float32)
    operand = on_lines((mask.s, d), np.uint16)
    operand.fill(0)
    sigma, one = np.float32(0.1), np.float32(1.0)
    apply_bytes = 4 * mask.s * d + operand.nbytes
    unapply_bytes = result.nbytes + out.nbytes
    source, target = (on_lines((apply_bytes + unapply_bytes) // 2, np.uint8) for _ in range(2))
    copied = on_lines(operand.shape, np.uint16)
    for array in (source, target, copied):
        array.fill(1)

    apply = middle(lambda: mask.apply(rows, scales, normals, sigma, one, operand), repeats)
    unapply = middle(lambda: mask.unapply(result, scales, one, out), repeats)
    copy = middle(lambda: np.copyto(target, source), repeats)
    operand_copy = middle(lambda: np.copyto(copied, operand), repeats)
    row = {
        "family": family.name, "n": n, "s": mask.s, "d": d, "sample ms": sample,
        "apply ms": apply, "apply GB/s": apply_bytes / apply / 1e6,
        "unapply ms": unapply, "unapply GB/s": unapply_bytes / unapply / 1e6,
        "copy ms": copy, "x copy": (apply + unapply) / copy,
        "x operand": (apply + unapply) / 2 / operand_copy,
    }  # fmt: skip
    if family is Haar:
        matrix = generator.standard_normal((mask.s, mask.s), dtype=np.float32)
        row["GEMM ms"] = middle(lambda: np.matmul(matrix, result), repeats)
    mask.wipe()
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    names = arguments.families.split(",")
    rows = [measure(FAMILIES[name], s, d, arguments.repeats) for s, d in SHAPES for name in names]
    report.show("Masks; gelo-hd3 at the next power of two", COLUMNS, rows)
    report.write(arguments.json, rows)


if __name__ == "__main__":
    main()
