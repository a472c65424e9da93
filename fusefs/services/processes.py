"""Running a command of somebody else: with a time limit, in a tree of processes of which nothing is left afterwards.

Decided here and only here: how `supervisor.py` is started and listened to, what a command's environment lacks, and
which exit code stands for which end. Used for an agent's commands and for hooks.

Threading: trio. Any number may run at once. A command that fills its pipes waits for us, never the other way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio
from trio.lowlevel import FdStream

from fusefs.rules.preview import encode, shown
from fusefs.services import supervisor

TIMED_OUT = 124
"""The exit code of a command that was ended after its time, as timeout(1) gives it."""

CANNOT_RUN = 126
NOT_FOUND = 127
"""The exit codes of a shell for what may not be executed and what does not exist."""

_MARK = "FUSEFS_COMMAND_ID"
"""In the environment of a command, another value each time: how its processes are found without its supervisor."""

_SCRIPT = Path(supervisor.__file__)
_CHUNK = 64 * 1024
_SUPERVISOR_LATE_S = 5.0
"""How much later than all its limits together a supervisor may end, before it is given up."""

_KILL_PASSES = 200
"""How often to look for processes to kill; what SIGKILL does not end, a pass more does not either."""

Sink = Callable[[bytes], object]
"""Takes what a command prints, in order. It must not block for long: nothing else runs meanwhile."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds.

    Args:
        timeout_s: for the command itself.
        grace_s: between SIGTERM and SIGKILL (DE-04).
        linger_s: for background processes after the command itself has ended, before they get SIGTERM.
    """

    timeout_s: float = 120.0
    grace_s: float = 5.0
    linger_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        exit_code: the command's own; 128 + N when signal N ended it, also ours; `TIMED_OUT`, `CANNOT_RUN`, `NOT_FOUND`.
        signal: the one that ended it; None when it exited.
        leftovers: background processes that outlived the command and were ended.
        unkillable: processes that not even SIGKILL ended.
        failure: why it was not run, or what became of it; '' where there is nothing to say.
    """

    exit_code: int
    signal: int | None = None
    timed_out: bool = False
    leftovers: int = 0
    unkillable: int = 0
    failure: str = ""


