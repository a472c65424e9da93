"""/dev/fuse: requests in, answers and notices out.

Decided here and only here: in which task a request is answered. The task that leads reads a request and begins to
answer it; most are answered without waiting for anything, and then it reads the next. Where an answer has to wait (for
Postgres, for a lock), another task leads from that moment on, and the first goes on when what it waits for has come.
So a request costs no task, no switch and no lock of its own unless it waits.

Threading: one trio thread; `notify` may be called in any.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Coroutine, Generator, Sequence
from time import perf_counter
from types import coroutine
from typing import Any

import trio

from fusefs import telemetry
from fusefs.fuse import protocol
from fusefs.fuse.protocol import Request

_IDLE_TASKS = 16
"""How many tasks stay for when they are needed again; more come and go."""
_TURN_S = 0.003
"""How long requests that need not wait are answered before other tasks get their turn."""

_SPIN_S = 50e-6
"""How long the next request is looked for before the thread sleeps, while none waits: a process that gets an answer
often asks again at once, and to be woken takes longer than to answer (statfs in a row: 46 us each, 29 so)."""
_IN_PLACE_MS = 2
"""How long the thread itself waits for an answer of Postgres while no request waits for anything and none comes. Two
switches of tasks and two registrations with epoll take a tenth of a commit."""
_CORES = len(os.sched_getaffinity(0))

_NOBODYS_LOSS = (0, errno.ENOENT, errno.ENODEV, errno.ECONNABORTED)
"""What an answer may meet: taken; the kernel has given the request up, or the mount has gone."""

_log = telemetry.get_logger()

Answer = Callable[[Request], Coroutine[Any, Any, None]]


class Device:
    """The connection of one mount to the kernel.

    Args:
        fd: of /dev/fuse, mounted. Closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._buffer = bytearray(protocol.READ_SIZE)
        self._answer: Answer
        self._tasks: trio.Nursery
        self._idle: list[trio.lowlevel.Task] = []
        self._waiting = 0
        self._turn_ends = 0.0
        self._polls: dict[int, select.poll] = {}  # by number: a descriptor that is used again is waited for alike
        self._ended = False

    async def serve(self, answer: Answer) -> None:
        """Answer requests until the mount has gone or `stop` is called; those under way are answered to the end.

        Args:
            answer: called for each request; it replies by itself, and raises nothing.
        """
        self._answer = answer
        async with trio.open_nursery() as self._tasks:
            self._tasks.start_soon(self._lead)

    def stop(self) -> None:
        """Read no more requests. May be called from any task."""
        self._ended = True
        trio.lowlevel.notify_closing(self._fd)

    def close(self) -> None:
        """Let go of the kernel: what still waits for an answer gets ENOTCONN."""
        self._ended = True
        fd, self._fd = self._fd, -1  # what is told late must not get into another file of this number
        os.close(fd)

    @property
    def connected(self) -> bool:
        """Whether the kernel still sends requests: neither unmounted nor aborted."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return not poll.poll(0)

    def reply(self, unique: int, body: bytes = b"") -> None:
        """Answer a request. An answer that the kernel does not take, as one longer than it asked for, is a fault of
        ours: it is logged, and the request gets EIO."""
        number = self._write(protocol.answer(unique, body))
        if number not in _NOBODYS_LOSS:
            _log.error("fuse.answer_not_taken", error=errno.errorcode.get(number, "?"), bytes=len(body))
            self.refuse(unique, errno.EIO)

    def refuse(self, unique: int, number: int) -> None:
        """Answer a request with an errno."""
        self._write((protocol.refusal(unique, number),))

    def _write(self, parts: Sequence[bytes]) -> int:
        """Returns the errno, 0 for success: an exception would end the mount."""
        try:
            os.writev(self._fd, parts)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def notify(self, notice: bytes) -> None:
        """Tell the kernel something unasked; it may wait for requests under way. Raises OSError: ENOENT for an inode
        or a name that the kernel does not know."""
        os.write(self._fd, notice)

    def wait_in_place(self, fd: int) -> bool:
        """Wait for a descriptor in this thread, where nobody else waits for it: whether it became readable. A request
        ends the wait, so that it can be answered meanwhile."""
        if self._waiting or self._ended:
            return False
        poll = self._polls.get(fd)
        if poll is None:
            poll = self._polls[fd] = select.poll()
            poll.register(fd, select.POLLIN)
            poll.register(self._fd, select.POLLIN)
        ready = poll.poll(_IN_PLACE_MS)
        return bool(ready) and (ready[0][0] == fd or ready[-1][0] == fd)

    async def _lead(self) -> None:
        """The life of one task: lead, wait, be idle, lead again."""
        while True:
            while (request := await self._next()) is not None:
                if await self._has_waited(self._answer(request)):
                    break  # another task leads by now
            else:
                self._dismiss()
                return
            if self._ended or len(self._idle) >= _IDLE_TASKS:
                return
            await self._be_idle()

    async def _next(self) -> Request | None:
        """The next request; None when there will be no more."""
        # With one core whoever is to ask needs it.
        spin_until = perf_counter() + _SPIN_S if _CORES > 1 else 0.0
        while not self._ended:
            if perf_counter() > self._turn_ends:
                await trio.lowlevel.checkpoint()
                self._turn_ends = perf_counter() + _TURN_S
            try:
                length = os.readv(self._fd, [self._buffer])
            except BlockingIOError:
                if perf_counter() < spin_until and not self._waiting:
                    continue
                try:
                    await trio.lowlevel.wait_readable(self._fd)
                except trio.ClosedResourceError:
                    return None
                self._turn_ends = perf_counter() + _TURN_S
            except FileNotFoundError:
                pass  # the one that was to be read was given up
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.ECONNABORTED):
                    raise
                self._ended = True  # unmounted, or aborted
            else:
                return protocol.parse(self._buffer, length)
        return None

    @coroutine
    def _has_waited(self, answering: Coroutine[Any, Any, None]) -> Generator[Any, Any, bool]:
        """Answer a request in this task; when it has to wait for the first time, let another task lead. Returns whether
        it had to."""
        try:
            trap = answering.send(None)
        except StopIteration:
            return False
        if self._idle:
            trio.lowlevel.reschedule(self._idle.pop())
        else:
            self._tasks.start_soon(self._lead)
        self._waiting += 1
        try:
            # What a coroutine yields is for the loop, which answers to the task that runs: this one.
            while True:
                trap = answering.send((yield trap))
        except StopIteration:
            return True
        finally:
            self._waiting -= 1
            answering.close()

    async def _be_idle(self) -> None:
        """Return when this task is to lead, or to end."""
        task = trio.lowlevel.current_task()
        self._idle.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._idle.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _dismiss(self) -> None:
        """Let the idle tasks end."""
        self._ended = True
        for task in self._idle:
            trio.lowlevel.reschedule(task)
        self._idle.clear()
