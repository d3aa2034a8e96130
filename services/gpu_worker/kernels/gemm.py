"""WGSL source of the matrix kernels: the templates beside this module, completed and unrolled.

WGSL has neither templates nor an unroll attribute, and an accumulator array that the driver fails to unroll
lands in memory instead of registers. So the templates hold everything that is written once, and this module
writes what must be repeated.

All kernels compute ``C[m, n] = sum_k A[m, k] * B[k, n]`` from f16 factors in f32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Literal, Protocol

SKINNY_ROWS = (4, 8, 16)
SKINNY_LANES = 32
SKINNY_UNROLL = 8
TILE_N = 128
TILE_K = 16
TILED_UNROLL = 4
REDUCE_THREADS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyKernel:
    """Few rows.

    Args:
        rows: operand rows at most, 4, 8 or 16.
        columns: columns per thread, 4 or 8.
        slices: slices of k per workgroup, 4 or 8.
        chunk: how much of k goes through workgroup memory at once; divides the padded k.
        f16: weights are stored as f16 instead of u32.
    """

    rows: int
    columns: int
    slices: int
    chunk: int
    f16: bool

    @property
    def threads(self) -> int:
        """Threads of one workgroup."""
        return SKINNY_LANES * self.slices

    @property
    def group_columns(self) -> int:
        """Columns of one workgroup."""
        return SKINNY_LANES * self.columns

    @property
    def scratch(self) -> int:
        """Workgroup memory in vec4<f32>: the operand chunk, later the sums of four rows of every slice."""
        operand = self.chunk * self.rows // 4
        return max(operand, self.slices * 4 * SKINNY_LANES * self.columns // 4)

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory in bytes."""
        return self.scratch * 16

    def source(self) -> str:
        """The complete WGSL.

        Raises:
            ValueError: a parameter that the template does not support.
        """
        if self.rows not in (4, 8, 16) or self.columns not in (4, 8) or self.slices not in (4, 8):
            raise ValueError("rows must be 4, 8 or 16, columns and slices 4 or 8")
        if self.chunk % (self.slices * SKINNY_UNROLL):
            raise ValueError(f"chunk must be a multiple of {self.slices * SKINNY_UNROLL}")
        vectors, quads = self.columns // 4, self.rows // 4
        return _complete(
            "skinny.wgsl",
            f16=self.f16,
            rows=self.rows,
            columns=self.columns,
            slices=self.slices,
            lanes=SKINNY_LANES,
            chunk=self.chunk,
            unroll=SKINNY_UNROLL,
            pack=f"Pack{self.columns}",
            scratch=self.scratch,
            threads=self.threads,
            declare_sums=_declare_sums(self.rows, vectors),
            load_weights=lines(f"let w{u} = weight[at + {u}u * packs];" for u in range(SKINNY_UNROLL)),
            multiply=lines(_skinny_step(u, quads, vectors) for u in range(SKINNY_UNROLL)),
            write_sums=lines(_skinny_write(quad, vectors) for quad in range(quads)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledKernel:
    """Any number of rows, in tiles of ``tile_m`` rows (64 or 128) by 128 columns.

    Args:
        tile_m: rows of one workgroup, 64 or 128.
        f16: weights are stored as f16 instead of u32.
    """

    tile_m: int
    f16: bool

    @property
    def threads(self) -> int:
        """Threads of one workgroup, 8 x 8 outputs each."""
        return (self.tile_m // 8) * (TILE_N // 8)

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory in bytes."""
        return 16 * (self._scratch_a + TILE_K * TILE_N // 4)

    @property
    def _scratch_a(self) -> int:
        return TILE_K * (self.tile_m // 4 + 1)

    def source(self) -> str:
        """The complete WGSL.

        Raises:
            ValueError: a tile that the template does not support.
        """
        if self.tile_m not in (64, 128):
            raise ValueError("tile_m must be 64 or 128")
        loads = [(i, f"thread + {i * self.threads}u") for i in range(TILE_K * TILE_N // 8 // self.threads)]
        first_k, next_k = "first_step * TILE_K", "(step + 1u) * TILE_K"
        at = "weight[weight_at({}, n0 / 8u, {})]"
        return _complete(
            "tiled.wgsl",
            f16=self.f16,
            tile_m=self.tile_m,
            unroll=TILED_UNROLL,
            threads=self.threads,
            scratch_a=self._scratch_a,
            scratch_b=TILE_K * TILE_N // 4,
            declare_sums=_declare_sums(8, 2),
            first_weights=lines(f"var next_w{i} = {at.format(first_k, item)};" for i, item in loads),
            next_weights=lines(f"next_w{i} = {at.format(next_k, item)};" for i, item in loads),
            stage_weights=lines(f"stage_weights(next_w{i}, {item});" for i, item in loads),
            multiply=lines(_tiled_step(u, self.tile_m) for u in range(TILED_UNROLL)),
            write_sums=lines(tiled_write(row, self.tile_m) for row in range(8)),
        )


Kernel = SkinnyKernel | TiledKernel


class GemmKernel(Protocol):
    """What the engines need to know of a kernel, of this module or of another."""

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory in bytes."""

    def source(self) -> str:
        """The complete WGSL."""


def reduce_source(number: Literal["f32", "u32"]) -> str:
    """WGSL that adds the splits of any kernel."""
    return complete("reduce.wgsl", threads=REDUCE_THREADS, number=number)


def lines(parts: Iterable[str]) -> str:
    """One statement a line."""
    return "\n".join(parts)


def _declare_sums(rows: int, vectors: int) -> str:
    return lines(f"var c{r}_{v} = vec4<f32>(0.0);" for r in range(rows) for v in range(vectors))


def _outer_product(quad: int, vectors: int) -> str:
    """Adds ``a{quad}`` (four rows) times ``b0...`` (``vectors`` times four columns) to the sums."""
    return lines(
        f"c{quad * 4 + j}_{v} = fma(vec4<f32>(a{quad}.{component}), b{v}, c{quad * 4 + j}_{v});"
        for j, component in enumerate("xyzw")
        for v in range(vectors)
    )


def _skinny_step(u: int, quads: int, vectors: int) -> str:
    halves = [f"low(w{u})", f"high(w{u})"] if vectors == 2 else [f"w{u}"]
    widened = [f"let b{v} = widen({half});" for v, half in enumerate(halves)]
    products = [
        f"let a{quad} = scratch[(k + {u}u) * QUADS + {quad}u];\n{_outer_product(quad, vectors)}"
        for quad in range(quads)
    ]
    return lines(["{", *widened, *products, "}"])


def _skinny_write(quad: int, vectors: int) -> str:
    stores = [
        f"scratch[((slice * 4u + {j}u) * LANES + lane) * VECTORS + {v}u] = c{quad * 4 + j}_{v};"
        for j in range(4)
        for v in range(vectors)
    ]
    write = f"write_quad({quad}u, group.y, group.x * LANES * VECTORS, thread);"
    return lines(["workgroupBarrier();", *stores, "workgroupBarrier();", write])


def _tiled_step(u: int, tile_m: int) -> str:
    row, column = f"(k + {u}u) * PITCH_A + ty", f"(k + {u}u) * PITCH_B + tx"
    factors = [
        f"let a0 = tile_a[{row}];",
        f"let a1 = tile_a[{row} + {tile_m // 8}u];",
        f"let b0 = tile_b[{column}];",
        f"let b1 = tile_b[{column} + {TILE_N // 8}u];",
    ]
    return lines(["{", *factors, _outer_product(0, 2), _outer_product(1, 2), "}"])


def tiled_write(row: int, tile_m: int) -> str:
    """Writes one of a thread's eight rows of sums."""
    half, j = divmod(row, 4)
    return f"write_row(m0 + {half * tile_m // 2 + j}u + ty * 4u, group.z, vector, c{row}_0, c{row}_1);"


def _complete(name: str, *, f16: bool, **values: object) -> str:
    storage = _read("storage_f16.wgsl" if f16 else "storage_u32.wgsl")
    return complete(name, enable="enable f16;" if f16 else "", storage=storage, **values)


def complete(name: str, **values: object) -> str:
    """The template ``name`` with ``values`` and what all kernels share filled in."""
    return Template(_read(name)).substitute(values, params=_read("params.wgsl"), raster=_read("raster.wgsl"))


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
