"""The trusted runner: prompt, activations, KV cache, logits and sampler never leave it in clear."""

import os
from pathlib import Path

# numba's OpenMP threads would spin after each parallel kernel on cores that the worker, on the
# same host, needs next. Read when libgomp is loaded, so it must be set before any kernel runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from gelo.kernel_cache import use_kernel_cache

use_kernel_cache(Path(__file__).parent)
