"""The process of a stdio MCP server, as the proxy starts and ends it.

Decided here and only here: that it has a process group of its own, so that a wrapper (`npx`, `sh -c`) and what it
starts end together, that it does not get the way to our database, and what its exit code is for us. Nothing heavy is
imported: the server starts up while the command imports trio (0.15 s).

Threading: belongs to one task; nothing here waits, but `reap`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Self


def _environment() -> dict[str, str]:
    """Ours less our own secrets. The variables of libpq stay: a server for Postgres may be meant by them."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("HANGO_FS_") and name.endswith(("DSN", "TOKEN")))
    }


class Child:
    """A started server, with our stderr and two pipes.

    Raises OSError as exec(3) does.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0, env=_environment()
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self.stdin, self.stdout = (pipe.fileno() for pipe in self._pipes)

    def exit_handle(self) -> int:
        """A descriptor that becomes readable when the process has ended; the caller closes it."""
        return os.pidfd_open(self._process.pid)

    def close_pipes(self) -> None:
        """Close our ends, after the caller has made its own of them."""
        for pipe in self._pipes:
            pipe.close()

    def signal(self, number: int) -> None:
        """Signal its group. It is not reaped before the end, so that the number is not another's by then."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reap()

    def reap(self) -> int:
        """End it, by force if it still runs; returns its exit code, 128 + n after signal n."""
        if self._runs():
            self.signal(signal.SIGKILL)
        self.close_pipes()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _runs(self) -> bool:
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
