"""The connection to the kernel: which task answers, and that nothing but an answer leaves. The kernel is a socket of
ours, which keeps the bounds of messages as /dev/fuse does."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing

from fusefs.core.attributes import Stat
from fusefs.core.filesystem import Filesystem, Inode, InodeTable
from fusefs.core.tree import Node
from fusefs.fuse import protocol
from fusefs.fuse.device import Device
from fusefs.fuse.operations import Operations
from fusefs.fuse.protocol import Opcode, Request
from fusefs.rules.errors import NotFound
from fusefs.rules.model import Kind
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
        with contextlib.suppress(OSError):  # a test has closed it
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


async def test_an_answer_that_the_kernel_does_not_take_is_an_error_of_the_request(kernel: Kernel) -> None:
    """It ended the mount: a READLINK whose row, made by plain SQL, has more than the kernel takes."""

    class TooLong(Broken):
        async def space(self) -> Any:
            return None

    found: Any = TooLong(RuntimeError())
    operations = Operations(kernel.device, found, found, xattr=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "statfs_out", lambda _space: bytes(1 << 24))  # more than a socket's buffer
        await operations.answer(Request(7, Opcode.STATFS, protocol.ROOT, 0, 0, b""))
    assert await kernel.answer() == (7, errno.EIO)


async def test_what_is_told_after_the_end_reaches_no_other_file(kernel: Kernel) -> None:
    """A thread that tells the kernel something may come to it when the device is closed, and its number another's."""
    kernel.device.close()
    other = os.open("/dev/null", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            kernel.device.notify(b"notice")
    finally:
        os.close(other)


class Directory(Filesystem):
    """One whose second entry has to be waited for."""

    def __init__(self, table: InodeTable, names: list[str]) -> None:
        super().__init__(table)
        nodes = {name: Node(name, Kind.FILE, ino, name, None) for ino, name in enumerate(names, 2)}
        self.children = {name: table.obtain(self, node) for name, node in nodes.items()}
        self.root = table.obtain(self, Node("root", Kind.DIR, protocol.ROOT, "", None))
        self.root.lookups = 1
        self.waits, self.goes_on = trio.Event(), trio.Event()
        self.error: Exception | None = None

    def stat(self, inode: Inode) -> Stat:
        return Stat(inode.kino, 0, 0o644, 1, 0, 0, inode.node.size, 0, 0, 0, 1, 1)

    async def list_names(self, inode: Inode) -> list[str]:
        return [*self.children]

    async def entry(self, parent: Inode, name: str) -> Inode | None:
        if name == [*self.children][1]:
            self.waits.set()
            await self.goes_on.wait()
            if self.error is not None:
                raise self.error
        return self.children[name]


@pytest.fixture
async def listed() -> tuple[Directory, Operations, Request]:
    """A directory, and a request that lists it."""
    table = InodeTable()
    directory = Directory(table, ["a", "b"])
    operations = Operations(Any, table, None, xattr=False)  # type: ignore[arg-type]
    fh = (await directory.opendir(directory.root)).fh
    body = protocol.READ_IN.pack(fh, 0, 4096, 0, 0, 0, 0)
    return directory, operations, Request(1, Opcode.READDIRPLUS, protocol.ROOT, 0, 0, body)


async def test_a_listing_tells_attributes_as_they_are_at_its_end(listed: tuple[Directory, Operations, Request]) -> None:
    """What changes while an entry is waited for cannot be told to a kernel that does not know the inode yet."""
    directory, operations, request = listed
    found = b""

    async def ask() -> None:
        nonlocal found
        found = await operations.readdir(request)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await directory.waits.wait()
        first = directory.children["a"]
        first.node.size, first.node.version = 77, 5
        directory.goes_on.set()
    assert found == b"".join(
        protocol.direntplus(name.encode(), position, directory.stat(inode))
        for position, (name, inode) in enumerate(directory.children.items(), 1)
    )
    assert [inode.lookups for inode in directory.children.values()] == [1, 1]
    assert directory.children["a"].told == 5


async def test_entries_of_a_listing_that_fails_are_not_held(listed: tuple[Directory, Operations, Request]) -> None:
    directory, operations, request = listed
    directory.error = NotFound("x")
    directory.goes_on.set()
    with pytest.raises(NotFound):
        await operations.readdir(request)
    assert [inode.lookups for inode in directory.children.values()] == [0, 0]


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
