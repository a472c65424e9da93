"""`fusefs versions` and `fusefs restore`: the history of a file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import human_bytes, print_json, print_table, printable
from fusefs.cli.target import locate, run_on
from fusefs.rules.config import Limits

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.model import Commit
    from fusefs.rules.scope import Scope
    from fusefs.store.versions import Deleted, Version

lineage = options.option(
    "--lineage",
    metavar="ID",
    help="Which file, where several had this version at the path. Default: the one there now.",
)


@click.command(cls=FsCommand)
@click.argument("path")
@options.database
@options.scope
@options.looking
@options.spoken("--version", type=click.IntRange(1), metavar="N", help="Write the content of this version to stdout.")
@lineage
@options.option("--deleted", is_flag=True, help="PATH is a directory: list what was deleted below it.")
@options.as_json
def versions(path: str, version: int | None, lineage: str | None, deleted: bool, as_json: bool, **values: Any) -> None:
    """List the versions of a file, deleted ones included, or write one to stdout.

    PATH is inside a mounted directory or, with --agent, absolute in the agent's namespace.

    \b
    Example:
      fusefs versions ~/work/notes.md
      fusefs versions ~/work/notes.md --version 3 > old.md
      fusefs versions --tenant acme --agent coder /notes.md
    """
    target = locate(path, values)
    if deleted:
        _list_deleted(run_on(target, values, _fetch_deleted), as_json)
    elif version is not None:
        sys.stdout.buffer.write(run_on(target, values, lambda db, scope, at: _content(db, scope, at, version, lineage)))
    else:
        _list(run_on(target, values, _fetch), as_json)


async def _fetch(db: Database, scope: Scope, path: str) -> list[Version]:
    from fusefs.store import versions as store

    return await store.list_versions(db, scope, path)


async def _fetch_deleted(db: Database, scope: Scope, path: str) -> list[Deleted]:
    from fusefs.store import versions as store

    return await store.list_deleted(db, scope, path)


async def _content(db: Database, scope: Scope, path: str, version: int, lineage: str | None) -> bytes:
    from fusefs.store import versions as store

    return await store.read_version(db, scope, path, version, lineage)


def _list(found: list[Version], as_json: bool) -> None:
    if as_json:
        print_json([{**asdict(one), "kind": one.kind.value} for one in found])
        return
    print_table(
        ("VERSION", "WHEN", "OP", "SIZE", "BY", "SESSION", "CONTENT", "PATH", "LINEAGE"),
        [
            (
                one.version,
                datetime.fromtimestamp(one.at).astimezone(),
                one.op,
                human_bytes(one.size),
                one.principal,
                one.session or None,
                "current" if one.current else "kept" if one.readable else None,
                one.path if one.old_path is None else f"{one.old_path} -> {one.path}",
                one.file_id,
            )
            for one in found
        ],
    )


def _list_deleted(found: list[Deleted], as_json: bool) -> None:
    if as_json:
        print_json([asdict(one) for one in found])
        return
    print_table(
        ("PATH", "VERSION", "DELETED", "SIZE", "BY", "SESSION", "CONTENT"),
        [
            (
                one.path,
                one.version,
                datetime.fromtimestamp(one.at).astimezone(),
                human_bytes(one.size),
                one.principal,
                one.session or None,
                "kept" if one.readable else None,
            )
            for one in found
        ],
    )


@click.command(cls=FsCommand)
@click.argument("path")
@options.database
@options.scope
@options.acting
@options.spoken("--version", type=click.IntRange(1), required=True, metavar="N", help="The version to make the newest.")
@lineage
@options.limits
def restore(path: str, version: int, lineage: str | None, **values: Any) -> None:
    """Make an old version of a file the newest one; a deleted file is made anew.

    What the file holds now stays in its history. PATH is as for `fusefs versions`; the change is recorded as one of
    that mount's session.

    \b
    Example:
      fusefs restore ~/work/notes.md --version 3
    """
    target = locate(path, values)
    limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])

    async def work(db: Database, scope: Scope, at: str) -> Commit:
        from fusefs.store import versions as store

        return await store.restore(db, scope, limits, at, version, lineage)

    commit = run_on(target, values, work)
    # Only a file that was not there begins at 1.
    anew = " as a new file" if commit.version == 1 else ""
    path = printable(target.path)
    click.echo(f"restored {path} from version {version}{anew}: it is at version {commit.version} now")
