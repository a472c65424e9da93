"""`fusefs grep`: lines that match, found by Postgres."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import print_json, printable
from fusefs.cli.target import locate, run_on, whole_namespace

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.scope import Scope
    from fusefs.store.search import Matches

NOTHING_FOUND = 1
"""As grep(1) has it."""


@click.command(cls=FsCommand)
@click.argument("pattern")
@click.argument("path", required=False)
@options.database
@options.scope
@options.looking
@options.option("--literal", "-F", is_flag=True, help="PATTERN is a text, not a regular expression.")
@options.option("--include", metavar="GLOB", help="Only files whose paths match, such as '*.md' or 'docs/**'.")
@options.option(
    "--limit", metavar="N", type=click.IntRange(1, 1000), default=1000, show_default=True, help="So many lines at most."
)
@options.as_json
def grep(
    pattern: str, path: str | None, literal: bool, include: str | None, limit: int, as_json: bool, **values: Any
) -> int:
    """Find lines in an agent's files, without a mount.

    PATTERN is a regular expression. PATH is inside a mounted directory or, with --agent, absolute in the agent's
    namespace; without it all files are searched, by Postgres. The exit code is 1 where nothing matches.

    \b
    Example:
      fusefs grep 'TODO|FIXME' ~/work/src
      fusefs grep -F 'a.b(c)' --include '*.py' --tenant acme --agent coder
    """

    async def work(db: Database, scope: Scope, root: str) -> Matches:
        from fusefs.store import search

        return await search.grep(db, scope, pattern, root, include=include, literal=literal, limit=limit)

    target = whole_namespace(values) if path is None else locate(path, values)
    result = run_on(target, values, work)
    if as_json:
        print_json({"matches": [asdict(match) for match in result.found], "truncated": result.truncated})
    else:
        for match in result.found:
            click.echo(f"{printable(match.path)}:{match.line}:{printable(match.excerpt)}")
        if result.truncated:
            click.echo(f"only the first {len(result.found)} lines; narrow it by PATH or --include", err=True)
    return 0 if result.found else NOTHING_FOUND
