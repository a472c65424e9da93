"""Mount options that libfuse does not know.

Decided here and only here: how `nosymfollow` is set. Agents choose what their symlinks say, so an
administrator's view and a host's own view must not follow them.

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
