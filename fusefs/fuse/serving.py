"""The life of one kernel mount: mount, serve, stop, unmount.

Decided here and only here: the mount options, how many requests may be under way, and that only our
own mount is unmounted. pyfuse3 keeps one mount per process.

Threading: trio; `stop` may be called from any task.
"""

from __future__ import annotations

import os

import pyfuse3
import trio

from fusefs.core.filesystem import Filesystem
from fusefs.core.mounted import Mounted
from fusefs.fuse import turns
from fusefs.fuse.mounting import forbid_symlinks, is_mounted
from fusefs.fuse.operations import Operations
from fusefs.rules.errors import MountFailed

_MAX_TASKS = 10_000
"""pyfuse3's default of 99 lets handlers that wait for Postgres stop look-ups that need nothing (measured: 7 s)."""


class KernelMount:
    """A mount point in the kernel's hands.

    Args:
        nosymfollow: no path walk through the mount follows a symlink (root only).

    Raises MountFailed.
    """

    def __init__(
        self, mountpoint: str, mounted: Mounted, root: Filesystem, *, allow_other: bool, nosymfollow: bool
    ) -> None:
        self._mountpoint = mountpoint
        self.connection = 0
        settings = mounted.settings
        options = {"fsname=fusefs", "subtype=fusefs"}
        if allow_other:
            options.add("allow_other")
        if allow_other or os.geteuid() != 0:
            # Where root alone gets in, modes decide nothing but whether a file may be executed (see
            # `Operations.access`); and with the option the kernel asks for a directory's attributes after each
            # change in it (one request in six of a create, one in two of an unlink).
            options.add("default_permissions")
        if settings.read_only:
            options.add("ro")
        try:
            pyfuse3.init(Operations(mounted.table, root, xattr=settings.xattr), mountpoint, options)
        except RuntimeError as error:
            raise MountFailed(
                f"the kernel refused to mount {mountpoint}", hint="The lines above say why (libfuse)."
            ) from error
        if nosymfollow and os.geteuid() == 0:
            forbid_symlinks(mountpoint, read_only=settings.read_only)

    async def serve(self) -> None:
        """Answer requests until unmounted or stopped."""
        turns.install()
        await pyfuse3.main(min_tasks=16, max_tasks=_MAX_TASKS)

    async def wait_answer(self) -> int:
        """Return when the mount has answered once, which proves that it serves: its connection's number."""
        stat = await trio.to_thread.run_sync(os.stat, self._mountpoint)
        self.connection = os.minor(stat.st_dev)
        return self.connection

    def stop(self) -> None:
        pyfuse3.terminate()

    def close(self, *, unmount: bool) -> None:
        """Let go of the kernel; with `unmount`, of the mount point too, if it is still ours."""
        pyfuse3.close(unmount=unmount and is_mounted(self._mountpoint, self.connection))
