"""`fusefs init` and `fusefs migrate`: the schema of the database."""

from __future__ import annotations

import click

from fusefs.cli import options
from fusefs.cli.database import resolve_dsn
from fusefs.cli.groups import FsCommand, OrderedGroup
from fusefs.cli.output import confirm, print_json, print_table


@click.command(cls=FsCommand)
@options.database
def init(dsn: str | None, data_dir: str | None) -> None:
    """Prepare a database: start the embedded Postgres if no DSN is given, and create or update the schema.

    \b
    Example:
      fusefs init
      fusefs init --dsn postgresql://app@db.internal/files
    """
    from fusefs.db.dsn import redact

    chosen = resolve_dsn(dsn, data_dir)
    _up(chosen)
    click.echo(f"ready: {redact(chosen)}")


@click.group(cls=OrderedGroup)
def migrate() -> None:
    """Apply, take back and list the schema's migrations.

    \b
    Example:
      fusefs migrate status
    """


@migrate.command()
@options.database
def up(dsn: str | None, data_dir: str | None) -> None:
    """Apply every migration that is missing.

    \b
    Example:
      fusefs migrate up
    """
    _up(resolve_dsn(dsn, data_dir))


@migrate.command()
@options.database
@options.option("--to", type=click.IntRange(0), required=True, help="The last migration to keep; 0 keeps none.")
@options.yes
def down(dsn: str | None, data_dir: str | None, to: int, yes: bool) -> None:
    """Take migrations back, the newest first. Deletes what they hold.

    \b
    Example:
      fusefs migrate down --to 0 --yes
    """
    from fusefs.db import migrate as migrations

    chosen = resolve_dsn(dsn, data_dir)
    gone = [one for one in migrations.status(chosen) if one.applied_at is not None and one.number > to]
    if not gone:
        click.echo("nothing to take back")
        return
    names = ", ".join(f"{one.number:04d} {one.name}" for one in gone)
    confirm(f"Take back {names} with everything stored in those tables?", yes)
    for one in migrations.down(chosen, to):
        click.echo(f"taken back {one.number:04d} {one.name}")


@migrate.command()
@options.database
@options.as_json
def status(dsn: str | None, data_dir: str | None, as_json: bool) -> None:
    """List the migrations and when each was applied.

    \b
    Example:
      fusefs migrate status
    """
    from fusefs.db import migrate as migrations

    found = migrations.status(resolve_dsn(dsn, data_dir))
    if as_json:
        print_json([{"number": one.number, "name": one.name, "applied_at": one.applied_at} for one in found])
    else:
        print_table(("NUMBER", "NAME", "APPLIED"), [(one.number, one.name, one.applied_at) for one in found])


def _up(dsn: str) -> None:
    from fusefs.db import migrate as migrations

    applied = migrations.up(dsn, on_step=None)
    for one in applied:
        click.echo(f"applied {one.number:04d} {one.name}")
    if not applied:
        click.echo("the schema is up to date")
