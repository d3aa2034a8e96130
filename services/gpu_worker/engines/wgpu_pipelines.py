"""Compiled kernels and their bindings."""

from __future__ import annotations

from typing import Any

from gpu_worker.engines.wgpu_native import NativeDevice
from gpu_worker.kernels.gemm import GemmKernel

_BUFFER_TYPES: dict[str, tuple[str, ...]] = {
    "gemm": ("uniform", "read-only-storage", "read-only-storage", "storage"),
    "reduce": ("uniform", "read-only-storage", "storage"),
}


class Pipelines:
    """Compiles each kernel once. All GEMM kernels share one binding layout, so a bind group fits any."""

    def __init__(self, device: Any, native: NativeDevice | None, reduce_source: str) -> None:
        self._device = device
        self._native = native
        self._layouts = {name: _bind_layout(device, types) for name, types in _BUFFER_TYPES.items()}
        self._gemm: dict[GemmKernel, Any] = {}
        self.reduce = self._compile("reduce", reduce_source)

    def gemm(self, kernel: GemmKernel) -> Any:
        """The pipeline of ``kernel``."""
        pipeline = self._gemm.get(kernel)
        if pipeline is None:
            pipeline = self._gemm[kernel] = self._compile("gemm", kernel.source())
        return pipeline

    def bind_gemm(self, params: Any, operand: Any, weight: Any, out: Any) -> Any:
        """A bind group for :meth:`gemm`."""
        return self._bind("gemm", params, operand, weight, out)

    def bind_reduce(self, params: Any, partial: Any, result: Any) -> Any:
        """A bind group for :attr:`reduce`."""
        return self._bind("reduce", params, partial, result)

    def _compile(self, name: str, source: str) -> Any:
        if self._native is None:
            module = self._device.create_shader_module(label=name, code=source)
        else:
            module = self._native.create_shader(source, name)
        layout = self._device.create_pipeline_layout(bind_group_layouts=[self._layouts[name]])
        return self._device.create_compute_pipeline(
            label=name, layout=layout, compute={"module": module, "entry_point": "main"}
        )

    def _bind(self, name: str, *resources: Any) -> Any:
        entries = [{"binding": i, "resource": resource} for i, resource in enumerate(resources)]
        return self._device.create_bind_group(layout=self._layouts[name], entries=entries)


def _bind_layout(device: Any, types: tuple[str, ...]) -> Any:
    return device.create_bind_group_layout(
        entries=[
            {"binding": i, "visibility": "COMPUTE", "buffer": {"type": kind}} for i, kind in enumerate(types)
        ]
    )
