"""Schemes that the service does not offer, for the attacks only.

:class:`Mixed` is GELO in plain NumPy with everything that the paper varies as a parameter: shield rows
by number or as a fraction of the rows, their energy, and a mask that need not be orthogonal.
:func:`left_in_runner` keeps chosen layers off the wire, whatever the scheme.

Secret bits come from the session's streams, as in the service. The wire is float16, which limits what
comes back through an ill-conditioned mask: see :class:`MixOptions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import Op
from tee_runner.protection.base import (
    OPERAND_LIMIT,
    Float32,
    ForwardSession,
    Linear,
    MaskOptions,
    Protection,
    require_finite,
)
from tee_runner.protection.gaussian import standard_normals
from tee_runner.protection.gelo.base import mask_blocks
from tee_runner.protection.gelo.haar import haar_matrix
from tee_runner.protection.rng import SecretKey, SecretStream
from tee_runner.worker.transport import Transport

Float64 = NDArray[np.float64]
_OPS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """What hides n data rows.

    ``shield_rows`` plus ⌈``shield_fraction`` · n⌉ Gaussian rows of expected norm ``shield_energy`` times
    the mean norm of the data rows. ``condition_number`` κ of the mask: 1 is Haar-orthogonal; above, A =
    P·diag(σ)·Qᵀ with P, Q Haar and σ log-spaced from 1/√κ to √κ.

    The operand is float16, and the rounding of the shield is spread over the data: measured on
    SmolLM2-135M, a product comes back to 0.3 % at 30 times the energy, to 4 % with κ = 50 as well.
    """

    shield_rows: int = 0
    shield_fraction: float = 0.0
    shield_energy: float = 4.0
    condition_number: float = 1.0

    def shield(self, n: int) -> int:
        """Shield rows for n data rows."""
        # A fraction such as 0.14 of 50 rows is 7, not 8 because of its last bit.
        return self.shield_rows + math.ceil(round(self.shield_fraction * n, 9))

    def parameters(self) -> dict[str, int | float | str]:
        """What an attacker knows of it."""
        return {
            "shield_rows": self.shield_rows,
            "shield_fraction": self.shield_fraction,
            "shield_energy": self.shield_energy,
            "condition_number": self.condition_number,
        }


class Mixed(Protection):
    """A·[H; S] with one dense A per block of rows. Subclasses, see :func:`mixed`, have their options."""

    options: ClassVar[MixOptions] = MixOptions()

    def __init__(
        self, transport: Transport, *, masks: MaskOptions | None = None, key: SecretKey | None = None
    ) -> None:
        super().__init__(transport, masks=masks)
        key = key or SecretKey()
        self.mask_stream = key.stream("mask")
        self.shield_stream = key.stream("shield")

    @classmethod
    def parameters(cls) -> dict[str, int | float | str]:
        """See :meth:`Protection.parameters`."""
        return cls.options.parameters()

    @classmethod
    def operand_rows(cls, counts: Sequence[int]) -> int:
        """See :meth:`Protection.operand_rows`. A shared block has at most as many rows as single ones."""
        return sum(n + cls.options.shield(n) for n in counts if n)

    def forward_session(self) -> ForwardSession:
        """See :meth:`Protection.forward_session`."""
        return _MixedSession(self)

    def wipe(self) -> None:
        """Step the streams, so that no used secret can be remade."""
        self.mask_stream.ratchet()
        self.shield_stream.ratchet()


class _MixedSession(ForwardSession):
    def __init__(self, protection: Mixed) -> None:
        self._protection = protection
        self._masks: dict[tuple[int, int], tuple[Float64, Float64]] = {}

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        protection, options = self._protection, self._protection.options
        blocks = mask_blocks(counts, shared_decode=protection.masks.shared_decode)
        shields = [options.shield(n) for _, n in blocks]
        total = len(rows) + sum(shields)
        operand = protection.operand(weight, total)
        undo: list[tuple[Float64, Float64]] = []
        row = place = 0
        for (first, n), k in zip(blocks, shields, strict=True):
            mask, inverse = self._mask(first, n, n + k)
            data = rows[row : row + n].astype(np.float64)
            scales = power_of_two_scales(data)
            data *= scales[:, None]
            mean = float(np.linalg.norm(data, axis=1).mean())
            sigma = options.shield_energy * mean / math.sqrt(weight.d_in)
            shield = standard_normals(protection.shield_stream, k * weight.d_in).reshape(k, weight.d_in)
            scale = _operand_scale(n, k, sigma, math.sqrt(options.condition_number))
            mixed = scale * (mask @ np.concatenate([data, sigma * shield]))
            operand[place : place + n + k] = mixed.astype(np.float16).view(np.uint16)
            undo.append((inverse[:n] / scale, scales))
            row += n
            place += n + k
        # Float64, and a private copy: the worker could change what is read twice.
        result = protection.exchange(weight, total).astype(np.float64)
        require_finite(not bool(np.isfinite(result).all()), weight)
        row = place = 0
        for back, scales in undo:
            n, s = back.shape
            out[row : row + n] = (back @ result[place : place + s]) / scales[:, None]
            row += n
            place += s
        if protection.masks.per_offload:
            self._wipe_masks()

    def _mask(self, first: int, n: int, s: int) -> tuple[Float64, Float64]:
        pair = self._masks.get((first, n))
        if pair is None:
            kappa = self._protection.options.condition_number
            pair = self._masks[first, n] = draw_mask(self._protection.mask_stream, s, kappa)
        return pair

    def wipe(self) -> None:
        """See :meth:`ForwardSession.wipe`."""
        self._wipe_masks()
        self._protection.wipe()

    def _wipe_masks(self) -> None:
        for pair in self._masks.values():
            for matrix in pair:
                matrix.fill(0.0)
        self._masks.clear()


def mixed(name: str, options: MixOptions) -> type[Mixed]:
    """The scheme ``name`` with ``options``."""
    return type("Mixed", (Mixed,), {"name": name, "options": options})


def draw_mask(stream: SecretStream, s: int, condition_number: float) -> tuple[Float64, Float64]:
    """A secret A ``(s, s)`` of that condition number, and its inverse. See :class:`MixOptions`."""
    left = _haar(stream, s)
    if condition_number == 1.0:
        return left, left.T.copy()
    right = _haar(stream, s)
    spread = math.log(condition_number) / 2.0
    singular = np.exp(np.linspace(spread, -spread, s)) if s > 1 else np.ones(1)
    return (left * singular) @ right.T, (right / singular) @ left.T


def _haar(stream: SecretStream, s: int) -> Float64:
    return haar_matrix(standard_normals(stream, s * s), s).astype(np.float64)


def power_of_two_scales(rows: NDArray[np.floating[Any]]) -> Float64:
    """Powers of two ``(n,)`` that bring each row's norm into [1, 2); 1 for a zero row."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    _, exponents = np.frexp(norms)
    return np.where(norms > 0.0, np.ldexp(1.0, 1 - exponents), 1.0)


