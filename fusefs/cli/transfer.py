"""`fusefs export` and `fusefs import`: a whole namespace as a tar stream, out and in."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import plural, printable, progress
from fusefs.cli.target import run_on, whole_agent
from fusefs.rules.config import Limits
from fusefs.rules.scope import Principal

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.scope import Scope


@click.command(cls=FsCommand)
@click.argument("name", metavar="AGENT")
@options.database
@options.tenant
def export(name: str, **values: Any) -> None:
    """Write an agent's files to stdout as a tar archive.

    AGENT is a slug, a UUID or TENANT/AGENT. Every session's files are in it; the history is not.

    \b
    Example:
      fusefs export acme/coder > coder.tar
      fusefs export coder --tenant acme | tar tv
    """
    if sys.stdout.isatty():
        raise click.UsageError("stdout is a terminal: redirect the archive to a file or a pipe")
    target = whole_agent(name, {**values, "agent": None})
    skipped = run_on(target, values, _export, Principal.SYSTEM)
    for path in skipped:
        click.echo(f"fusefs: {printable(path)}: a socket has no form in a tar archive, left out", err=True)


async def _export(db: Database, scope: Scope, _: str) -> list[str]:
    """Returns the paths that were left out."""
    from fusefs.cli.tarstream import Writer
    from fusefs.store import archive

    skipped = []
    size = await archive.measure(db, scope)
    writer = Writer(sys.stdout.buffer)
    with progress("export", size.nodes) as bar:
        async for entry in archive.export(db, scope):
            if not writer.add(entry):
                skipped.append(entry.path)
            bar.advance()
    writer.close()
    sys.stdout.buffer.flush()
    return skipped


@dataclass(slots=True)
class Counts:
    """What an import did so far."""

    written: int = 0
    same: int = 0

    def text(self) -> str:
        return f"{plural(self.written, 'entry')} imported, {self.same} the same already"


@click.command("import", cls=FsCommand)
@click.argument("name", metavar="AGENT")
@options.database
@options.tenant
@options.spoken("--replace", "replace_", is_flag=True, help="Replace files that are there with other content.")
@options.limits
def import_(name: str, replace_: bool, **values: Any) -> None:
    """Read a tar archive from stdin into an agent's files.

    AGENT is as for `fusefs export`. Stops at the first file that is there with other content, unless --replace
    is given; running it again goes on where it stopped. A file that somebody changes at the same moment is
    never overwritten.

    \b
    Example:
      fusefs import acme/coder < coder.tar
      tar c -C ~/project . | fusefs import coder --tenant acme --max-file-bytes 16777216
    """
    if sys.stdin.isatty():
        raise click.UsageError("stdin is a terminal: redirect an archive to it")
    target = whole_agent(name, {**values, "agent": None})
    limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])
    counts = Counts()

    async def work(db: Database, scope: Scope, _: str) -> None:
        await _import(db, scope, limits, replace_, counts)

    try:
        run_on(target, values, work, Principal.SYSTEM)
    finally:
        click.echo(counts.text(), err=True)


async def _import(db: Database, scope: Scope, limits: Limits, replacing: bool, counts: Counts) -> None:
    from fusefs.cli import tarstream
    from fusefs.store import archive

    importer = archive.Importer(db, scope, limits, replace=replacing)
    with progress("import", None) as bar:
        for item in tarstream.read(sys.stdin.buffer, limits):
            if isinstance(item, tarstream.HardLink):
                entry = replace(item.entry, content=await importer.read(item.target))
            else:
                entry = item
            if await importer.put(entry):
                counts.written += 1
            else:
                counts.same += 1
            bar.advance()