def without_database(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment less everything that opens the database: what runs for an agent or a hook has no use for it."""
    return {
        name: value
        for name, value in environment.items()
        if not (name.startswith("PG") or (name.startswith("HANGO_FS_") and name.endswith("DSN")))
    }


async def run_tree(
    command: Sequence[str],
    *,
    directory: str,
    environment: Mapping[str, str],
    patience: Patience,
    on_stdout: Sink,
    on_stderr: Sink,
    stdin: bytes = b"",
    signals: AsyncIterable[int] | None = None,
) -> Ended:
    """Run a command until nothing of it is left.

    Args:
        command: program and arguments; no shell reads them.
        directory: where it runs. It is held only by the command's own processes.
        stdin: what it can read; then comes the end of file.
        signals: numbers that arrive here go to the whole tree, which gets SIGKILL after the grace.

    A cancellation ends the tree in the same way, and returns when nothing of it is left. Raises OSError only where
    this process itself is out of descriptors or processes.
    """
    if not command or not command[0]:
        return Ended(NOT_FOUND, failure="no command was given")
    if not all(map(_can_be_passed, (*command, directory))):
        return Ended(CANNOT_RUN, failure=f"{shown(encode(command[0]))}: cannot be run: NUL or half a character in it")
    mark = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as stack:
        stack.callback(ours.close)
        with theirs, _as_file(stdin) as stdin_file:
            arguments = [
                *(sys.executable, "-I", "-S", str(_SCRIPT), str(theirs.fileno())),
                *(str(seconds) for seconds in (patience.timeout_s, patience.grace_s, patience.linger_s)),
                *(directory, *command),
            ]
            try:
                process = await trio.lowlevel.open_process(
                    arguments,
                    stdin=stdin_file,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**environment, _MARK: mark},
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as exc:
                if exc.errno == errno.E2BIG:
                    return _failed("command", exc.errno, command[0], directory)
                raise
        assert isinstance(process.stdout, FdStream)
        assert isinstance(process.stderr, FdStream)
        control = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        running = _Running(process, control, patience, mark)
        async with process.stdout, process.stderr, control:
            report = await running.wait({process.stdout: on_stdout, process.stderr: on_stderr}, signals)
    return _ended(report, command[0], directory)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[int]:
    """The content as a file, so that nobody has to feed a pipe that the command may never read."""
    if not content:
        yield subprocess.DEVNULL
        return
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


class _Running:
    """One supervisor that was started."""

    def __init__(self, process: trio.Process, control: trio.SocketStream, patience: Patience, mark: str) -> None:
        self._process = process
        self._control = control
        self._patience = patience
        self._mark = mark

    async def wait(self, sinks: Mapping[FdStream, Sink], signals: AsyncIterable[int] | None) -> dict[str, Any]:
        try:
            async with trio.open_nursery() as nursery:
                for stream, sink in sinks.items():
                    nursery.start_soon(_copy, stream, sink)
                if signals is not None:
                    nursery.start_soon(self._pass_on, signals)
                report = await self._report_in_time()
                nursery.cancel_scope.cancel()
        except BaseException:
            await self._end()
            raise
        with trio.CancelScope(shield=True):
            await self._process.wait()
        # The tree has ended: what it printed last is in the pipes. The end of file may never come, when somebody
        # outside the tree was handed a pipe.
        for stream, sink in sinks.items():
            _drain(stream.fileno(), sink)
        return report

    async def _report_in_time(self) -> dict[str, Any]:
        """What the supervisor says; {} when it was killed, or hangs beyond all its limits."""
        patience = self._patience
        limit_s = patience.timeout_s + patience.grace_s + patience.linger_s + supervisor.KILLED_S + _SUPERVISOR_LATE_S
        line = b""
        # Broken rather than ended: it left a signal unread.
        with trio.move_on_after(limit_s), contextlib.suppress(trio.BrokenResourceError):
            while chunk := await self._control.receive_some(_CHUNK):
                line += chunk
        if not line.endswith(b"\n"):
            await self._kill()
            return {}
        report: dict[str, Any] = json.loads(line)
        return report

    async def _pass_on(self, signals: AsyncIterable[int]) -> None:
        async for number in signals:
            with contextlib.suppress(trio.BrokenResourceError):  # it has just ended
                await self._control.send_all(bytes((number,)))

    async def _end(self) -> None:
        """End the tree after a cancellation or a fault of ours."""
        patience = self._patience
        with trio.CancelScope(shield=True):
            with trio.move_on_after(patience.grace_s + supervisor.KILLED_S + _SUPERVISOR_LATE_S):
                await self._control.aclose()
                await self._process.wait()
            if self._process.returncode != 0:
                await self._kill()

    async def _kill(self) -> None:
        """Without a supervisor's help: what has no mark in its environment any more escapes."""
        with trio.CancelScope(shield=True):
            self._process.kill()
            await self._process.wait()
            await trio.to_thread.run_sync(_kill_marked, f"{_MARK}={self._mark}".encode())


def _ended(report: Mapping[str, Any], name: str, directory: str) -> Ended:
    if not report:
        return Ended(128 + signal.SIGKILL, signal.SIGKILL, failure="the command's supervisor was killed")
    if "failed" in report:
        return _failed(report["failed"], report["errno"], name, directory)
    code, timed_out = report["code"], report["timed_out"]
    by_signal = -code if code < 0 else None
    exit_code = TIMED_OUT if timed_out else code if by_signal is None else 128 + by_signal
    return Ended(exit_code, by_signal, timed_out, report["leftovers"], report["unkillable"])


def _failed(doing: str, number: int, name: str, directory: str) -> Ended:
    why = os.strerror(number)
    what = shown(encode(directory if doing == "directory" else name))
    if doing == "directory":
        return Ended(CANNOT_RUN, failure=f"{what}: cannot run there: {why}")
    if doing == "supervisor":
        return Ended(CANNOT_RUN, failure=f"{what}: cannot be supervised: {why}")
    if number == errno.ENOENT and "/" not in name:
        return Ended(NOT_FOUND, failure=f"{what}: command not found")
    missing = number in (errno.ENOENT, errno.ENOTDIR)
    return Ended(NOT_FOUND if missing else CANNOT_RUN, failure=f"{what}: cannot be run: {why}")


async def _copy(stream: FdStream, sink: Sink) -> None:
    while chunk := await stream.receive_some(_CHUNK):
        sink(chunk)


def _drain(fd: int, sink: Sink) -> None:
    """Take what a pipe holds, without waiting: trio has made our end non-blocking. Whoever still writes to it may go on
    for ever, so no more is taken than fits into it."""
    left = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
    with contextlib.suppress(BlockingIOError):
        while left > 0 and (chunk := os.read(fd, min(left, _CHUNK))):
            left -= len(chunk)
            sink(chunk)


def _can_be_passed(text: str) -> bool:
    """Whether the kernel takes it for an argument: a model's text may hold NUL, or a surrogate that stands for no
    byte."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _kill_marked(variable: bytes) -> None:
    """SIGKILL every process with a variable in its environment, until none is found: they may be forking."""
    for _ in range(_KILL_PASSES):
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and variable in _environment(name)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _environment(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        # It has ended, or is another user's: then it is not ours to end.
        return []