def _operand_scale(n: int, k: int, sigma: float, stretch: float) -> float:
    """A power of two that keeps A·[H; S] in f16: ``stretch`` is A's largest singular value.

    A column of [H; S] has norm at most 2·√n in its data part and, but for a chance below 2⁻³²
    each, 6.8·σ·√k in its shield part.
    """
    bound = stretch * math.sqrt(4.0 * n + k * (6.8 * sigma) ** 2)
    return 2.0 ** math.floor(math.log2(OPERAND_LIMIT / bound))


def left_in_runner(base: type[Protection], *, first_layers: int, last: bool) -> type[Protection]:
    """``base`` with some products computed in the runner: they never reach the worker.

    Those of the first ``first_layers`` layers and, with ``last``, of the last layer and the LM head.
    """

    class LeftInRunner(base):  # type: ignore[misc, valid-type]
        def provision(self, weights: Sequence[Linear], *, probes: int = 0) -> None:
            """See :meth:`Protection.provision`."""
            super().provision(weights, probes=probes)
            layers = (len(weights) - 1) // len(_OPS)
            kept = set(range(first_layers * len(_OPS)))
            if last:
                kept |= set(range((layers - 1) * len(_OPS), len(weights)))
            self._kept_ids = {w.weight_id for i, w in enumerate(weights) if i in kept}
            self._kept_values: dict[int, Float32] = {}

        def forward_session(self) -> ForwardSession:
            """See :meth:`Protection.forward_session`."""
            return _PartlyLocal(super().forward_session(), self._kept_ids, self._kept_values)

    LeftInRunner.name = f"{base.name}, layers in the runner"
    return LeftInRunner


class _PartlyLocal(ForwardSession):
    """Products of the weights ``kept`` here, all others by ``inner``. ``values`` caches weights."""

    def __init__(self, inner: ForwardSession, kept: set[int], values: dict[int, Float32]) -> None:
        self._inner, self._kept, self._values = inner, kept, values

    def linear(self, weight: Linear, rows: Float32, counts: Sequence[int], out: Float32) -> None:
        if weight.weight_id in self._kept:
            np.matmul(rows, _values(self._values, weight).T, out=out)
        else:
            self._inner.linear(weight, rows, counts, out)

    def wipe(self) -> None:
        """See :meth:`ForwardSession.wipe`."""
        self._inner.wipe()


def _values(cache: dict[int, Float32], weight: Linear) -> Float32:
    """A weight's values ``(d_out, d_in)`` float32.

    Raises:
        ValueError: the runner has no copy of it.
    """
    values = cache.get(weight.weight_id)
    if values is None:
        if weight.load is None:
            raise ValueError(f"{weight.name} cannot be multiplied in the runner without its values")
        values = cache[weight.weight_id] = weight.load().astype(np.float32)
    return values
