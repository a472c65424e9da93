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

import errno
import queue
import threading
import time
from collections.abc import Callable

import pyfuse3

from fusefs import telemetry
from fusefs.core.attributes import Drop

_THREADS = 4
_AGAIN_S = (0.005, 0.1)
"""How long after its first try a call that met an unknown inode is repeated."""
_EXPECTED = (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENOTCONN, errno.EBADF, errno.ENODEV, errno.EBUSY)
"""The kernel does not know the inode or name, a mount point is below it, or the mount is going."""

_log = telemetry.get_logger()
_Call = tuple[Callable[..., None], tuple[object, ...], Drop | None]
_Late = tuple[float, int, _Call]


class KernelCaches:
    """Implements `core.attributes.Kernel` for one mount."""

    def __init__(self) -> None:
        self._queues: list[queue.SimpleQueue[_Call | None]] = [queue.SimpleQueue() for _ in range(_THREADS)]
        self._threads = [
            threading.Thread(target=self._work, args=(calls,), name=f"fusefs-notify-{n}", daemon=True)
            for n, calls in enumerate(self._queues)
        ]
        self._late: queue.SimpleQueue[_Late | None] = queue.SimpleQueue()
        self._threads.append(threading.Thread(target=self._work_late, name="fusefs-notify-late", daemon=True))
        self._started = False

    def start(self) -> None:
        """Begin to work; before the mount is up there is nothing to tell."""
        self._started = True
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the workers end after what is queued. They are daemon threads: one that waits for the
        kernel does not hold up the end of the process."""
        self._started = False
        for calls in self._queues:
            calls.put(None)
        self._late.put(None)

    def invalidate_inode(self, kino: int, *, attr_only: bool = False, drop: Drop | None = None) -> None:
        self._put(kino, pyfuse3.invalidate_inode, (kino, attr_only), drop)

    def invalidate_attr_now(self, kino: int) -> None:
        self._call(pyfuse3.invalidate_inode, (kino, True))

    def invalidate_entry(self, parent: int, name: str, deleted: int = 0) -> None:
        self._put(parent, pyfuse3.invalidate_entry, (parent, name.encode(), deleted))

    def _put(
        self,
        key: int,
        call: Callable[..., None],
        args: tuple[object, ...],
        drop: Drop | None = None,
    ) -> None:
        if self._started:
            self._queues[key % _THREADS].put((call, args, drop))

    def _work(self, calls: queue.SimpleQueue[_Call | None]) -> None:
        while (item := calls.get()) is not None:
            if self._call(*item) == errno.ENOENT and item[0] is pyfuse3.invalidate_inode:
                self._late.put((time.monotonic(), 0, item))

    def _work_late(self) -> None:
        """Repeat what met an unknown inode. First come, first served: delays of one step are equal."""
        while (item := self._late.get()) is not None:
            first, step, call = item
            time.sleep(max(0.0, first + _AGAIN_S[step] - time.monotonic()))
            if self._call(*call) == errno.ENOENT and step + 1 < len(_AGAIN_S):
                self._late.put((first, step + 1, call))

    def _call(self, call: Callable[..., None], args: tuple[object, ...], drop: Drop | None = None) -> int:
        """Returns the errno, 0 for success."""
        if not self._started:
            return 0  # the mount has gone, and its caches with it
        version = None if drop is None else drop.drop_begins()
        if drop is not None and version is None:
            return 0
        try:
            call(*args)
        except OSError as error:
            number = error.errno or 0
            if self._started and number not in _EXPECTED:
                _log.warning("fuse.invalidate_failed", error=errno.errorcode.get(number, "?"))
            return number
        if drop is not None and version is not None:
            drop.drop_ended(version)
        return 0
