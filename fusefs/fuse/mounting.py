"""Mounting and unmounting.

Decided here and only here: how a mount is made (root by mount(2), others by `fusermount3`), how its connection is
aborted, how `nosymfollow` is set (agents choose what their symlinks say, so an administrator's view and a host's own
view must not follow them), and whether a mount is still ours.

Threading: blocking system calls of some microseconds; of some milliseconds where `fusermount3` makes them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import subprocess

from fusefs.rules.errors import MountFailed

# <linux/mount.h>
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_NOSYMFOLLOW, _MS_RDONLY = 2, 4, 32, 4096, 256, 1
_MNT_FORCE, _MNT_DETACH = 1, 2
_FUSECTL = "/sys/fs/fuse/connections"
_HELPER = "fusermount3"
_NAME = "fusefs"

_libc = ctypes.CDLL(None, use_errno=True)


def mount(mountpoint: str, options: set[str], *, read_only: bool) -> int:
    """Mount, and return the open /dev/fuse.

    Args:
        options: of the kernel's FUSE, such as `allow_other`.

    Raises MountFailed.
    """
    return (_mount_as_root if os.geteuid() == 0 else _mount_by_helper)(mountpoint, options, read_only=read_only)


def _mount_as_root(mountpoint: str, options: set[str], *, read_only: bool) -> int:
    try:
        mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountFailed(f"{mountpoint} cannot be mounted: {error.filename}: {error.strerror}") from error
    data = ",".join((f"fd={fd},rootmode={mode:o},user_id={os.geteuid()},group_id={os.getegid()}", *sorted(options)))
    flags = _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if read_only else 0)
    if _libc.mount(_NAME.encode(), os.fsencode(mountpoint), b"fuse." + _NAME.encode(), flags, data.encode()) != 0:
        os.close(fd)
        reason = os.strerror(ctypes.get_errno())
        raise MountFailed(f"the kernel refused to mount {mountpoint}: {reason}")
    return fd


def _mount_by_helper(mountpoint: str, options: set[str], *, read_only: bool) -> int:
    """The helper is set-user-ID root: it checks who may mount where, mounts, and sends the open device back."""
    words = ",".join((f"fsname={_NAME},subtype={_NAME}", *sorted(options), *(("ro",) if read_only else ())))
    ours, its = socket.socketpair()
    with ours:
        with its:
            try:
                process = subprocess.Popen(
                    [_HELPER, "-o", words, "--", mountpoint],
                    env={**os.environ, "_FUSE_COMMFD": str(its.fileno())},
                    pass_fds=(its.fileno(),),
                )
            except OSError as error:
                raise MountFailed(f"{_HELPER} cannot be run: {error.strerror}", hint="Install fuse3.") from error
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    process.wait()
    if not descriptors:
        raise MountFailed(f"{mountpoint} cannot be mounted", hint=f"The lines above say why ({_HELPER}).")
    (fd,) = descriptors
    os.set_inheritable(fd, False)
    return fd


def abort_connection(number: int, mountpoint: str | None) -> None:
    """Abort a FUSE connection: every request that waits for its daemon fails, and so do later ones.

    Does nothing for a connection that is gone. Where fusectl is not mounted, a forced umount2(2) by root does
    the same, and unmounts too when nothing holds the mount; not with None for the mount point.
    """
    try:
        with open(f"{_FUSECTL}/{number}/abort", "w", encoding="ascii") as file:
            file.write("1")
    except (FileNotFoundError, PermissionError):
        if os.geteuid() == 0 and mountpoint is not None:
            # What it answers does not matter: the abort comes before the check for "busy".
            _libc.umount2(os.fsencode(mountpoint), _MNT_FORCE)


def unmount(mountpoint: str) -> None:
    """Detach the uppermost mount at a path; one that has gone meanwhile is well."""
    if os.geteuid() == 0:
        _libc.umount2(os.fsencode(mountpoint), _MNT_DETACH)
    else:
        subprocess.run([_HELPER, "-u", "-q", "-z", "--", mountpoint], check=False)


def forbid_symlinks(mountpoint: str, *, read_only: bool) -> None:
    """Remount so that no path walk through the mount follows a symlink; needs root and Linux 5.10.

    Raises MountFailed.
    """
    flags = _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV | _MS_NOSYMFOLLOW | (_MS_RDONLY if read_only else 0)
    if _libc.mount(b"none", os.fsencode(mountpoint), None, flags, None) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise MountFailed(f"{mountpoint} cannot be mounted with nosymfollow ({reason})")


def is_mounted(mountpoint: str, connection: int) -> bool:
    """Whether the uppermost mount at a path is the one with this connection number.

    Reads mountinfo, not the mount, which may not answer any more. A mount that was detached lives on
    while something holds it; by then another may be at its path, which is not ours to unmount.
    """
    wanted = os.fsencode(mountpoint).decode("latin-1")  # one character a byte, as unicode_escape gives
    uppermost = None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split(" ")
            if fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape") == wanted:
                uppermost = fields[2]
    return uppermost is not None and uppermost.partition(":")[2] == str(connection)
