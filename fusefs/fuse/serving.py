"""The life of one kernel mount: mount, serve, stop, unmount.

Decided here and only here: the mount options, and that only our own mount is unmounted.

Threading: trio; `stop` may be called from any task.
"""

from __future__ import annotations

import os

import trio

from fusefs.core.filesystem import Filesystem
from fusefs.core.mounted import Mounted
from fusefs.fuse import mounting
from fusefs.fuse.device import Device
from fusefs.fuse.operations import Operations
from fusefs.rules.errors import MountFailed


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
        options = set()
        if allow_other:
            options.add("allow_other")
        if allow_other or os.geteuid() != 0:
            # Where root alone gets in, modes decide nothing but whether a file may be executed (see
            # `Operations.access`); and with the option the kernel asks for a directory's attributes after each
            # change in it (one request in six of a create, one in two of an unlink).
            options.add("default_permissions")
        self.device = Device(mounting.mount(mountpoint, options, read_only=settings.read_only))
        self._operations = Operations(self.device, mounted.table, root, xattr=settings.xattr)
        if nosymfollow and os.geteuid() == 0:
            try:
                mounting.forbid_symlinks(mountpoint, read_only=settings.read_only)
            except MountFailed:
                self.device.close()
                mounting.unmount(mountpoint)
                raise

    async def serve(self) -> None:
        """Answer requests until unmounted or stopped."""
        await self.device.serve(self._operations.answer)

    async def wait_answer(self) -> int:
        """Return when the mount has answered once, which proves that it serves: its connection's number."""
        stat = await trio.to_thread.run_sync(os.stat, self._mountpoint)
        self.connection = os.minor(stat.st_dev)
        return self.connection

    def stop(self) -> None:
        self.device.stop()

    def close(self, *, unmount: bool) -> None:
        """Let go of the kernel; with `unmount`, of the mount point too, if it is still ours."""
        if self.device.connected and self.connection:
            # A thread that tells the kernel to drop a name waits for the directory's lock, which a process holds that
            # waits for an answer. It keeps the device open, beyond the end of this process: both would wait for ever.
            mounting.abort_connection(self.connection, self._mountpoint if unmount and self._is_ours() else None)
        self.device.close()
        if unmount and self._is_ours():
            mounting.unmount(self._mountpoint)

    def _is_ours(self) -> bool:
        return mounting.is_mounted(self._mountpoint, self.connection)
