"""Before the first request: every kernel runs once, and the scheme works ahead.

Kernels are compiled on the first start and loaded later.
"""

from __future__ import annotations

import time

import numpy as np

from tee_runner.decoder.forward import RaggedBatch
from tee_runner.engine.runtime import Runtime
from tee_runner.protection.base import Progress

# Seconds at most for what a scheme makes ahead: a first prompt should find it ready.
_AHEAD_S = 5.0
# Prompt lengths on both sides of the kernels' serial and parallel forms, then one decode step.
_PROMPTS = (2, 120)


def warm_up(runtime: Runtime, progress: Progress | None = None) -> None:
    """A prefill of each kind and a decode step on token 0, then what can be made ahead.

    Raises:
        WorkerError: the worker failed.
    """
    stages = len(_PROMPTS) + 1
    for done, rows in enumerate(_PROMPTS):
        slot = runtime.cache.take()
        try:
            for count in (min(rows, runtime.max_len - 1), 1):
                tokens = np.zeros(count, dtype=np.int64)
                runtime.forward(RaggedBatch(tokens=tokens, slots=[slot], counts=[count], sampled=[1]))
        finally:
            runtime.cache.release(slot)
        if progress is not None:
            progress("compile kernels", done + 1, stages)
    deadline = time.perf_counter() + _AHEAD_S
    while runtime.idle() and time.perf_counter() < deadline:
        pass
    runtime.reset_stats()
    if progress is not None:
        progress("compile kernels", stages, stages)
