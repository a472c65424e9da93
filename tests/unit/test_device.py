"""The connection to the kernel: which task answers, and that nothing but an answer leaves. The kernel is a socket of
ours, which keeps the bounds of messages as /dev/fuse does."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing

from fusefs.core.filesystem import InodeTable
from fusefs.fuse import protocol
from fusefs.fuse.device import Device
from fusefs.fuse.operations import Operations
from fusefs.fuse.protocol import Opcode, Request
from fusefs.rules.errors import NotFound
from tests.unit.test_notify import WAIT_S


class Kernel:
    """The other end of the device."""

    def __init__(self) -> None:
        self._end, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.setblocking(False)
        self.device = Device(ours.detach())

    def ask(self, unique: int, opcode: int = Opcode.STATFS, body: bytes = b"") -> None:
        size = protocol.IN_HEADER.size + len(body)
        self._end.send(protocol.IN_HEADER.pack(size, opcode, unique, protocol.ROOT, 0, 0, 0, 0, 0) + body)

    async def answer(self) -> tuple[int, int]:
        """The next answer: of which request, and its errno."""
        with trio.fail_after(WAIT_S):
            await trio.lowlevel.wait_readable(self._end)
        _, negative, unique = protocol.OUT_HEADER.unpack_from(self._end.recv(4096))
        return unique, -negative

    def close(self) -> None:
        self._end.close()
        self.device.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    found = Kernel()
    yield found
    found.close()


class Door:
    """Answers every request; those of `waits` when their event comes."""

    def __init__(self, kernel: Kernel) -> None:
        self._device = kernel.device
        self.waits: dict[int, trio.Event] = {}
        self.tasks: list[trio.lowlevel.Task] = []

    async def answer(self, request: Request) -> None:
        self.tasks.append(trio.lowlevel.current_task())
        if request.unique in self.waits:
            await self.waits[request.unique].wait()
        self._device.reply(request.unique)


async def test_requests_that_wait_for_nothing_are_answered_by_one_task(kernel: Kernel) -> None:
    door = Door(kernel)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.device.serve, door.answer)
        for unique in range(1, 20):
            kernel.ask(unique)
            assert await kernel.answer() == (unique, 0)
        kernel.device.stop()
    assert len({*door.tasks}) == 1


async def test_a_request_that_waits_holds_up_no_other(kernel: Kernel) -> None:
    door = Door(kernel)
    waiting = range(100, 200)
    door.waits = {unique: trio.Event() for unique in waiting}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.device.serve, door.answer)
        for unique in waiting:
            kernel.ask(unique)
        kernel.ask(1)
        assert await kernel.answer() == (1, 0)
        for unique in reversed(waiting):
            door.waits[unique].set()
            assert await kernel.answer() == (unique, 0)
        # The tasks that are left go on to lead.
        kernel.ask(2)
        assert await kernel.answer() == (2, 0)
        kernel.device.stop()


async def test_what_is_under_way_at_a_stop_is_answered(kernel: Kernel) -> None:
    door = Door(kernel)
    door.waits = {1: trio.Event()}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.device.serve, door.answer)
        kernel.ask(1)
        await trio.testing.wait_all_tasks_blocked()
        kernel.device.stop()
        kernel.ask(2)
        await trio.testing.wait_all_tasks_blocked()
        door.waits[1].set()
        assert await kernel.answer() == (1, 0)
    assert len(door.tasks) == 1


async def test_other_tasks_have_their_turn_while_requests_never_end(kernel: Kernel) -> None:
    class Endless(Door):
        async def answer(self, request: Request) -> None:
            kernel.ask(request.unique + 1)  # there is always one more

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.device.serve, Endless(kernel).answer)
        kernel.ask(1)
        with trio.fail_after(WAIT_S):
            for _ in range(10):
                await trio.sleep(0)
        nursery.cancel_scope.cancel()


async def test_an_answer_is_waited_for_in_place_where_nothing_else_is_to_be_done(kernel: Kernel) -> None:
    reader, writer = os.pipe()
    door = Door(kernel)
    door.waits = {2: trio.Event()}
    try:
        assert not kernel.device.wait_in_place(reader), "nothing comes"
        os.write(writer, b"answer")
        assert kernel.device.wait_in_place(reader)
        os.read(reader, 6)
        kernel.ask(1)
        assert not kernel.device.wait_in_place(reader), "a request is there to be answered"
        os.write(writer, b"answer")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kernel.device.serve, door.answer)
            assert await kernel.answer() == (1, 0)
            kernel.ask(2)
            await trio.testing.wait_all_tasks_blocked()
            assert not kernel.device.wait_in_place(reader), "whoever waits would have to wait for this, too"
            door.waits[2].set()
            assert await kernel.answer() == (2, 0)
            kernel.device.stop()
        assert not kernel.device.wait_in_place(reader), "the mount ends"
    finally:
        os.close(reader)
        os.close(writer)


async def test_cancelled_tasks_end(kernel: Kernel) -> None:
    door = Door(kernel)
    door.waits = {unique: trio.Event() for unique in range(1, 5)}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kernel.device.serve, door.answer)
        for unique in door.waits:
            kernel.ask(unique)
        await trio.testing.wait_all_tasks_blocked()
        door.waits[1].set()  # one is idle, three wait, one leads
        assert await kernel.answer() == (1, 0)
        nursery.cancel_scope.cancel()


class Broken:
    """Knows every inode, and fails with each."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, _kino: int) -> Any:
        raise self._error

    @property
    def handles(self) -> Any:
        raise self._error

    async def space(self) -> Any:
        raise self._error


