"""`fusefs status`: the mounts of this user on this machine, and whether they answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from fusefs.cli import mountpoint, options, processes, registry
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import print_json, print_table, printable
from fusefs.rules.errors import Unavailable


@click.command(cls=FsCommand)
@options.data_dir
@options.as_json
def status(data_dir: str | None, as_json: bool) -> None:
    """List the mounts of this machine.

    A mount is alive, dead (its daemon is gone) or frozen (its daemon does not answer). Dead and frozen ones
    are cleared by `fusefs umount --force`, and by the next mount on the same directory. The last line, for people
    only, says how the embedded Postgres is stopped, if it runs.

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
    if found:
        _print(found)
    else:
        click.echo("no mounts")
    _print_server(Path(data_dir) if data_dir else None)


def _print(found: list[dict[str, Any]]) -> None:
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


def _print_server(data_dir: Path | None) -> None:
    from fusefs.db import embedded

    try:
        found = embedded.running_pid(data_dir)
    except Unavailable:
        # Another user's is not this user's to stop.
        return
    if found is not None:
        pid, where = found
        click.echo(f"embedded Postgres in {printable(str(where))}: pid {pid}; `kill -INT {pid}` stops it")


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
