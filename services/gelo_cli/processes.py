"""Starting the worker and the runner as processes of their own and waiting for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gelo_cli.console import CliError

READY_FD_OPTION = "--ready-fd"
_STOP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Child:
    """A running `gelo` command; ``ready`` is what it reported when it was up."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]

    def stop(self) -> None:
        """Terminate it and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start(arguments: Sequence[str]) -> Child:
    """Run ``gelo ARGUMENTS`` and wait until it reports that it is up.

    Raises:
        CliError: it ended before that; its own message is on stderr.
    """
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "gelo_cli", *arguments, READY_FD_OPTION, str(writer)],
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches the parent only, which stops its children in order.
            start_new_session=True,
        )
    finally:
        os.close(writer)
    with os.fdopen(reader) as pipe:
        try:
            line = pipe.readline()
        except BaseException:
            process.kill()
            raise
    if not line:
        process.wait()
        raise CliError(f"`gelo {arguments[0]}` ended before it was ready.", remedy="See its message above.")
    return Child(process, json.loads(line))


@contextlib.contextmanager
def started(arguments: Sequence[str]) -> Iterator[Child]:
    """:func:`start` as a context manager that stops the child."""
    child = start(arguments)
    try:
        yield child
    finally:
        child.stop()


def report_ready(descriptor: int | None, values: dict[str, Any]) -> None:
    """Tell the parent that this process is up."""
    if descriptor is not None:
        with os.fdopen(descriptor, "w") as pipe:
            pipe.write(json.dumps(values) + "\n")