ASKS_THE_CORE = {*Opcode} - {
    Opcode.INIT,
    Opcode.DESTROY,
    Opcode.FORGET,
    Opcode.BATCH_FORGET,
    Opcode.GETXATTR,
    Opcode.SETXATTR,
    Opcode.LISTXATTR,
    Opcode.REMOVEXATTR,
}


@pytest.mark.parametrize("opcode", sorted(ASKS_THE_CORE), ids=lambda opcode: opcode.name.lower())
@pytest.mark.parametrize(
    ("error", "number"), [(RuntimeError("ours"), errno.EIO), (NotFound("x"), errno.ENOENT)], ids=["fault", "refusal"]
)
async def test_no_exception_leaves_an_answer(kernel: Kernel, opcode: Opcode, error: Exception, number: int) -> None:
    broken: Any = Broken(error)
    operations = Operations(kernel.device, broken, broken, xattr=False)
    await operations.answer(Request(7, opcode, protocol.ROOT, 0, 0, bytes(128) + b"a\0b\0"))
    assert await kernel.answer() == (7, number)


async def test_what_nobody_handles_is_not_asked_again(kernel: Kernel) -> None:
    """The kernel remembers ENOSYS."""
    operations = Operations(kernel.device, InodeTable(), None, xattr=False)
    for unique, opcode in enumerate((36, 39, 40, 43, 46, 47, 51, 52, 4096), 1):
        await operations.answer(Request(unique, opcode, protocol.ROOT, 0, 0, bytes(128)))
        assert await kernel.answer() == (unique, errno.ENOSYS)


async def test_a_kernel_that_is_too_old_is_refused(kernel: Kernel) -> None:
    operations = Operations(kernel.device, InodeTable(), None, xattr=False)
    await operations.answer(Request(1, Opcode.INIT, 0, 0, 0, protocol.INIT_IN.pack(7, 19, 0, 0)))
    assert await kernel.answer() == (1, errno.EPROTO)
    await operations.answer(Request(2, Opcode.INIT, 0, 0, 0, protocol.INIT_IN.pack(7, 45, 0, protocol.WANTED)))
    assert await kernel.answer() == (2, 0)


SIZES = {
    protocol.IN_HEADER: 40,
    protocol.SETATTR_IN: 88,
    protocol.MKNOD_IN: 16,
    protocol.MKDIR_IN: 8,
    protocol.RENAME2_IN: 16,
    protocol.CREATE_IN: 16,
    protocol.READ_IN: 40,
    protocol.WRITE_IN: 40,
    protocol.OUT_HEADER: 16,
    protocol.INIT_OUT: 64,
    protocol.WRITE_OUT: 8,
}


def test_structures_have_the_sizes_of_the_header() -> None:
    """<linux/fuse.h>, on every 64-bit machine."""
    assert {struct: struct.size for struct in SIZES} == SIZES
    assert len(protocol.absent_out(1)) == 128
    assert len(protocol.open_out(1)) == 16
