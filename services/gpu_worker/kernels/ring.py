"""WGSL source of the kernels for products modulo 2^32; see :mod:`gpu_worker.kernels.gemm` for the method.

All compute ``C[m, n] = sum_k A[m, k] * B[k, n]`` from uint32 and int8 factors in wrapping 32-bit arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.kernels.gemm import TILE_K, TILE_N, complete, lines, tiled_write

RING_ROWS = (1, 2, 4, 8, 16)
RING_LANES = 32
RING_SLICES = 8
RING_TILE_M = 64

# Vectors of 16 weights that a thread has in flight; 2 and 8 are slower for most shapes on a large GPU.
_UNROLL = 4

# Rows whose partial sums the slices exchange at a time.
_EXCHANGED_ROWS = 4
_OPERAND_ITEMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSkinnyKernel:
    """Few rows, 128 columns a workgroup; ``rows`` at most, one of ``RING_ROWS``."""

    rows: int

    @property
    def threads(self) -> int:
        """Threads of one workgroup."""
        return RING_LANES * RING_SLICES

    @property
    def group_columns(self) -> int:
        """Columns of one workgroup."""
        return RING_LANES * 4

    @property
    def chunk(self) -> int:
        """How much of k goes through workgroup memory at once; k need not be a multiple of it."""
        return 4 * RING_SLICES * _UNROLL

    @property
    def scratch(self) -> int:
        """Workgroup memory in vec4<u32>: two operand chunks, later the sums of some rows of every slice."""
        exchanged = min(self.rows, _EXCHANGED_ROWS) * RING_SLICES * RING_LANES
        return max(2 * self.rows * self.chunk // 4, exchanged)

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory in bytes."""
        return 16 * self.scratch

    def source(self) -> str:
        """The complete WGSL.

        Raises:
            ValueError: a parameter that the template does not support.
        """
        if self.rows not in RING_ROWS:
            raise ValueError("rows must be 1, 2, 4, 8 or 16")
        staged = range(-(-self.rows * self.chunk // 4 // self.threads))
        exchanged = min(self.rows, _EXCHANGED_ROWS)
        return complete(
            "ring_skinny.wgsl",
            rows=self.rows,
            slices=RING_SLICES,
            lanes=RING_LANES,
            unroll=_UNROLL,
            exchanged=exchanged,
            scratch=self.scratch,
            threads=self.threads,
            declare_sums=lines(f"var c{r} = vec4<u32>(0u);" for r in range(self.rows)),
            declare_operand=lines(f"var next_y{i} = vec4<u32>(0u);" for i in staged),
            declare_weights=lines(f"var next_w{u} = vec4<u32>(0u);" for u in range(_UNROLL)),
            fetch_operand=lines(
                f"next_y{i} = operand_item(thread + {i}u * THREADS, following);" for i in staged
            ),
            fetch_weights=lines(
                f"next_w{u} = weight[min(first_quad + {u}u, last_quad) * vectors + vector];"
                for u in range(_UNROLL)
            ),
            stage_operand=lines(f"stage_operand(next_y{i}, thread + {i}u * THREADS, at);" for i in staged),
            take_weights=lines(f"let w{u} = next_w{u};" for u in range(_UNROLL)),
            multiply=lines(_skinny_step(u, self.rows) for u in range(_UNROLL)),
            write_sums=lines(_skinny_write(first, exchanged) for first in range(0, self.rows, exchanged)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTiledKernel:
    """Any number of rows, in tiles of 64 rows by 128 columns; twice the rows are slower."""

    @property
    def threads(self) -> int:
        """Threads of one workgroup, 8 x 8 outputs each."""
        return (RING_TILE_M // 8) * (TILE_N // 8)

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory in bytes."""
        return 16 * (self._scratch_a + self._scratch_b)

    @property
    def _scratch_a(self) -> int:
        return TILE_K * (RING_TILE_M // 4 + 1)

    @property
    def _scratch_b(self) -> int:
        return TILE_K * TILE_N // 16

    def source(self) -> str:
        """The complete WGSL."""
        stride = self.threads // TILE_K
        items = [(i, f"quad + {i * stride}u") for i in range(_OPERAND_ITEMS)]
        return complete(
            "ring_tiled.wgsl",
            tile_m=RING_TILE_M,
            threads=self.threads,
            scratch_a=self._scratch_a,
            scratch_b=self._scratch_b,
            declare_sums=lines(f"var c{r}_{v} = vec4<u32>(0u);" for r in range(8) for v in range(2)),
            declare_operand=lines(f"var next_y{i} = vec4<u32>(0u);" for i, _ in items),
            fetch_operand=lines(
                f"next_y{i} = operand_rows(m0 + 4u * ({item}), k0 + k);" for i, item in items
            ),
            stage_operand=lines(f"tile_a[k * PITCH_A + {item}] = next_y{i};" for i, item in items),
            multiply=lines(_tiled_step(j, component) for j, component in enumerate("xyzw")),
            write_sums=lines(tiled_write(row, RING_TILE_M) for row in range(8)),
        )


RingKernel = RingSkinnyKernel | RingTiledKernel


def _skinny_step(u: int, rows: int) -> str:
    widened = [f"let b{j} = widen(w{u}.{component});" for j, component in enumerate("xyzw")]
    products = [
        lines([
            f"let y{r} = scratch[at + {r}u * CHUNK_QUADS + {u}u];",
            *(f"c{r} += y{r}.{component} * b{j};" for j, component in enumerate("xyzw")),
        ])
        for r in range(rows)
    ]  # fmt: skip
    return lines(["{", *widened, *products, "}"])


def _skinny_write(first: int, exchanged: int) -> str:
    stores = [f"scratch[({r}u * SLICES + slice) * LANES + lane] = c{first + r};" for r in range(exchanged)]
    write = f"write_rows({first}u, group.y, group.x * LANES, thread);"
    return lines(["workgroupBarrier();", *stores, "workgroupBarrier();", write])


def _tiled_step(j: int, component: str) -> str:
    products = [
        f"c{half * 4 + i}_{v} += a{half}.{row} * b{v};"
        for half in range(2)
        for i, row in enumerate("xyzw")
        for v in range(2)
    ]
    return lines([
        "{",
        f"let a0 = tile_a[(quad_k * 4u + {j}u) * PITCH_A + ty];",
        f"let a1 = tile_a[(quad_k * 4u + {j}u) * PITCH_A + ty + {RING_TILE_M // 8}u];",
        f"let b0 = widen(w0.{component});",
        f"let b1 = widen(w1.{component});",
        *products,
        "}",
    ])  # fmt: skip
