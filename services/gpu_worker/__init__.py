"""The untrusted worker: public weights, matrix products over protected operands, nothing else."""

from pathlib import Path

from gelo.kernel_cache import use_kernel_cache

use_kernel_cache(Path(__file__).parent)
