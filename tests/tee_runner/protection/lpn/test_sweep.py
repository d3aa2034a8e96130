"""The sweep: exact, and one schedule for every secret."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.memory import PAGE, pages
from tee_runner.protection.lpn import sweep_kernels as module
from tee_runner.protection.lpn.bank import Source, Sweep, Tools
from tee_runner.protection.lpn.layout import LANES, TILE_ROWS, empty_panels, pack_rows, unpack_rows
from tee_runner.protection.lpn.matrix import public_matrix
from tee_runner.protection.lpn.parameters import LpnParameters
from tee_runner.protection.lpn.pool import RingWeight
from tee_runner.protection.lpn.quantise import quantise
from tee_runner.protection.lpn.slots import SlotDraw

from .words_worker import key_of, linear_of, small_parameters, weight_of


def source_of(
    d_in: int, d_out: int, parameters: LpnParameters, *, wide: bool = False, key: int = 1
) -> tuple[Source, np.ndarray, np.ndarray]:
    """A source with a right pool; G and Wᵀ as plain matrices of uint32."""
    weight = weight_of(7, d_out, d_in)
    quantised = quantise(weight, wide=wide)
    ring = RingWeight.of(linear_of(weight), quantised)
    matrix = public_matrix(d_in, parameters.k)
    G = np.empty((parameters.k, d_in), np.uint32)
    unpack_rows(matrix, 0, G)
    W = quantised.values.astype(np.uint32)
    ring.pool = empty_panels(parameters.k, d_out, np.uint32)
    pack_rows(G @ W.T, ring.pool, 0)
    return Source(ring, matrix, parameters, Tools(key_of(key).stream("sweep"))), G, W


class Secrets:
    """Keeps f and e of each tile that is drawn, as matrices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: list[np.ndarray] = []
        original = SlotDraw.draw

        def draw(own: SlotDraw, stream: Any) -> None:
            original(own, stream)
            dense = np.zeros((TILE_ROWS, own.plan.bound), np.uint32)
            np.put_along_axis(dense, own.positions.astype(np.int64), own.values, axis=1)
            self.drawn.append(dense)

        monkeypatch.setattr(SlotDraw, "draw", draw)

    @property
    def f(self) -> np.ndarray:
        return np.concatenate(self.drawn[0::2])

    @property
    def e(self) -> np.ndarray:
        return np.concatenate(self.drawn[1::2])


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 90), st.integers(1, 90), st.integers(1, 150), st.integers(1, 3), st.booleans(),
    st.floats(0.02, 1.0), st.floats(0.02, 1.0), st.integers(1, 9),
)  # fmt: skip
def test_rows_are_exact(
    d_in: int, d_out: int, k: int, tiles: int, wide: bool, f: float, e: float, panels: int
) -> None:
    parameters = small_parameters(d_in, k, max(1, int(f * k)), max(1, int(e * d_in)))
    source, G, W = source_of(d_in, d_out, parameters, wide=wide)
    r, R = (pages((tiles * TILE_ROWS, width), np.uint32) for width in source.widths)
    r.fill(77)
    with pytest.MonkeyPatch.context() as patch:
        secrets = Secrets(patch)
        sweep = Sweep(source, r, R)
    while not sweep.run(panels):
        pass
    expected = secrets.e + secrets.f @ G
    np.testing.assert_array_equal(r[:, :d_in], expected)
    np.testing.assert_array_equal(R[:, :d_out], expected @ W.T)
    assert not source.tools.tiles.any()


def test_all_threads_do_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    source, G, W = source_of(200, 130, small_parameters(200, 300, 30, 20))
    r, R = (pages((2 * TILE_ROWS, width), np.uint32) for width in source.widths)
    secrets = Secrets(monkeypatch)
    assert Sweep(source, r, R).run()
    expected = secrets.e + secrets.f @ G
    np.testing.assert_array_equal(r[:, :200], expected)
    np.testing.assert_array_equal(R[:, :130], expected @ W.T)


def test_what_exceeds_a_quota_is_swept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, G, W = source_of(64, 40, small_parameters(64, 256, 20, 5))

    def draw(own: SlotDraw, stream: Any, original: Any = SlotDraw.draw) -> None:
        original(own, stream)
        if own.plan.bound == 256:  # f: all in the first group
            own.positions[...] = np.arange(20, dtype=np.uint32)
            own.draw_again = True  # type: ignore[attr-defined]
            from tee_runner.protection.lpn.slots import _describe

            _describe(own.positions, own.plan.group, own.plan.row_shift, own._groups, own._places)

    monkeypatch.setattr(SlotDraw, "draw", draw)
    secrets = Secrets(monkeypatch)
    r, R = (pages((2 * TILE_ROWS, width), np.uint32) for width in source.widths)
    assert Sweep(source, r, R).run()
    assert source.tools.repeated == 1
    expected = secrets.e + secrets.f @ G
    np.testing.assert_array_equal(r[:, :64], expected)
    np.testing.assert_array_equal(R[:, :40], expected @ W.T)


