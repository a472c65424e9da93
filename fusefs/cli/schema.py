"""`fusefs init` and `fusefs migrate`: the schema of the database."""

from __future__ import annotations

import click

from fusefs.cli import options
from fusefs.cli.database import resolve_dsn
from fusefs.cli.groups import FsCommand, OrderedGroup
from fusefs.cli.output import confirm, print_json, print_table
from fusefs.rules.errors import SchemaMismatch


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
@options.spoken(
    "--to", metavar="N", type=click.IntRange(0), required=True, help="The last migration to keep; 0 keeps none."
)
@options.yes
def down(dsn: str | None, data_dir: str | None, to: int, yes: bool) -> None:
    """Take migrations back, the newest first. Deletes what they hold.

    \b
    Example:
      fusefs migrate down --to 0 --yes
    """
    from fusefs.db import migrate as migrations

    chosen = resolve_dsn(dsn, data_dir)
    gone = [one for one in migrations.status(chosen).applied if one.number > to]
    if not gone:
        click.echo("nothing to take back")
        return
    names = ", ".join(map(str, gone))
    confirm(f"Take back {names} with everything stored in those tables?", yes)
    for one in migrations.down(chosen, to):
        click.echo(f"taken back {one}")


@migrate.command()
@options.database
@options.as_json
def status(dsn: str | None, data_dir: str | None, as_json: bool) -> None:
    """List the migrations: applied, pending, or not fitting.

    \b
    Example:
      fusefs migrate status
    """
    from fusefs.db import migrate as migrations

    found = migrations.status(resolve_dsn(dsn, data_dir))
    lines = [(one.number, one.name, "applied") for one in found.applied]
    lines += [(one.number, one.name, "pending") for one in found.pending]
    if as_json:
        steps = [{"number": number, "name": name, "state": state} for number, name, state in lines]
        print_json({"current": found.current, "migrations": steps, "problems": found.problems})
    else:
        print_table(("NUMBER", "NAME", "STATE"), lines)
    if found.problems:
        raise SchemaMismatch("; ".join(found.problems), hint=found.hint)


def _up(dsn: str) -> None:
    from fusefs.db import migrate as migrations

    applied = migrations.up(dsn)
    for one in applied:
        click.echo(f"applied {one}")
    if not applied:
        click.echo("the schema is up to date")
