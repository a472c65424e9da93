"""`fusefs umount`: unmount, and wait until the daemon has committed what it held and ended."""

from __future__ import annotations

import click

from fusefs.cli import mountpoint, options, processes, registry
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import printable
from fusefs.rules.errors import MountFailed


@click.command(cls=FsCommand)
@click.argument("mountpoint_", metavar="MOUNTPOINT")
@options.spoken("--force", is_flag=True, help="Abort a mount that is busy, dead or frozen. No error if none is there.")
def umount(mountpoint_: str, force: bool) -> None:
    """Unmount a directory and wait for its daemon to end.

    \b
    Example:
      fusefs umount ~/work
      fusefs umount --force /mnt/frozen
    """
    where = mountpoint.canonical(mountpoint_)
    record = registry.find(where)
    mount = processes.mount_at(where)
    if mount is None or not mount.is_fuse:
        _not_mounted(where, record, force)
        return
    if force or (record is not None and not record.alive):
        mountpoint.clear(where, mount.connection, record)
    else:
        mountpoint.unmount(where)
        if record is not None:
            _wait_for_daemon(record)
    click.echo(f"unmounted {printable(where)}")


def _not_mounted(where: str, record: registry.Record | None, force: bool) -> None:
    if record is not None and not record.alive:
        registry.remove(record)
    if not force:
        raise MountFailed(f"nothing of fusefs is mounted on {where}", hint="List the mounts with `fusefs status`.")


def _wait_for_daemon(record: registry.Record) -> None:
    if not processes.wait_gone(record.pid, record.process_start, mountpoint.END_TIMEOUT_S):
        raise MountFailed(
            f"{record.mountpoint} is unmounted, but its daemon (pid {record.pid}) still runs",
            hint="A bind mount or another mount namespace may hold the file system; the daemon ends after the last.",
        )
    registry.remove(record)
