"""Lines of JSON-RPC on standard streams, in trio.

Decided here and only here: how much of a line is held, and how a descriptor that others have too is read and written
without blocking.

Threading: belongs to the trio thread; a `Lines` to one task.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Awaitable, Callable, Iterator

import trio

from fusefs.rules.config import MIB

MAX_LINE_BYTES = 32 * MIB
CHUNK_BYTES = 64 * 1024


class Lines:
    """Whole lines from a stream of bytes, as many at once as there are.

    Args:
        at_most: bytes of a line that are held.
    """

    def __init__(self, receive: Callable[[int], Awaitable[bytes | bytearray]], at_most: int = MAX_LINE_BYTES) -> None:
        self._receive = receive
        self._at_most = at_most
        self._held: list[bytes] = []
        self._size = 0
        self._rest = b""
        self._is_overlong = False

    async def next(self) -> tuple[bytes, bool]:
        """Lines, and whether they are whole: an overlong one comes in pieces. Empty at the end; what comes last may
        lack its newline."""
        while True:
            data, self._rest = self._rest or bytes(await self._receive(CHUNK_BYTES)), b""
            if self._is_overlong:
                end = data.find(b"\n") + 1
                self._is_overlong = bool(data) and not end
                self._rest = data[end:] if end else b""
                return data[: end or None], False
            end = data.rfind(b"\n") + 1
            if end or not data:
                whole = b"".join([*self._held, data[:end]])
                self._hold(data[end:])
                return whole, True
            self._held.append(data)
            self._size += len(data)
            if self._size > self._at_most:
                self._is_overlong = True
                piece = b"".join(self._held)
                self._hold(b"")
                return piece, False

    def _hold(self, data: bytes) -> None:
        self._held, self._size = ([data], len(data)) if data else ([], 0)


def each_line(lines: bytes) -> Iterator[bytes]:
    """Each line with its newline; the last one may lack it."""
    start = 0
    while start < len(lines):
        end = lines.find(b"\n", start) + 1 or len(lines)
        yield lines[start:end]
        start = end


def open_stream(fd: int) -> trio.lowlevel.FdStream:
    """A stream on a descriptor of its own.

    Pipes and terminals are opened anew: trio makes what it uses non-blocking, and our stderr, which the server has
    too, may be the same open file.
    """
    if stat.S_ISFIFO(kind := os.fstat(fd).st_mode) or stat.S_ISCHR(kind):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        with contextlib.suppress(OSError):  # another user's pipe or terminal
            return trio.lowlevel.FdStream(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_NOCTTY))
    return trio.lowlevel.FdStream(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
