"""Which GPU to use, and opening it.

wgpu is imported inside the functions: this module must answer on a machine where wgpu cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from gpu_worker.engines.base import EngineError

Prefer = Literal["hardware", "any"]
DeviceType = Literal["discrete", "integrated", "virtual", "cpu"]

# OpenGL, the other one, lacks f16 storage and real buffer mapping.
_BACKENDS = ("Vulkan", "Metal", "D3D12")
_DEVICE_TYPES: dict[str, DeviceType] = {
    "DiscreteGPU": "discrete",
    "IntegratedGPU": "integrated",
    "CPU": "cpu",
}
_SOFTWARE_NAMES = ("llvmpipe", "lavapipe", "softpipe", "swiftshader", "basic render")
_PREFERENCE: tuple[DeviceType, ...] = ("discrete", "integrated", "virtual", "cpu")
_HINT = (
    "install the GPU's Vulkan driver, or the package mesa-vulkan-drivers for a (slow) software device, "
    "or choose the CPU engine"
)
_MIN_LIMITS = {
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-storage-buffers-per-shader-stage": 3,
    "max-uniform-buffers-per-shader-stage": 1,
}
# Enough for the cause; shader errors quote the whole source.
_MESSAGE_CHARS = 400
_REPORTED_LIMITS = (
    "max-storage-buffer-binding-size",
    "max-buffer-size",
    "max-compute-workgroup-storage-size",
    "max-compute-workgroups-per-dimension",
    "max-compute-invocations-per-workgroup",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSummary:
    """One adapter that wgpu offers. ``handle`` is wgpu's own object."""

    name: str
    backend: str
    device_type: DeviceType
    driver: str
    features: frozenset[str] = frozenset()
    limits: dict[str, int] = field(default_factory=dict)
    handle: Any = field(default=None, repr=False, compare=False)

    @property
    def hardware_gpu(self) -> bool:
        """Whether a real GPU stands behind it, not a software rasteriser."""
        return self.device_type != "cpu"

    @property
    def has_f16(self) -> bool:
        """Whether shaders can load f16."""
        return "shader-f16" in self.features

    @property
    def reported_limits(self) -> dict[str, int]:
        """The limits that decide what fits."""
        return {name: self.limits[name] for name in _REPORTED_LIMITS if name in self.limits}

    def shortcomings(self) -> tuple[str, ...]:
        """Why the engine cannot use it; empty if it can."""
        reasons = [
            f"{name} is {self.limits.get(name, 0)}, {least} needed"
            for name, least in _MIN_LIMITS.items()
            if self.limits.get(name, 0) < least
        ]
        if self.backend not in _BACKENDS:
            reasons.insert(0, f"backend {self.backend} is not supported")
        return tuple(reasons)


def list_adapters() -> tuple[AdapterSummary, ...]:
    """All adapters, best first.

    Raises:
        EngineError: wgpu cannot be loaded or fails to enumerate.
    """
    try:
        import wgpu

        adapters = [_summarise(adapter) for adapter in wgpu.gpu.enumerate_adapters_sync()]
    except Exception as error:
        raise EngineError(f"wgpu cannot list the GPUs ({error}); {_HINT}") from error
    return tuple(sorted(adapters, key=_rank))


def pick_adapter(prefer: Prefer = "any") -> AdapterSummary:
    """The best usable adapter: discrete before integrated before virtual, software only for ``"any"``.

    Raises:
        EngineError: there is none.
    """
    return choose_adapter(list_adapters(), prefer)


def choose_adapter(adapters: Iterable[AdapterSummary], prefer: Prefer) -> AdapterSummary:
    """:func:`pick_adapter` among the given adapters.

    Raises:
        EngineError: none is usable; the message says why for each.
    """
    refused = []
    for adapter in sorted(adapters, key=_rank):
        reasons = adapter.shortcomings()
        if prefer == "hardware" and not adapter.hardware_gpu:
            reasons = ("it is a software device", *reasons)
        if not reasons:
            return adapter
        refused.append(f"{adapter.name} via {adapter.backend}: {', '.join(reasons)}")
    found = "; ".join(refused) if refused else "none found"
    raise EngineError(f"no usable GPU adapter ({found}); {_HINT}")


def hardware_gpu_available() -> bool:
    """Whether :func:`pick_adapter` would find a hardware GPU. Never raises."""
    try:
        pick_adapter("hardware")
    except EngineError:
        return False
    return True


def open_device(adapter: AdapterSummary, *, use_f16: bool) -> Any:
    """A wgpu device with the adapter's own limits.

    Raises:
        EngineError: the adapter is unusable or refuses.
    """
    reasons = adapter.shortcomings()
    if use_f16 and not adapter.has_f16:
        reasons = (*reasons, "the feature shader-f16 is missing")
    if reasons:
        raise EngineError(f"{adapter.name} via {adapter.backend} is unusable: {', '.join(reasons)}")
    with engine_errors(f"{adapter.name} does not open"):
        return adapter.handle.request_device_sync(
            label="gelo-worker",
            required_features=["shader-f16"] if use_f16 else [],
            required_limits=dict(adapter.limits),
        )


@contextmanager
def engine_errors(action: str) -> Iterator[None]:
    """Turns wgpu's errors into :class:`EngineError`, led by ``action``."""
    import wgpu

    try:
        yield
    except wgpu.GPUOutOfMemoryError as error:
        raise EngineError(f"{action}: the GPU is out of memory ({_message(error)})") from error
    except (wgpu.GPUError, RuntimeError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{action}: {_message(error)}") from error


def _message(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:_MESSAGE_CHARS]


def _summarise(adapter: Any) -> AdapterSummary:
    info = adapter.info
    name = info["device"] or info["description"] or "unnamed"
    device_type = _DEVICE_TYPES.get(info["adapter_type"], "virtual")
    if any(mark in name.lower() for mark in _SOFTWARE_NAMES):
        device_type = "cpu"
    return AdapterSummary(
        name=name,
        backend=info["backend_type"],
        device_type=device_type,
        driver=info["description"],
        features=frozenset(adapter.features),
        limits=dict(adapter.limits),
        handle=adapter,
    )


def _rank(adapter: AdapterSummary) -> tuple[int, int]:
    # sorted() is stable: among equals the driver's own order stands.
    backend = _BACKENDS.index(adapter.backend) if adapter.backend in _BACKENDS else len(_BACKENDS)
    return _PREFERENCE.index(adapter.device_type), backend
