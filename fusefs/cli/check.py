"""`fusefs check`: verify the invariants of the stored files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options
from fusefs.cli.database import resolve_dsn, run
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import plural, print_json, print_table, progress
from fusefs.cli.target import agents_of
from fusefs.rules.errors import Corrupt

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.store.check import Finding


@click.command(cls=FsCommand)
@options.database
@options.scope
@options.as_json
def check(dsn: str | None, data_dir: str | None, tenant: str | None, agent: str | None, as_json: bool) -> None:
    """Verify what is stored, of one agent, a tenant's agents or all. Changes nothing.

    \b
    Example:
      fusefs check --tenant acme
    """

    async def work(db: Database) -> tuple[int, list[tuple[str, str, Finding]]]:
        from fusefs.store import check as checks

        chosen = await agents_of(db, tenant, agent)
        found = []
        with progress("checking", len(chosen)) as bar:
            for of, one in chosen:
                found += [(of.name, one.name, finding) for finding in await checks.check(db, of.id, one.id)]
                bar.advance()
        return len(chosen), found

    count, found = run(resolve_dsn(dsn, data_dir), work, patient=True)
    if as_json:
        lines: list[dict[str, Any]] = [{"tenant": of, "agent": one, **asdict(finding)} for of, one, finding in found]
        print_json(lines)
    elif found:
        print_table(
            ("TENANT", "AGENT", "RULE", "PATH", "WHAT"),
            [(of, one, finding.rule, finding.path, finding.detail) for of, one, finding in found],
        )
    else:
        click.echo(f"{plural(count, 'agent')} checked, everything holds")
    if found:
        raise Corrupt(
            f"{plural(len(found), 'invariant')} violated in {plural(count, 'agent')}",
            hint="Nothing was changed. Mount read-only and copy the files out before you repair anything.",
        )
