"""What the tables hold and what is dead in them, for the benchmarks that change one file over and over."""

from __future__ import annotations

from dataclasses import dataclass

from _rig import Report, Rig

_SPACE = """
select pg_total_relation_size('agent_files'), pg_total_relation_size('agent_file_versions'), f.n_dead_tup, t.n_dead_tup,
  coalesce(f.autovacuum_count, 0) + coalesce(t.autovacuum_count, 0), f.n_tup_upd, f.n_tup_hot_upd
from pg_stat_all_tables f join pg_class c on c.oid = f.relid join pg_stat_all_tables t on t.relid = c.reltoastrelid
where c.oid = 'agent_files'::regclass
"""


@dataclass(frozen=True, slots=True)
class Space:
    """Sizes in bytes, indexes and TOAST included; dead rows as Postgres estimates them."""

    files: int
    versions: int
    dead: int
    dead_chunks: int
    autovacuums: int
    updates: int
    hot: int

    def tell(self, report: Report, when: str) -> None:
        report.note(
            f"{when}: agent_files {self.files / 2**20:.1f} MB, {self.dead} dead rows, {self.dead_chunks} dead chunks of"
            f" TOAST, {self.autovacuums} autovacuums, {self.hot} of {self.updates} updates in their page;"
            f" agent_file_versions {self.versions / 2**20:.1f} MB"
        )


def space(server: Rig) -> Space:
    """As it is now. The server's processes report their counts at least once a second when idle; asked for here they
    are forced (Postgres 15 and later)."""
    server.sql("select pg_stat_clear_snapshot()")
    ((*found,),) = server.sql(_SPACE)
    return Space(*map(int, found))


def after_vacuum(report: Report, server: Rig) -> None:
    server.sql("vacuum agent_files")
    space(server).tell(report, "after VACUUM")
