"""What libfuse does not know of mounts.

Decided here and only here: how `nosymfollow` is set (agents choose what their symlinks say, so an
administrator's view and a host's own view must not follow them), and whether a mount is still ours.

Threading: blocking system calls of some microseconds.
"""

from __future__ import annotations

import ctypes
import os

from fusefs.rules.errors import MountFailed

# <linux/mount.h>
_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_NOSYMFOLLOW, _MS_RDONLY = 2, 4, 32, 4096, 256, 1


def forbid_symlinks(mountpoint: str, *, read_only: bool) -> None:
    """Remount so that no path walk through the mount follows a symlink; needs root and Linux 5.10.

    Raises MountFailed.
    """
    flags = _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV | _MS_NOSYMFOLLOW | (_MS_RDONLY if read_only else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(mountpoint), None, flags, None) != 0:
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