class Recorder:
    """Runs the sweep's own Python source and records what it touches: kind, page, and lines read."""

    def __init__(self, patch: pytest.MonkeyPatch, base: dict[str, tuple[int, int]]) -> None:
        self.pages: list[tuple[str, ...]] = []
        self.lines: list[tuple[str, int]] = []
        self._base = base
        for name in (
            "_touch_lines", "_add_words", "_add_bytes", "_add_lanes", "_sweep_pool", "_sweep_weight",
            "_begin", "_end",
        ):  # fmt: skip
            patch.setattr(module, name, getattr(module, name).py_func)
        for name in ("_words", "_bytes", "_lane", "_copy", "_clear"):
            patch.setattr(module, name, self._recording(name))
        patch.setattr(module, "_touch", lambda address: self.lines.append(self._where(address)))
        patch.setattr(module, "_prefetch", lambda address: None)

    def _recording(self, name: str) -> Any:
        addresses = {"_words": 2, "_bytes": 2, "_lane": 1, "_copy": 2, "_clear": 1}[name]

        def record(arguments: tuple[int, ...]) -> None:
            where = [self._where(int(address)) for address in arguments[:addresses]]
            self.pages.append((name, *(f"{area}{offset // PAGE}" for area, offset in where)))

        return record

    def _where(self, address: int) -> tuple[str, int]:
        for name, (start, size) in self._base.items():
            if start <= address < start + size:
                return name, address - start
        raise AssertionError("an access outside all arrays")


def trace(key: int, force: bool) -> tuple[Recorder, Source]:
    source, _, _ = source_of(40, 48, small_parameters(40, 130, 9, 6), key=key)
    r, R = (pages((TILE_ROWS, width), np.uint32) for width in source.widths)
    with pytest.MonkeyPatch.context() as patch:
        if force:  # an extreme secret within the quotas: every row has the same first positions

            def lay_out(own: SlotDraw, sweep: int, places: Any, values: Any) -> int:
                places.fill(0)
                values.fill(1)
                return 1

            patch.setattr(SlotDraw, "lay_out", lay_out)
        sweep = Sweep(source, r, R)
        areas = {
            "G": source.matrix, "P": source.pool, "W": source.weight.panels, "tile": source.tools.tiles,
            "r": r, "R": R,
        }  # fmt: skip
        recorder = Recorder(patch, {name: (a.ctypes.data, a.nbytes) for name, a in areas.items()})
        kernel = module._sweep_panels.py_func
        slots = sweep._slots
        kernel(
            0, 1, 0, source.panels, source.matrix.ctypes.data, len(source.matrix),
            source.matrix.shape[1] * 64, source.pool.ctypes.data, source.pool.shape[1] * 64,
            source.f.plan.group * 64, slots.f_places, slots.f_values, source.weight.panels.ctypes.data,
            source.weight.panels.shape[1] * LANES, 1, source.e.plan.group * LANES, slots.e_places,
            slots.e_values, source.tools.tiles.ctypes.data, r, R, False,
        )  # fmt: skip
    return recorder, source


def test_the_schedule_is_the_same_for_every_secret() -> None:
    (one, source), (two, _), (extreme, _) = trace(1, False), trace(2, False), trace(3, True)
    assert one.pages == two.pages == extreme.pages
    assert one.lines == two.lines == extreme.lines
    assert len(one.pages) > 5000
    # Every line of every panel of G, P and W that can hold a row, in ascending order.
    f, e = source.f.plan, source.e.plan
    f_lines, e_lines = f.groups * f.group, e.groups * e.group * LANES // 64
    for area, rows, panels, per_panel in (
        ("G", source.matrix.shape[1], len(source.matrix), f_lines),
        ("P", source.pool.shape[1], len(source.pool), f_lines),
    ):
        wanted = [p * rows * 64 + 64 * line for p in range(panels) for line in range(per_panel)]
        assert [offset for name, offset in one.lines if name == area] == wanted
    stride = source.weight.panels.shape[1] * LANES
    wanted = [p * stride + 64 * line for p in range(len(source.pool)) for line in range(e_lines)]
    assert [offset for name, offset in one.lines if name == "W"] == wanted


def test_accesses_of_a_slot_stay_in_one_page() -> None:
    for d, k, w_f, w_e in ((576, 1152, 60, 60), (40, 70, 40, 20)):
        source, _, _ = source_of(d, 16, small_parameters(d, k, w_f, w_e))
        for array in (source.matrix, source.pool, source.weight.panels, source.tools.tiles):
            assert array.ctypes.data % PAGE == 0
            assert array.strides[0] % PAGE == 0
        assert PAGE % (source.f.plan.group * 64) == 0
        assert PAGE % (source.e.plan.group * LANES) == 0
