"""Telling the kernel to drop what it caches, from threads of its own.

Decided here and only here: which thread makes which call. invalidate_inode waits for READs in flight
and writes dirty mmap pages back through us; invalidate_entry waits for the directory's lock. Called on
the trio thread each froze the daemon beyond kill -9 (measured), so only the attribute form, which
waits for nothing, may be called there. Calls for one inode keep their order.

An inode that the kernel does not know may be one that it is about to know: our reply to a look-up takes
effect when the process that asked runs again, and would bring in attributes that are old by now. So
what met an unknown inode is said again, twice, a little later.

Threading: `invalidate_*` are called on the trio thread and never wait; the workers call the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from fusefs import telemetry
from fusefs.core.attributes import Drop
from fusefs.fuse import protocol

_THREADS = 4
"""For inodes, and as many for names: a call about a name may wait for a request that waits for one about an inode."""
_AGAIN_S = (0.005, 0.1)
"""How long after its first try a call that met an unknown inode is repeated."""
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENOTCONN, errno.EBADF, errno.ENODEV, errno.EBUSY)
"""The kernel does not know the inode or name, a mount point is below it, or the mount is going."""

_log = telemetry.get_logger()


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to make: a notice to the kernel, of `kino` where it is about an inode, or what tells that the calls before
    have been made. `tries`: how often it met an unknown inode, since `first` (monotonic s)."""

    notice: bytes | Callable[[], None]
    kino: int | None = None
    drop: Drop | None = None
    tries: int = 0
    first: float = 0.0


class KernelCaches:
    """Implements `core.attributes.Kernel` for one mount."""

    def __init__(self) -> None:
        self._inodes: list[queue.SimpleQueue[_Call | None]] = [queue.SimpleQueue() for _ in range(_THREADS)]
        self._names: list[queue.SimpleQueue[_Call | None]] = [queue.SimpleQueue() for _ in range(_THREADS)]
        self._threads = [
            threading.Thread(target=self._work, args=(calls,), name=f"fusefs-notify-{n}", daemon=True)
            for n, calls in enumerate((*self._inodes, *self._names))
        ]
        self._late: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads.append(threading.Thread(target=self._put_late, name="fusefs-notify-late", daemon=True))
        self._started = False
        self._notify: Callable[[bytes], None]

    def start(self, notify: Callable[[bytes], None]) -> None:
        """Begin to work; before the mount is up there is nothing to tell.

        Args:
            notify: tells the kernel, and may wait; raises OSError. Called in several threads at once.
        """
        self._notify = notify
        self._started = True
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the workers end after what is queued. They are daemon threads: one that waits for the
        kernel does not hold up the end of the process."""
        self._started = False
        for calls in (*self._inodes, *self._names, self._late):
            calls.put(None)

    def invalidate_inode(self, kino: int, *, attr_only: bool = False, drop: Drop | None = None) -> None:
        self._put(self._inodes, kino, _Call(protocol.inval_inode(kino, attr_only=attr_only), kino, drop))

    def invalidate_attr_now(self, kino: int) -> None:
        self._make(_Call(protocol.inval_inode(kino, attr_only=True)))

    def invalidate_entry(self, parent: int, name: str, deleted: int = 0) -> None:
        raw = name.encode()
        notice = protocol.delete(parent, deleted, raw) if deleted else protocol.inval_entry(parent, raw)
        self._put(self._names, parent, _Call(notice))

    async def passed(self, kino: int) -> None:
        if not self._started:
            return
        passed, loop = trio.Event(), trio.lowlevel.current_trio_token()

        def tell() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                loop.run_sync_soon(passed.set)

        self._put(self._inodes, kino, _Call(tell))
        await passed.wait()

    def _put(self, queues: list[queue.SimpleQueue[_Call | None]], key: int, call: _Call) -> None:
        if self._started:
            queues[key % _THREADS].put(call)

    def _work(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        while (call := calls.get()) is not None:
            unknown = self._make(call) == errno.ENOENT and call.kino is not None
            if unknown and call.tries < len(_AGAIN_S):
                first = call.first or time.monotonic()
                self._late.put(replace(call, tries=call.tries + 1, first=first))

    def _put_late(self) -> None:
        """Repeat what met an unknown inode, in the inode's own order. First come, first served: delays of one step are
        equal."""
        while (call := self._late.get()) is not None:
            time.sleep(max(0.0, call.first + _AGAIN_S[call.tries - 1] - time.monotonic()))
            assert call.kino is not None
            self._put(self._inodes, call.kino, call)

    def _make(self, call: _Call) -> int:
        """Returns the errno, 0 for success."""
        if not self._started:
            return 0  # the mount has gone, and its caches with it
        drop = call.drop
        version = None if drop is None else drop.drop_begins()
        if drop is not None and version is None:
            return 0
        try:
            if isinstance(call.notice, bytes):
                self._notify(call.notice)
            else:
                call.notice()
        except OSError as error:
            number = error.errno or 0
            if self._started and number not in _EXPECTED:
                _log.warning("fuse.invalidate_failed", error=errno.errorcode.get(number, "?"))
            return number
        if drop is not None and version is not None:
            drop.drop_ended(version)
        return 0
