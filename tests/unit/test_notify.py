"""The threads that tell the kernel what is void: their order, and what an open may rely on. The kernel is a double."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from fusefs.fuse import protocol
from fusefs.fuse.notify import _THREADS, KernelCaches

KINO = 1 << 40
OTHER_OF_ITS_THREAD = KINO + _THREADS
WAIT_S = 10.0


class Kernel:
    """Takes the notices, and blocks those of the inodes and directories that are `held`."""

    def __init__(self) -> None:
        self.calls: queue.Queue[bytes] = queue.Queue()
        self.held: dict[int, threading.Event] = {}
        self.unknown: set[int] = set()

    def take(self, notice: bytes) -> None:
        self.calls.put(notice)
        (key,) = protocol.U64.unpack_from(notice, protocol.OUT_HEADER.size)
        if key in self.held:
            assert self.held[key].wait(WAIT_S)
        if key in self.unknown:
            raise OSError(errno.ENOENT, "unknown")

    def next(self) -> bytes:
        return self.calls.get(timeout=WAIT_S)


class Drop:
    def __init__(self, needed: bool = True) -> None:
        self.needed = needed
        self.ended = threading.Event()

    def drop_begins(self) -> int | None:
        return 7 if self.needed else None

    def drop_ended(self, version: int) -> None:
        assert version == 7
        self.ended.set()


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def caches(kernel: Kernel) -> Iterator[KernelCaches]:
    found = KernelCaches()
    found.start(kernel.take)
    yield found
    for event in kernel.held.values():
        event.set()
    found.stop()


async def test_passed_returns_after_the_call_under_way(caches: KernelCaches, kernel: Kernel) -> None:
    kernel.held[KINO] = threading.Event()
    caches.invalidate_inode(KINO)
    await trio.to_thread.run_sync(kernel.next)
    passed = []

    async def wait() -> None:
        await caches.passed(OTHER_OF_ITS_THREAD)
        passed.append(True)

    with trio.fail_after(WAIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not passed, "the call has not ended"
            kernel.held[KINO].set()


async def test_a_name_that_waits_holds_up_no_inode(caches: KernelCaches, kernel: Kernel) -> None:
    """A call about a name waits for a request in its directory; that request may be an open that waits for `passed`."""
    kernel.held[KINO] = threading.Event()
    caches.invalidate_entry(KINO, "name")
    assert await trio.to_thread.run_sync(kernel.next) == protocol.inval_entry(KINO, b"name")
    with trio.fail_after(WAIT_S):
        await caches.passed(KINO)


async def test_what_an_open_made_needless_is_not_called(caches: KernelCaches, kernel: Kernel) -> None:
    drop = Drop(needed=False)
    caches.invalidate_inode(KINO, drop=drop)
    with trio.fail_after(WAIT_S):
        await caches.passed(KINO)
    assert kernel.calls.empty() and not drop.ended.is_set()


async def test_a_call_that_met_an_unknown_inode_is_made_again_while_it_is_needed(
    caches: KernelCaches, kernel: Kernel
) -> None:
    kernel.unknown.add(KINO)
    drop = Drop()
    caches.invalidate_inode(KINO, drop=drop)
    for _ in range(2):
        assert await trio.to_thread.run_sync(kernel.next) == protocol.inval_inode(KINO, attr_only=False)
    drop.needed = False
    kernel.unknown.clear()
    caches.invalidate_inode(KINO + 1, drop=(last := Drop()))
    assert await trio.to_thread.run_sync(last.ended.wait, WAIT_S)
    assert kernel.next() == protocol.inval_inode(KINO + 1, attr_only=False)
    assert not drop.ended.is_set()
