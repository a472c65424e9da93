"""`fusefs status`: the mounts of this user on this machine, and whether they answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from fusefs.cli import mountpoint, options, processes, registry
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import print_json, print_table


@click.command(cls=FsCommand)
@options.as_json
def status(as_json: bool) -> None:
    """List the mounts of this machine.

    A mount is alive, dead (its daemon is gone) or frozen (its daemon does not answer). Dead and frozen ones
    are cleared by `fusefs umount --force`, and by the next mount on the same directory.

    \b
    Example:
      fusefs status
      fusefs status --json | jq '.[].status'
    """
    mounted = {mount.mountpoint for mount in processes.mounts() if mount.is_fuse}
    found = [_look_at(record, record.mountpoint in mounted) for record in registry.all_records()]
    if as_json:
        print_json(found)
        return
    if not found:
        click.echo("no mounts")
        return
    headers = ("MOUNTPOINT", "STATE", "TENANT", "AGENT", "SESSION", "SINCE", "PID")
    print_table(
        headers,
        [
            (
                one["mountpoint"],
                one["state"],
                one["tenant"],
                one["agent"],
                one["session"],
                datetime.fromisoformat(one["started_at"]),
                one["pid"],
            )
            for one in found
        ],
    )


def _look_at(record: registry.Record, is_mounted: bool) -> dict[str, Any]:
    """A record as JSON, with what the mount says of itself."""
    if is_mounted:
        health, said = mountpoint.health(record.mountpoint, record)
    else:
        health, said = mountpoint.Health.DEAD, b""
    try:
        own = json.loads(said) if said else None
    except ValueError:
        # A daemon of another version: it answers, in a form that this one does not know.
        own = None
    return {**asdict(record), "state": health.value, "status": own}
