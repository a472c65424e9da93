"""`fusefs conflicts`: the bytes of lost races."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options
from fusefs.cli.groups import OrderedGroup
from fusefs.cli.output import confirm, human_bytes, print_json, print_table, printable
from fusefs.cli.target import locate, run_on, whole_namespace
from fusefs.rules.config import Limits

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.model import Commit
    from fusefs.rules.scope import Scope
    from fusefs.store.conflicts import Conflict

looking = options.together(options.database, options.scope, options.looking)


@click.group(cls=OrderedGroup)
def conflicts() -> None:
    """List the writes that lost a race, read them, and decide about them.

    Inside a mounted directory they are those of its agent; elsewhere name it with --agent.

    \b
    Example:
      fusefs conflicts list ~/work
    """


@conflicts.command("list")
@click.argument("path", required=False)
@looking
@options.as_json
def list_(path: str | None, as_json: bool, **values: Any) -> None:
    """List the lost races of an agent, or of one file.

    PATH is a mounted directory or a file inside one; without it and without --agent, the current directory says which
    agent.

    \b
    Example:
      cd ~/work && fusefs conflicts list
      fusefs conflicts list ~/work/notes.md
      fusefs conflicts list --tenant acme --agent coder
    """
    target = locate(path, values) if path is not None else whole_namespace(values)

    async def work(db: Database, scope: Scope, at: str) -> list[Conflict]:
        from fusefs.store import conflicts as store

        return await store.list_conflicts(db, scope, None if at == "/" else at)

    found = run_on(target, values, work)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    print_table(
        ("ID", "PATH", "WHEN", "OP", "SIZE", "EXPECTED", "FOUND", "SESSION"),
        [
            (
                one.id,
                one.path,
                datetime.fromtimestamp(one.at).astimezone(),
                one.op,
                human_bytes(one.size),
                one.expected,
                one.actual,
                one.session,
            )
            for one in found
        ],
    )


@conflicts.command()
@click.argument("conflict", metavar="ID")
@looking
def show(conflict: str, **values: Any) -> None:
    """Write the bytes of a lost race to stdout.

    \b
    Example:
      fusefs conflicts show 0b9c… --tenant acme --agent coder | diff - ~/work/notes.md
    """

    async def work(db: Database, scope: Scope, at: str) -> bytes:
        from fusefs.store import conflicts as store

        return (await store.read_conflict(db, scope, conflict))[1]

    sys.stdout.buffer.write(run_on(whole_namespace(values), values, work))


@conflicts.command()
@click.argument("conflict", metavar="ID")
@options.database
@options.scope
@options.acting
@options.limits
def accept(conflict: str, **values: Any) -> None:
    """Make the bytes of a lost race the newest version of their file.

    What the file holds now stays in its history. Inside a mounted directory the change is recorded as one of that
    mount's session.

    \b
    Example:
      fusefs conflicts accept 0b9c… --tenant acme --agent coder
    """
    limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])

    async def work(db: Database, scope: Scope, at: str) -> tuple[Conflict, Commit]:
        from fusefs.store import conflicts as store

        return await store.accept(db, scope, limits, conflict)

    found, commit = run_on(whole_namespace(values), values, work)
    click.echo(f"accepted: {printable(found.path)} is at version {commit.version} now")


@conflicts.command()
@click.argument("conflict", metavar="ID")
@looking
@options.yes
def drop(conflict: str, yes: bool, **values: Any) -> None:
    """Forget a lost race; its bytes are gone then.

    \b
    Example:
      fusefs conflicts drop 0b9c… --tenant acme --agent coder --yes
    """
    target = whole_namespace(values)

    async def look(db: Database, scope: Scope, at: str) -> Conflict:
        from fusefs.store import conflicts as store

        return (await store.read_conflict(db, scope, conflict))[0]

    found = run_on(target, values, look)
    confirm(f"Forget {human_bytes(found.size)} that were to be written to {found.path}?", yes)

    async def work(db: Database, scope: Scope, at: str) -> Conflict:
        from fusefs.store import conflicts as store

        return await store.drop(db, scope, conflict)

    run_on(target, values, work)
    click.echo(f"dropped {found.id}")
