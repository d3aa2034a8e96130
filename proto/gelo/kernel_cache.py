"""Where compiled kernels are kept between runs.

numba's cache notices a change of the file a kernel is in, but not of the files it calls into,
so that an update could go on running old machine code. Here the directory's name is a hash
of all kernel sources of a package: any change compiles afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib import metadata
from pathlib import Path


def use_kernel_cache(package: Path) -> None:
    """Keep kernels of modules imported from now on under a hash of ``package``'s kernel sources.

    Below ``$GELO_CACHE``, else ``$XDG_CACHE_HOME/gelo``, else ``~/.cache/gelo``; private to the user,
    because a cached kernel is code. Without a writable directory numba's own default stays. Does not import
    numba, which takes half a second: most commands run no kernel.
    """
    root = os.environ.get("GELO_CACHE")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gelo"
    directory = base / "kernels" / f"{package.name}-{_source_hash(package)[:16]}"
    with contextlib.suppress(OSError, RuntimeError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            # Numba reads the variable when it is imported, and again whenever its environment changes.
            os.environ["NUMBA_CACHE_DIR"] = str(directory)
            if "numba" in sys.modules:
                sys.modules["numba"].config.CACHE_DIR = str(directory)


def _source_hash(package: Path) -> str:
    """SHA-256 over every source of the package and of the wire that mentions numba."""
    digest = hashlib.sha256(metadata.version("numba").encode())
    for folder in (package, Path(__file__).parent):
        for source in sorted(folder.rglob("*.py")):
            text = source.read_bytes()
            if b"numba" in text:
                digest.update(str(source.relative_to(folder)).encode() + b"\0")
                digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()
