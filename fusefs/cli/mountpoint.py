"""The directory that a mount goes to: checks before, clean-up of what a dead daemon left, and unmounting.

Decided here and only here: when a mount point may be used, when a mount counts as dead, and in which order a
dead one is cleared: abort its connection (a frozen daemon holds every request, and survives even kill -9,
until then), unmount lazily, forget its record.

Threading: plain blocking calls with one thread only (see `processes.read_with_timeout`).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from enum import Enum

from fusefs.cli import processes, registry
from fusefs.rules.errors import MountFailed

FUSE_DEVICE = "/dev/fuse"
PROBE_TIMEOUT_S = 3.0
"""A daemon that answers nothing for this long is frozen: .fusefs/status asks neither Postgres nor the kernel."""

END_TIMEOUT_S = 30.0
"""How long the end of a daemon is waited for: it commits what is buffered, each write at most 5 s."""


class Health(Enum):
    """What a mount is found to be."""

    ALIVE = "alive"
    DEAD = "dead"
    FROZEN = "frozen"


def canonical(path: str) -> str:
    """The absolute path of a mount point, links in its parents resolved. Asks nothing of the directory itself,
    which may be a mount that never answers."""
    absolute = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def health(mountpoint: str, record: registry.Record | None) -> tuple[Health, bytes]:
    """Whether a mount answers, and what its .fusefs/status says.

    A daemon that runs and refuses that file is alive: it may be no namespace's mount, or another user's.
    """
    if record is not None and not record.alive:
        return Health.DEAD, b""
    if record is not None and processes.is_stopped(record.pid):
        return Health.FROZEN, b""
    try:
        return Health.ALIVE, processes.read_with_timeout(f"{mountpoint}/.fusefs/status", PROBE_TIMEOUT_S)
    except processes.NoAnswer:
        return Health.FROZEN, b""
    except OSError as exc:
        if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV):
            return Health.DEAD, b""
        return Health.ALIVE, b""


def prepare(path: str) -> str:
    """Make sure that a file system can be mounted on a directory, clearing away a dead mount of ours.

    Returns the canonical path. Raises MountFailed with what is wrong and what to do.
    """
    check_tools()
    mountpoint = canonical(path)
    mount = processes.mount_at(mountpoint)
    if mount is not None and mount.is_fuse:
        record = registry.find(mountpoint)
        state, _ = health(mountpoint, record)
        if state is Health.ALIVE:
            raise MountFailed(
                f"something is mounted on {mountpoint} already" + (f" by pid {record.pid}" if record else ""),
                hint=f"Run `fusefs umount {mountpoint}` first, or choose another directory.",
            )
        clear(mountpoint, mount.connection, record)
    _check_directory(mountpoint)
    return mountpoint


def check_tools() -> None:
    """Raises MountFailed when this machine cannot mount FUSE file systems."""
    if not os.path.exists(FUSE_DEVICE):
        raise MountFailed(
            f"{FUSE_DEVICE} is missing",
            hint="Load the module with `modprobe fuse`; a container needs `--device /dev/fuse --cap-add SYS_ADMIN`.",
        )
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        raise MountFailed(
            f"{FUSE_DEVICE} cannot be opened by this user", hint=f"Run as root, or `chmod 666 {FUSE_DEVICE}`."
        )
    _fusermount()


def _fusermount() -> str:
    program = shutil.which("fusermount3")
    if program is None:
        raise MountFailed("fusermount3 is missing", hint="Install Debian's package with `apt install fuse3`.")
    return program


def _check_directory(mountpoint: str) -> None:
    try:
        entries = os.listdir(mountpoint)
    except FileNotFoundError as exc:
        raise MountFailed(
            f"the mount point {mountpoint} does not exist", hint=f"Make it with `mkdir -p {mountpoint}`."
        ) from exc
    except NotADirectoryError as exc:
        raise MountFailed(f"the mount point {mountpoint} is not a directory") from exc
    except OSError as exc:
        hint = "Unmount it first, with `umount -l`." if exc.errno == errno.ENOTCONN else ""
        raise MountFailed(f"the mount point {mountpoint} cannot be read ({exc.strerror})", hint=hint) from exc
    if entries:
        raise MountFailed(
            f"the mount point {mountpoint} is not empty",
            hint="Its files would be hidden: choose an empty directory, or import them with `fusefs import`.",
        )
    if not os.access(mountpoint, os.W_OK):
        raise MountFailed(f"the mount point {mountpoint} is not writable by this user")


def clear(mountpoint: str, connection: int, record: registry.Record | None) -> None:
    """Remove a mount whose daemon is dead or frozen, and end that daemon if it still runs.

    Raises MountFailed when it cannot be unmounted.
    """
    from fusefs.fuse import mounting

    mounting.abort_connection(connection, mountpoint)
    if record is not None and record.alive:
        os.kill(record.pid, signal.SIGKILL)
        processes.wait_gone(record.pid, record.process_start, END_TIMEOUT_S)
    if processes.mount_at(mountpoint) is not None:
        unmount(mountpoint, lazy=True)
    if record is not None:
        registry.remove(record)


def unmount(mountpoint: str, lazy: bool = False) -> None:
    """Unmount a FUSE file system. Raises MountFailed, naming who holds it when it is busy."""
    command = [_fusermount(), "-u", *(["-z"] if lazy else []), "--", mountpoint]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    reason = done.stderr.strip().rpartition(": ")[2] or f"fusermount3 exited with {done.returncode}"
    if "busy" in reason.lower():
        names = processes.holders(mountpoint)
        raise MountFailed(
            f"{mountpoint} is busy" + (f": in use by {', '.join(names[:8])}" if names else ""),
            hint="End those processes or leave the directory, or use --force.",
        )
    raise MountFailed(f"{mountpoint} cannot be unmounted ({reason})")
