"""Matrix engines, and the choice between them."""

from __future__ import annotations

import os
import tempfile
from typing import Literal

from gpu_worker.engines.base import Engine, EngineError

EngineName = Literal["auto", "cpu", "wgpu"]


def create_engine(name: EngineName, *, threads: int | None = None) -> Engine:
    """The engine called ``name``; ``auto`` takes a hardware GPU if there is one, else the CPU.

    Raises:
        EngineError: the engine asked for cannot run here.
    """
    if name == "cpu":
        return _cpu(threads)
    # Without it the window-system libraries behind Vulkan complain on stderr at every start.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    from gpu_worker.engines.wgpu import WgpuEngine, hardware_gpu_available

    if name == "wgpu" or hardware_gpu_available():
        return WgpuEngine()
    return _cpu(threads)


def _cpu(threads: int | None) -> Engine:
    from gpu_worker.engines.cpu import CpuEngine

    return CpuEngine(threads)


__all__ = ["Engine", "EngineError", "EngineName", "create_engine"]
