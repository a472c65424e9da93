"""`fusefs df` and `fusefs gc`: what is stored, and the retention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from fusefs.cli import options
from fusefs.cli.database import resolve_dsn, run
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import human_bytes, plural, print_json, print_table, progress
from fusefs.cli.target import agents_of, scope_of
from fusefs.rules.model import Kind
from fusefs.rules.scope import Principal

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.scope import Scope
    from fusefs.store.tenants import Agent, Tenant, Usage

DAY_S = 86400.0


@click.command(cls=FsCommand)
@options.database
@options.scope
@options.as_json
def df(dsn: str | None, data_dir: str | None, tenant: str | None, agent: str | None, as_json: bool) -> None:
    """Show the files and the history of each agent, with their bytes and quotas.

    \b
    Example:
      fusefs df --tenant acme
    """

    async def work(db: Database) -> list[tuple[Tenant, Agent, Usage]]:
        from fusefs.store import tenants

        return [(of, one, await tenants.measure(db, one)) for of, one in await agents_of(db, tenant, agent)]

    found = run(resolve_dsn(dsn, data_dir), work, patient=True)
    if as_json:
        print_json(
            [{"tenant": of.name, "agent": one.name, "agent_id": one.id, **asdict(usage)} for of, one, usage in found]
        )
        return
    print_table(
        ("TENANT", "AGENT", "FILES", "SIZE", "QUOTA", "USED", "HISTORY", "QUOTA", "USED", "CONFLICTS"),
        [
            (
                of.name,
                one.name,
                usage.files,
                human_bytes(usage.bytes),
                human_bytes(usage.quota_bytes),
                _percent(usage.bytes, usage.quota_bytes),
                human_bytes(usage.history_bytes),
                human_bytes(usage.history_quota_bytes),
                _percent(usage.history_bytes, usage.history_quota_bytes),
                usage.conflicts,
            )
            for of, one, usage in found
        ],
    )


def _percent(used: int, quota: int | None) -> str | None:
    return f"{100 * used // quota}%" if quota else None


@dataclass(slots=True)
class Collected:
    """What a retention removes, or would remove, of one agent."""

    tenant: str
    agent: str
    versions: int = 0
    version_bytes: int = 0
    results: int = 0
    result_bytes: int = 0
    over_quota: int = 0
    over_quota_bytes: int = 0


@click.command(cls=FsCommand)
@options.database
@options.scope
@options.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@options.option(
    "--version-days",
    metavar="DAYS",
    type=options.Number(0),
    default=30.0,
    show_default=True,
    help="Keep superseded contents so long.",
)
@options.option(
    "--result-days",
    metavar="DAYS",
    type=options.Number(0),
    default=7.0,
    show_default=True,
    help="Keep large tool results so long after their session ended.",
)
@options.as_json
def gc(
    dsn: str | None,
    data_dir: str | None,
    tenant: str | None,
    agent: str | None,
    dry_run: bool,
    version_days: float,
    result_days: float,
    as_json: bool,
) -> None:
    """Remove superseded contents and large tool results that are old enough, and what is over a history's quota.

    The list of changes stays; only contents go, the oldest first. A deleted result stays in the history for as
    long as any other file.

    \b
    Example:
      fusefs gc --dry-run
      fusefs gc --tenant acme --version-days 90
    """

    async def work(db: Database) -> list[Collected]:
        found = []
        for of, one in await agents_of(db, tenant, agent):
            scope = scope_of(one, {}, Principal.SYSTEM)
            collected = await _measure(db, scope, Collected(of.name, one.name), version_days, result_days)
            if not dry_run:
                collected = await _collect(db, scope, collected, version_days, result_days)
            found.append(collected)
        return found

    found = run(resolve_dsn(dsn, data_dir), work, patient=True)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    print_table(
        ("TENANT", "AGENT", "VERSIONS", "SIZE", "RESULTS", "SIZE", "OVER QUOTA", "SIZE"),
        [
            (
                one.tenant,
                one.agent,
                one.versions,
                human_bytes(one.version_bytes),
                one.results,
                human_bytes(one.result_bytes),
                one.over_quota,
                human_bytes(one.over_quota_bytes),
            )
            for one in found
        ],
    )
    total = sum(one.version_bytes + one.result_bytes + one.over_quota_bytes for one in found)
    verb = "would be removed" if dry_run else "removed"
    count = plural(sum(one.versions + one.results + one.over_quota for one in found), "content")
    click.echo(f"{count} ({human_bytes(total)}) {verb}")


async def _measure(
    db: Database, scope: Scope, collected: Collected, version_days: float, result_days: float
) -> Collected:
    from fusefs.store import versions

    expired = await versions.measure_expired(db, scope, version_days * DAY_S)
    results = await versions.list_expired_results(db, scope, result_days * DAY_S)
    collected.versions, collected.version_bytes = expired.count, expired.bytes
    collected.results = sum(kind is not Kind.DIR for _, _, kind, _ in results)
    collected.result_bytes = sum(size for _, _, _, size in results)
    coming = [size for _, _, kind, size in results if kind is not Kind.DIR]
    over = await versions.measure_over_quota(db, scope, version_days * DAY_S, coming)
    collected.over_quota, collected.over_quota_bytes = over.count, over.bytes
    return collected


async def _collect(
    db: Database, scope: Scope, planned: Collected, version_days: float, result_days: float
) -> Collected:
    from fusefs.store import versions

    done = Collected(planned.tenant, planned.agent)
    total = planned.versions + planned.results + planned.over_quota
    with progress(f"{planned.tenant}/{planned.agent}", total) as bar:
        async for batch in versions.drop_expired(db, scope, version_days * DAY_S):
            done.versions += batch.count
            done.version_bytes += batch.bytes
            bar.advance(batch.count)
        for node_id, path, kind, size in await versions.list_expired_results(db, scope, result_days * DAY_S):
            if await versions.delete_expired_result(db, scope, path, node_id) and kind is not Kind.DIR:
                done.results += 1
                done.result_bytes += size
                bar.advance()
        # Last: a deleted result has come into the history.
        async for batch in versions.drop_over_quota(db, scope):
            done.over_quota += batch.count
            done.over_quota_bytes += batch.bytes
            bar.advance(batch.count)
    return done
