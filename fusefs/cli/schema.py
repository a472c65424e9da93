"""`fusefs init` and `fusefs migrate`: the schema of the database."""

from __future__ import annotations

from typing import Any

import click

from fusefs.cli import options
from fusefs.cli.database import resolve_dsn
from fusefs.cli.groups import FsCommand, OrderedGroup
from fusefs.cli.output import confirm, plural, print_json, print_table


@click.command(cls=FsCommand)
@options.database
def init(dsn: str | None, data_dir: str | None) -> None:
    """Prepare a database: start the embedded Postgres if no DSN is given, and create or update the schema.

    \b
    Example:
      fusefs init
      fusefs init --dsn postgresql://app@db.internal/files
    """
    chosen = resolve_dsn(dsn, data_dir)
    _up(chosen)
    from fusefs.db.dsn import redact

    click.echo(f"ready: {redact(chosen)}")


@click.group(cls=OrderedGroup)
def migrate() -> None:
    """Apply, take back and list the schema's migrations."""


@migrate.command()
@options.database
def up(dsn: str | None, data_dir: str | None) -> None:
    """Apply every migration that is missing.

    \b
    Example:
      fusefs migrate up
    """
    _up(resolve_dsn(dsn, data_dir))
