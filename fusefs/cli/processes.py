"""Processes and mounts of this machine, as /proc tells of them.

Decided here and only here: how a process is recognised (a pid alone is reused), which mounts there are
(/proc/self/mountinfo: stat of a mount whose daemon is frozen never returns), and how a file is read that
may never answer.

Threading: plain blocking calls; `read_with_timeout` forks and must be called with one thread only.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `connection` is the FUSE connection's number (the device's minor)."""

    mountpoint: str
    fstype: str
    source: str
    connection: int

    @property
    def is_fuse(self) -> bool:
        return self.fstype == "fuse" or self.fstype.startswith("fuse.")


def mounts() -> list[Mount]:
    """Every mount that this process can see, the newest last."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.rstrip("\n").partition(" - ")
            fields, rest = before.split(" "), after.split(" ")
            minor = int(fields[2].partition(":")[2])
            found.append(Mount(_unescape(fields[4]), rest[0], _unescape(rest[1]), minor))
    return found


def _unescape(text: str) -> str:
    raw = text.encode("utf-8", "surrogateescape")
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), raw)
    return raw.decode("utf-8", "surrogateescape")


def mount_at(mountpoint: str) -> Mount | None:
    """The topmost mount at exactly this directory."""
    here = [mount for mount in mounts() if mount.mountpoint == mountpoint]
    return here[-1] if here else None


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when there is none. With the pid it names a
    process for good. A zombie counts as gone."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger stopped the process."""
    fields = _stat(pid)
    return fields is not None and fields[0] in "Tt"


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may hold blanks and parentheses itself.
    return text.rpartition(")")[2].split()


def wait_gone(pid: int, started: int, timeout_s: float) -> bool:
    """Wait until that process has ended. False when it still runs after the timeout."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(pid) != started:
            return True
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def holders(mountpoint: str) -> list[str]:
    """Processes with their working directory, root or an open file below a mount, as `pid (name)`.

    Reads links only, so that a frozen mount cannot hang it; other users' processes stay unseen.
    """
    below = mountpoint.rstrip("/") + "/"
    found = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if any(target == mountpoint or target.startswith(below) for target in _links(pid)):
            found.append(f"{pid} ({_name(pid)})")
    return found


def _links(pid: int) -> Iterator[str]:
    base = f"/proc/{pid}"
    try:
        descriptors = [f"fd/{fd}" for fd in os.listdir(f"{base}/fd")]
    except OSError:
        # The process has gone or is another user's: not ours to name.
        descriptors = []
    for link in ("cwd", "root", "exe", *descriptors):
        try:
            yield os.readlink(f"{base}/{link}")
        except OSError:
            continue


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "?"


class NoAnswer(Exception):
    """The read did not end in time."""


def read_with_timeout(path: str, timeout_s: float) -> bytes:
    """Read a file that may belong to a frozen file system.

    A child reads, since a process that waits for a frozen FUSE daemon cannot be interrupted. A child that
    does not even die of SIGKILL is left behind; it ends when the connection is aborted.

    Raises NoAnswer after the timeout, OSError as the read did.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _read_as_child(path, writer)
    os.close(writer)
    try:
        data = _drain(reader, time.monotonic() + timeout_s)
    except NoAnswer:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, os.WNOHANG)
        raise
    finally:
        os.close(reader)
    os.waitpid(child, 0)
    number, _, content = data.partition(b"\n")
    if number != b"0":
        code = int(number or b"5")
        raise OSError(code, os.strerror(code), path)
    return content


def _read_as_child(path: str, writer: int) -> None:
    try:
        with open(path, "rb") as file:
            content = file.read()
        answer = b"0\n" + content
    except OSError as exc:
        answer = b"%d\n" % (exc.errno or 5)
    try:
        with open(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        # No clean-up of the parent's state may run twice.
        os._exit(0)


def _drain(reader: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while True:
        ready = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            raise NoAnswer
        part = os.read(reader, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
