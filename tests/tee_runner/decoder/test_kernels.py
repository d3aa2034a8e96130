"""Norms, gated activations and per-layer inputs against float64 and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tee_runner.decoder import kernels
from tests.tee_runner.protection.doubles import SINGLE_ROUNDING, Float64

from .references import EPSILON, norm_tolerance, normals, rms_norm


@pytest.mark.parametrize("n", [1, 15, 16, 40])
@pytest.mark.parametrize("d", [1, 16, 100, 576, 2560])
def test_rms_norm(n: int, d: int) -> None:
    rows, weight = normals(n, d) * np.float32(30.0), normals(d, seed=2)
    out = np.empty_like(rows)
    kernels.rms_norm(rows, weight, EPSILON, out)
    np.testing.assert_allclose(out, rms_norm(rows, weight), rtol=norm_tolerance(d), atol=0)
    theirs = LlamaRMSNorm(d, eps=float(EPSILON))
    theirs.weight.data = torch.from_numpy(weight)
    np.testing.assert_allclose(
        out, theirs(torch.from_numpy(rows)).detach().numpy(), rtol=2 * norm_tolerance(d), atol=0
    )


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_rms_norm_of_small_and_large_rows(size: float) -> None:
    rows = normals(4, 64) * np.float32(size)
    rows[2] = 0.0
    out = np.empty_like(rows)
    kernels.rms_norm(rows, np.ones(64, np.float32), EPSILON, out)
    np.testing.assert_allclose(out, rms_norm(rows, np.ones(64)), rtol=norm_tolerance(64), atol=0)
    assert not out[2].any()


@pytest.mark.parametrize("d", [16, 100, 576])
def test_add_and_norm_keeps_the_residual(d: int) -> None:
    rows, delta, weight = normals(20, d), normals(20, d, seed=2), normals(d, seed=3)
    expected = rows + delta  # one float32 addition: the same bits
    out = np.empty_like(rows)
    kernels.add_and_norm(rows, delta, weight, EPSILON, out)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(out, rms_norm(expected, weight), rtol=norm_tolerance(d), atol=0)


def test_add_bias() -> None:
    rows, bias = normals(5, 37), normals(37, seed=2)
    expected = rows + bias
    kernels.add_bias(rows, bias)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("d", [1, 48, 1536])
def test_swiglu(n: int, d: int) -> None:
    gate_up = normals(n, 2 * d) * np.float32(6.0)
    serial, parallel = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    kernels.swiglu(gate_up, serial)
    kernels.swiglu_parallel(gate_up, parallel)
    gate, up = gate_up[:, :d].astype(np.float64), gate_up[:, d:].astype(np.float64)
    # exp at 2e-7 (3.4 roundings) and an addition, a division and a product.
    np.testing.assert_allclose(serial, gate / (1 + np.exp(-gate)) * up, rtol=7 * SINGLE_ROUNDING, atol=0)
    np.testing.assert_array_equal(serial, parallel)
    theirs = torch.nn.functional.silu(torch.from_numpy(gate_up[:, :d])) * torch.from_numpy(gate_up[:, d:])
    np.testing.assert_allclose(serial, theirs.numpy(), rtol=14 * SINGLE_ROUNDING, atol=0)


def test_swiglu_saturates() -> None:
    gates = np.array([-1e30, -500.0, -89.0, 0.0, 89.0, 500.0, 1e30], np.float32)
    gate_up = np.concatenate([gates, np.ones(7, np.float32)])[None]
    out = np.empty((1, 7), np.float32)
    kernels.swiglu(gate_up, out)
    np.testing.assert_array_equal(out[0, 3:], gates[3:])
    # Below -88 the sigmoid stays at e⁻⁸⁸, about 6e-39, instead of vanishing.
    assert (np.abs(out[0, :3]) <= np.abs(gates[:3]) * 7e-39).all()


def gelu_tanh(x: np.ndarray) -> Float64:
    wide = x.astype(np.float64)
    inner = np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)
    value: Float64 = 0.5 * wide * (1.0 + np.tanh(inner))
    return value


@pytest.mark.parametrize("n", [1, 17])
@pytest.mark.parametrize("d", [1, 48, 1536])
def test_geglu(n: int, d: int) -> None:
    gate_up = normals(n, 2 * d) * np.float32(1.5)
    serial, parallel = np.empty((n, d), np.float32), np.empty((n, d), np.float32)
    kernels.geglu(gate_up, serial)
    kernels.geglu_parallel(gate_up, parallel)
    gate, up = gate_up[:, :d], gate_up[:, d:].astype(np.float64)
    # exp's argument, up to some 20 in magnitude here, is off by three roundings of itself; what is
    # left is as for SiLU. The reference loses digits itself where 1 + tanh cancels.
    size = np.abs(gate * up)
    assert (np.abs(serial - gelu_tanh(gate) * up) <= (3 * 20 + 7) * SINGLE_ROUNDING * size).all()
    np.testing.assert_array_equal(serial, parallel)
    theirs = torch.nn.functional.gelu(torch.from_numpy(gate.copy()), approximate="tanh").numpy() * up
    assert (np.abs(serial - theirs) <= (3 * 20 + 14) * SINGLE_ROUNDING * size).all()
    other = np.ascontiguousarray(gate_up[:, d:])
    out = np.ascontiguousarray(gate)
    kernels.gelu_times(out, other, out)
    np.testing.assert_array_equal(out, serial)


def test_geglu_saturates() -> None:
    gates = np.array([-1e30, -500.0, -20.0, 0.0, 20.0, 500.0, 1e30], np.float32)
    out = np.empty((1, 7), np.float32)
    kernels.geglu(np.concatenate([gates, np.ones(7, np.float32)])[None], out)
    np.testing.assert_array_equal(out[0, 3:], gates[3:])
    assert (np.abs(out[0, :3]) <= np.abs(gates[:3]) * 7e-39).all()


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(cap: float) -> None:
    # Where the formula changes and around it, tiny, and far beyond the cap.
    sizes = np.concatenate([np.geomspace(1e-30, 1e30, 241), np.linspace(0.6, 0.65, 59) * cap])
    rows = np.stack([sizes, -sizes]).astype(np.float32)
    found = rows.copy()
    kernels.softcap(found, np.float32(cap))
    # Three roundings beside tanh's 4e-7 (6.7 roundings).
    expected = cap * np.tanh(rows.astype(np.float64) / cap)
    np.testing.assert_allclose(found, expected, rtol=10 * SINGLE_ROUNDING, atol=0)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_add_normed(inner: bool, outer: bool, factor: float) -> None:
    rows, delta = normals(5, 96), normals(5, 96, seed=2) * np.float32(40.0)
    post, norm, empty = normals(96, seed=3), normals(96, seed=4), np.empty(0, np.float32)
    added = rms_norm(delta, post) if inner else delta.astype(np.float64)
    expected = (rows + added) * np.float32(factor)
    tolerance = (norm_tolerance(96) + 3 * SINGLE_ROUNDING) * (np.abs(rows) + np.abs(added))
    out = np.full_like(rows, 7)
    kernels.add_normed(
        rows, delta, post if inner else empty, np.float32(factor), norm if outer else empty, EPSILON, out
    )
    assert (np.abs(rows - expected) <= tolerance).all()
    if outer:
        np.testing.assert_allclose(out, rms_norm(rows, norm), rtol=norm_tolerance(96))
    else:
        assert (out == 7).all()


def test_per_layer_inputs() -> None:
    n, layers, width = 3, 4, 16
    projected, embedded = normals(n, layers * width), normals(n, layers * width, seed=2)
    norm, out = normals(width, seed=3), np.empty((layers, n, width), np.float32)
    kernels.per_layer_inputs(
        projected.copy(), embedded, norm, np.float32(0.25), np.float32(0.5), EPSILON, out
    )
    scaled = (projected * np.float32(0.25)).reshape(n, layers, width)
    parts = rms_norm(scaled, norm), embedded.reshape(n, layers, width).astype(np.float64)
    tolerance = (norm_tolerance(width) + 3 * SINGLE_ROUNDING) * (np.abs(parts[0]) + np.abs(parts[1])) / 2
    assert (np.abs(out - (sum(parts) / 2).transpose(1, 0, 2)) <= tolerance.transpose(1, 0, 2)).all()
