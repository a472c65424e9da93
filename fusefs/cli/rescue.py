"""`fusefs rescue`: the writes that Postgres did not take, kept on this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options, registry
from fusefs.cli.database import resolve_dsn, run
from fusefs.cli.groups import OrderedGroup
from fusefs.cli.output import confirm, human_bytes, plural, print_json, print_table, printable, progress
from fusefs.rules.config import Limits
from fusefs.rules.errors import Corrupt, FsError, NotFound

if TYPE_CHECKING:
    from fusefs.core.rescue import Kept, RescueDirectory
    from fusefs.db.pool import Database
    from fusefs.store.rescue import Fate


@click.group(cls=OrderedGroup)
def rescue() -> None:
    """List the writes that Postgres did not take, put them back, or drop them.

    A mount keeps such a write on its own machine when Postgres stays away through the last close of a file, or to the
    end of the mount. Run this there, as the same user.

    \b
    Example:
      fusefs rescue list
      fusefs rescue put --all
    """


def _directory(rescue_dir: str | None) -> RescueDirectory:
    from fusefs.core.rescue import RescueDirectory

    return RescueDirectory(os.path.abspath(rescue_dir) if rescue_dir else str(registry.rescue_directory()))


@rescue.command("list")
@options.rescue_dir
@options.as_json
def list_(rescue_dir: str | None, as_json: bool) -> None:
    """List the writes that are kept on this machine.

    \b
    Example:
      fusefs rescue list --json
    """
    found, broken = _directory(rescue_dir).list_kept()
    if as_json:
        print_json([_fields(kept) for kept in found])
    else:
        print_table(
            ("ID", "PATH", "WHEN", "OP", "SIZE", "BUILT ON", "AGENT", "SESSION", "REASON"),
            [
                (
                    kept.id,
                    kept.rescued.path,
                    datetime.fromtimestamp(kept.at).astimezone(),
                    _op(kept),
                    human_bytes(kept.size),
                    kept.rescued.expected,
                    kept.scope.agent_id,
                    kept.scope.session,
                    kept.reason,
                )
                for kept in found
            ],
        )
    if broken:
        raise Corrupt(f"{plural(len(broken), 'file')} cannot be understood: {', '.join(broken)}", hint="")


def _op(kept: Kept) -> str:
    if kept.rescued.append:
        return "append"
    return "create" if kept.rescued.node_id is None else "write"


def _fields(kept: Kept) -> dict[str, Any]:
    return {
        "id": kept.id,
        "path": kept.rescued.path,
        "at": kept.at,
        "op": _op(kept),
        "size": kept.size,
        "expected": kept.rescued.expected,
        "tenant_id": kept.scope.tenant_id,
        "agent_id": kept.scope.agent_id,
        "session": kept.scope.session,
        "principal": kept.scope.principal.value,
        "reason": kept.reason,
    }


def _chosen(directory: RescueDirectory, ids: tuple[str, ...], everything: bool) -> list[str]:
    if everything == bool(ids):
        raise click.UsageError("name the ids, or pass --all")
    return list(ids) if ids else [kept.id for kept in directory.list_kept()[0]]


@rescue.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@options.database
@options.limits
@options.rescue_dir
@options.spoken("--all", "all_", is_flag=True, help="Every write that is kept here.")
def put(ids: tuple[str, ...], all_: bool, rescue_dir: str | None, **values: Any) -> None:
    """Put writes back where they belong, by the rights and the session of whoever made them.

    One whose file moved on meanwhile becomes a conflict (see `fusefs conflicts list`); nothing is overwritten. What
    was put back is dropped here.

    \b
    Example:
      fusefs rescue put --all --dsn postgresql://db.internal/files
    """
    directory = _directory(rescue_dir)
    chosen = _chosen(directory, ids, all_)
    limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])

    async def work(db: Database) -> tuple[list[tuple[Kept, Fate, str]], list[tuple[str, FsError]]]:
        from fusefs.store.rescue import put_back

        done: list[tuple[Kept, Fate, str]] = []
        failed: list[tuple[str, FsError]] = []
        with progress("putting back", len(chosen)) as bar:
            for kept_id in chosen:
                try:
                    kept, content = directory.read(kept_id)
                    fate, conflict = await put_back(db, kept.scope, limits, kept.rescued, content, kept_id)
                    with suppress(NotFound):  # another command did the same at the same time
                        directory.drop(kept_id)
                    done.append((kept, fate, conflict))
                except FsError as error:
                    failed.append((kept_id, error))
                bar.advance()
        return done, failed

    done, failed = run(resolve_dsn(values["dsn"], values["data_dir"]), work) if chosen else ([], [])
    for kept, fate, conflict in done:
        click.echo(printable(f"{kept.id}  {kept.rescued.path}: {fate.value}" + (f" {conflict}" if conflict else "")))
    for kept_id, error in failed[:-1]:
        click.echo(printable(f"fusefs: {kept_id}: {error}"), err=True)
    if failed:
        raise failed[-1][1]


@rescue.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@options.rescue_dir
@options.spoken("--all", "all_", is_flag=True, help="Every write that is kept here.")
@options.yes
def drop(ids: tuple[str, ...], all_: bool, rescue_dir: str | None, yes: bool) -> None:
    """Forget writes; their bytes are gone then.

    \b
    Example:
      fusefs rescue drop 0b9c… --yes
    """
    directory = _directory(rescue_dir)
    chosen = _chosen(directory, ids, all_)
    confirm(f"Forget {plural(len(chosen), 'write')} that Postgres never got?", yes)
    for kept_id in chosen:
        directory.drop(kept_id)
        click.echo(f"dropped {kept_id}")
