"""Complex Fourier transforms of any length down the rows of a tile.

A complex row is ``width`` real parts followed by ``width`` imaginary parts (float32), so that a
transform of N points is one of N vectors. Stockham's self-sorting passes (radix 8, 5, 7, 4, 3, 2)
go back and forth between two tiles. A prime factor p above 7 is a product with the (p-1)/2-square
matrices of its cosines and sines, folded by symmetry, O(p²). Lengths with a prime factor above
:data:`LARGEST_PRIME` are a convolution with a chirp at a smooth length (Bluestein 1970).

Plans depend on the length alone, are public, and are cached.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numba
import numpy as np
from numpy.typing import NDArray

from tee_runner.simd import LANES, Emitter, emitted
from tee_runner.vector import matmul_add

_RADICES = (8, 7, 5, 4, 3, 2)
_LINE = LANES * 4

# Above this two transforms of twice the length and more are cheaper than the product.
LARGEST_PRIME = 600

_Ints: TypeAlias = NDArray[np.int64]
_Floats: TypeAlias = NDArray[np.float32]
# Radix of each pass; where its twiddles and its matrices begin (in floats); those. Then 2×2 matrices
# (rows, 4) applied before, between and after the two transforms of Bluestein's method; or empty.
Plan = tuple[_Ints, _Ints, _Ints, _Floats, _Floats, _Floats, _Floats, _Floats]


def factors(length: int) -> list[int]:
    """Radices whose product is ``length``, primes above 7 last, where no twiddles are needed."""
    found = []
    for radix in _RADICES:
        while length % radix == 0:
            # 16 = 4·4 is better than 8·2.
            if radix == 8 and length % 16 == 0 and length % 32 != 0 and length // 16 % 2:
                break
            found.append(radix)
            length //= radix
    prime = 11
    while length > 1:
        if prime * prime > length:
            prime = length
        while length % prime == 0:
            found.append(prime)
            length //= prime
        prime += 2
    return found


@functools.lru_cache(maxsize=32)
def plan(length: int) -> Plan:
    """The plan for a transform of ``length`` points."""
    if max(factors(length), default=1) <= LARGEST_PRIME:
        none = np.zeros((0, 4), np.float32)
        return (*_direct(length), none, none, none)
    padded = min(b << max(0, (-(-(2 * length - 1) // b) - 1).bit_length()) for b in (1, 3, 5))
    # X[k] = w[k]·Σ x[j]·w[j]·conj(w[k-j]), w[j] = exp(-πi·j²/length); squares modulo 2·length.
    j = np.arange(length)
    chirp = np.exp(-1j * np.pi * (j * j % (2 * length)) / length)
    kernel = np.zeros(padded, np.complex128)
    kernel[:length] = chirp.conj()
    kernel[padded - length + 1 :] = chirp[:0:-1].conj()
    # The inverse transform is the conjugate of the transform of the conjugate.
    response = np.fft.fft(kernel) / padded
    c, s, g, h = chirp.real, chirp.imag, response.real, response.imag
    tables = (np.stack(m, axis=1) for m in ((c, -s, s, c), (g, -h, -h, -g), (c, s, s, -c)))
    before, between, after = (np.ascontiguousarray(table, dtype=np.float32) for table in tables)
    return (*_direct(padded), before, between, after)


def _direct(length: int) -> tuple[_Ints, _Ints, _Ints, _Floats, _Floats]:
    """Stockham passes for ``length`` points."""
    radices = factors(length)
    twiddle_starts, matrix_starts = [], []
    twiddles: list[NDArray[np.float32]] = []
    matrices: list[NDArray[np.float32]] = []
    used = stored = 0
    left = length
    for radix in radices:
        left //= radix
        # For each p < left the powers k = 1 … radix - 1 of exp(-2πi·p/(left·radix)).
        exponents = np.arange(left)[:, None] * np.arange(1, radix) % (left * radix)
        angles = -2.0 * np.pi * exponents / (left * radix)
        part = np.stack([np.cos(angles), np.sin(angles)], axis=2).astype(np.float32).ravel()
        twiddle_starts.append(used)
        twiddles.append(part)
        used += part.size
        matrix_starts.append(stored)
        if radix > _RADICES[0]:
            half = radix // 2
            pairs = np.outer(np.arange(1, half + 1), np.arange(1, half + 1)) % radix
            for function in (np.cos, np.sin):
                block = np.zeros((-(-half // 4) * 4, half), np.float32)
                block[:half] = function(2.0 * np.pi * np.arange(radix) / radix)[pairs]
                matrices.append(block.ravel())
                stored += block.size
    empty = np.zeros(1, np.float32)
    return (
        np.array(radices, np.int64),
        np.array(twiddle_starts, np.int64),
        np.array(matrix_starts, np.int64),
        np.concatenate([*twiddles, empty]),
        np.concatenate([*matrices, empty]),
    )


def _small(e: Emitter, values: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The transform of 2, 3, 4, 5, 7 or 8 complex vectors."""
    builder, n = e.builder, len(values)

    def add(a: Any, b: Any) -> Any:
        return builder.fadd(a[0], b[0]), builder.fadd(a[1], b[1])

    def sub(a: Any, b: Any) -> Any:
        return builder.fsub(a[0], b[0]), builder.fsub(a[1], b[1])

    if n == 1:
        return values
    if n % 2 == 0:
        even, odd = _small(e, values[0::2]), _small(e, values[1::2])
        root = e.constant(0.5**0.5)
        first, second = [], []
        for k in range(n // 2):
            re, im = odd[k]
            # exp(-2πi·k/n) for n = 2, 4, 8: eighths of a turn.
            eighth = k * 8 // n
            if eighth == 1:
                turned = builder.fmul(builder.fadd(re, im), root), builder.fmul(builder.fsub(im, re), root)
            elif eighth == 2:
                turned = im, builder.fneg(re)
            elif eighth == 3:
                turned = (
                    builder.fmul(builder.fsub(im, re), root),
                    builder.fneg(builder.fmul(builder.fadd(re, im), root)),
                )
            else:
                turned = re, im
            first.append(add(even[k], turned))
            second.append(sub(even[k], turned))
        return first + second
    half = n // 2
    sums = [add(values[j], values[n - j]) for j in range(1, half + 1)]
    differences = [sub(values[j], values[n - j]) for j in range(1, half + 1)]
    total = values[0]
    for pair in sums:
        total = add(total, pair)
    out = [total] + [total] * (n - 1)
    for k in range(1, half + 1):
        even_part, odd_part = values[0], (e.constant(0.0), e.constant(0.0))
        for j in range(1, half + 1):
            angle = 2.0 * np.pi * (j * k % n) / n
            cosine, sine = e.constant(np.cos(angle)), e.constant(np.sin(angle))
            even_part = tuple(e.fma(sums[j - 1][i], cosine, even_part[i]) for i in range(2))
            odd_part = tuple(e.fma(differences[j - 1][i], sine, odd_part[i]) for i in range(2))
        turned = odd_part[1], builder.fneg(odd_part[0])
        out[k], out[n - k] = add(even_part, turned), sub(even_part, turned)
    return out


def _times(e: Emitter, value: tuple[Any, Any], address: Any) -> tuple[Any, Any]:
    """``value`` times the complex number at ``address``."""
    re, im = value
    c, s = e.spread(address), e.spread(e.offset(address, 1, 4))
    builder = e.builder
    return (
        e.fma(re, c, builder.fneg(builder.fmul(im, s))),
        e.fma(re, s, builder.fmul(im, c)),
    )


def _radix_pass(radix: int, twiddled: bool) -> Any:
    def emit(
        e: Emitter, source: Any, step: Any, target: Any, target_step: Any, plane: Any, twiddles: Any
    ) -> None:
        values = []
        for j in range(radix):
            address = e.offset(source, j, step)
            values.append((e.load(address), e.load(e.builder.add(address, plane))))
        for k, value in enumerate(_small(e, values)):
            re, im = _times(e, value, e.offset(twiddles, k - 1, 8)) if twiddled and k else value
            address = e.offset(target, k, target_step)
            e.store(re, address)
            e.store(im, e.builder.add(address, plane))

    return emitted(6, emit)


_pass2, _pass3, _pass4, _pass5, _pass7, _pass8 = (_radix_pass(r, True) for r in (2, 3, 4, 5, 7, 8))
_end2, _end3, _end4, _end5, _end7, _end8 = (_radix_pass(r, False) for r in (2, 3, 4, 5, 7, 8))


def _fold(e: Emitter, first: Any, second: Any, total: Any, sums: Any, differences: Any) -> None:
    a, b = e.load(first), e.load(second)
    both = e.builder.fadd(a, b)
    e.store(both, sums)
    e.store(e.builder.fsub(a, b), differences)
    e.store(e.builder.fadd(e.load(total), both), total)


def _combine(
    e: Emitter, even: Any, odd: Any, plane: Any, first: Any, second: Any, twiddle: Any, opposite: Any
) -> None:
    """Outputs k and p - k from their cosine and sine sums."""
    builder = e.builder
    cr, ci = e.load(even), e.load(builder.add(even, plane))
    sr, si = e.load(odd), e.load(builder.add(odd, plane))
    upper = builder.fadd(cr, si), builder.fsub(ci, sr)
    lower = builder.fsub(cr, si), builder.fadd(ci, sr)
    for value, address, factor in ((upper, first, twiddle), (lower, second, opposite)):
        re, im = _times(e, value, factor)
        e.store(re, address)
        e.store(im, builder.add(address, plane))


_fold16, _combine16 = emitted(5, _fold), emitted(7, _combine)


@numba.njit(nogil=True, cache=True)
def _copy_floats(source: Any, target: Any, count: int) -> None:
    for i in range(count):
        target[i] = source[i]


@numba.njit(nogil=True, cache=True)
def _prime(
    x: Any, start: int, step: int, y: Any, target: int, target_step: int, width: int, radix: int,
    twiddles: int, matrices: Any, space: Any,
) -> None:  # fmt: skip
    """One transform of ``radix`` points; places and steps in floats, twiddles an address."""
    row = 2 * width
    half = radix // 2
    padded = (half + 3) // 4 * 4
    sums, differences = space.ctypes.data, space.ctypes.data + half * row * 4
    even = space[2 * half * row :]
    odd = even[padded * row :]
    base, out = x.ctypes.data, y.ctypes.data
    first = x[start : start + row]
    _copy_floats(first, y[target : target + row], row)
    for j in range(1, half + 1):
        a = base + (start + j * step) * 4
        b = base + (start + (radix - j) * step) * 4
        at = (j - 1) * row * 4
        for c in range(0, row * 4, _LINE):
            _fold16((a + c, b + c, out + target * 4 + c, sums + at + c, differences + at + c))
    for k in range(half):
        _copy_floats(first, even[k * row :], row)
    even[half * row : padded * row] = np.float32(0.0)
    odd[: padded * row] = np.float32(0.0)
    cosines = matrices.ctypes.data
    sines = cosines + padded * half * 4
    matmul_add(cosines, half, sums, row, even.ctypes.data, row, padded, half, row)
    matmul_add(sines, half, differences, row, odd.ctypes.data, row, padded, half, row)
    for k in range(1, half + 1):
        at = (k - 1) * row * 4
        upper = out + (target + k * target_step) * 4
        lower = out + (target + (radix - k) * target_step) * 4
        for c in range(0, width * 4, _LINE):
            _combine16(
                (even.ctypes.data + at + c, odd.ctypes.data + at + c, width * 4, upper + c, lower + c,
                 twiddles + (k - 1) * 8, twiddles + (radix - k - 1) * 8)
            )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def _vector_pass(
    source: int, step: int, target: int, target_step: int, width: int, radix: int, twiddles: int, end: bool
) -> None:
    plane = width * 4
    for c in range(0, plane, _LINE):
        a = (source + c, step, target + c, target_step, plane, twiddles)
        if end:
            if radix == 8:
                _end8(a)
            elif radix == 7:
                _end7(a)
            elif radix == 5:
                _end5(a)
            elif radix == 4:
                _end4(a)
            elif radix == 3:
                _end3(a)
            else:
                _end2(a)
        elif radix == 8:
            _pass8(a)
        elif radix == 7:
            _pass7(a)
        elif radix == 5:
            _pass5(a)
        elif radix == 4:
            _pass4(a)
        elif radix == 3:
            _pass3(a)
        else:
            _pass2(a)


def _turn_pair(e: Emitter, source: Any, plane: Any, matrix: Any, first: Any, second: Any) -> None:
    """(first, second) = matrix · (Re, Im)."""
    re, im = e.load(source), e.load(e.builder.add(source, plane))
    a, b, c, d = (e.spread(e.offset(matrix, i, 4)) for i in range(4))
    upper = e.fma(re, a, e.builder.fmul(im, b))
    lower = e.fma(re, c, e.builder.fmul(im, d))
    e.store(upper, first)
    e.store(lower, second)


turn_pair16 = emitted(5, _turn_pair)


@numba.njit(nogil=True, cache=True)
def turn_rows(source: Any, target: Any, width: int, matrices: Any) -> None:
    """Each complex row of ``target`` is the 2×2 matrix ``matrices`` (rows, 4) times ``source``'s."""
    row = width * 4
    for k in range(matrices.shape[0]):
        at, to = source.ctypes.data + 2 * k * row, target.ctypes.data + 2 * k * row
        matrix = matrices.ctypes.data + k * 16
        for c in range(0, row, _LINE):
            turn_pair16((at + c, row, matrix, to + c, to + row + c))


@numba.njit(nogil=True, cache=True)
def space_floats(passes: Any, width: int) -> int:
    """Working floats of a transform beside its two tiles: for its prime factors or its chirp."""
    radices, between = passes[0], passes[6]
    if between.shape[0]:
        return 4 * between.shape[0] * width
    largest = radices.max() if radices.size else 1
    return (4 * (largest // 2) + 6) * 2 * width if largest > 8 else 0


@numba.njit(nogil=True, cache=True)
def _stockham(x: Any, y: Any, width: int, length: int, passes: Any, space: Any) -> bool:
    """:func:`transform` by passes; ``space`` is used for prime factors only."""
    radices, twiddle_starts, matrix_starts, twiddles, matrices = passes
    row = 2 * width
    stride, left = 1, length
    swapped = False
    for i in range(radices.shape[0]):
        radix = radices[i]
        left //= radix
        step = stride * left * row
        for p in range(left):
            powers = twiddles.ctypes.data + (twiddle_starts[i] + p * 2 * (radix - 1)) * 4
            for q in range(stride):
                source, target = (q + stride * p) * row, (q + stride * radix * p) * row
                if radix > 8:
                    _prime(
                        x, source, step, y, target, stride * row, width, radix, powers,
                        matrices[matrix_starts[i] :], space,
                    )  # fmt: skip
                else:
                    _vector_pass(
                        x.ctypes.data + source * 4, step * 4, y.ctypes.data + target * 4,
                        stride * row * 4, width, radix, powers, left == 1,
                    )  # fmt: skip
        stride *= radix
        x, y = y, x
        swapped = not swapped
    return swapped


@numba.njit(nogil=True, cache=True)
def transform(x: Any, y: Any, width: int, length: int, passes: Any, space: Any) -> bool:
    """The unnormalised DFT of ``length`` complex rows in ``x``; True if it ended up in ``y``.

    ``x`` and ``y`` (2·length·width,) f32 are both overwritten; ``passes`` from :func:`plan`.
    """
    before, between, after = passes[5:]
    padded = between.shape[0]
    if padded == 0:
        return _stockham(x, y, width, length, passes[:5], space)
    size = 2 * padded * width
    a, b = space[:size], space[size : 2 * size]
    turn_rows(x, a, width, before)
    a[2 * length * width :] = np.float32(0.0)
    if _stockham(a, b, width, padded, passes[:5], space):
        a, b = b, a
    turn_rows(a, a, width, between)
    if _stockham(a, b, width, padded, passes[:5], space):
        a, b = b, a
    turn_rows(a, x, width, after)
    return False
