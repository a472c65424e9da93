#!/usr/bin/env python3
"""What each statement of the mount that changes a file costs in Postgres, beside the bare upsert.

    benchmarks/statements.py [--quick]

The statements of `fusefs/db/sql/queries.sql`, prepared, over a Unix socket, as the daemon's role, one after the other
through the life of a file of 1 KB in a directory: claim, first content, rewrite, append, rename, delete; beside it a
create. As by an agent's only mount: nobody is told. The bare upsert finds its row. Commits do not wait for the disk:
that is the same for all. Medians.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import psycopg
from _rig import FLOOR_TABLE, Report, rig, run
from psycopg import pq

from fusefs.db.connection import DAEMON_ROLE
from fusefs.db.queries import QUERIES
from fusefs.db.values import Param, encode

TEXT = "x" * 1024
ROWS = {
    "statement-claim": "claim",
    "statement-content": "content",
    "statement-create": "create",
    "statement-rewrite": "rewrite",
    "statement-append": "append",
    "statement-rename": "rename",
    "statement-delete": "delete",
}
FLOOR = "insert into floor values ($1, $2) on conflict (id) do update set c = excluded.c"


@dataclass
class Statements:
    """One connection, set up as the daemon's, that times what it runs.

    Attributes:
        texts: the statements by name.
        took: seconds of each run, by what was done.
    """

    dsn: str
    tenant: str
    agent: str
    texts: dict[str, str] = field(default_factory=lambda: {name: one.text for name, one in QUERIES.items()})
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.conn = psycopg.connect(self.dsn, autocommit=True)
        self.execute(FLOOR_TABLE)
        self.execute(f"insert into floor select n, '{TEXT}' from generate_series(0, 999) n on conflict do nothing")
        self.execute(f"grant select, insert, update on floor to {DAEMON_ROLE}")
        self.execute(
            "set jit = off; set enable_seqscan = off; set synchronous_commit = off; set fusefs.origin = 'bench'"
        )
        self.execute(f"set fusefs.tenant = '{self.tenant}'; set role {DAEMON_ROLE}")
        for name in ("commit_create", "claim_name", "commit_write", "commit_append", "rename_node", "delete_node"):
            self._prepare(name, self.texts[name])
        self._prepare("floor", FLOOR)
        self._number = 5000

    def _prepare(self, name: str, text: str) -> None:
        done = self.conn.pgconn.prepare(name.encode(), text.encode())
        assert done.status == pq.ExecStatus.COMMAND_OK, done.error_message

    def execute(self, text: str) -> None:
        self.conn.execute(text.encode())

    def time(self, what: str, name: str, *params: Param) -> None:
        """Run a prepared statement, which must return or change a row."""
        values, formats = encode(params)
        began = time.perf_counter()
        done = self.conn.pgconn.exec_prepared(name.encode(), values, formats, 1)
        self.took[what].append(time.perf_counter() - began)
        assert done.ntuples == 1 or done.command_status == b"INSERT 0 1", (
            what,
            done.error_message,
            done.command_status,
        )

    def make_directory(self, path: str) -> None:
        self._claim("mkdir", str(uuid.uuid4()), path, "dir")

    def life(self, folder: str) -> None:
        """One file from its claim to its end, and one that is made at once and stays."""
        self._number += 1
        number, node = self._number, str(uuid.uuid4())
        path, moved = f"{folder}/f{number}", f"{folder}/g{number}"
        here = (self.tenant, self.agent)
        by = ("agent", "s1")
        self.time("floor", "floor", number % 1000, TEXT)
        times = (number * 1_000_000_000, None, None, None)
        create = (*here, str(uuid.uuid4()), f"{folder}/c{number}", TEXT, None, "file", number, 0o644, None, None, 1)
        self.time("create", "commit_create", *create, *by, str(uuid.uuid4()), 7)
        self._claim("claim", node, path, "file")
        for version, what in enumerate(("content", "rewrite")):
            written = (
                node,
                version,
                f"{version}{TEXT}",
                None,
                *times,
                *by,
                str(uuid.uuid4()),
                "write",
                number + version,
            )
            self.time(what, "commit_write", *here, *written, None)
        added = (node, TEXT.encode(), TEXT, 1 << 20, *times, *by, str(uuid.uuid4()), number)
        self.time("append", "commit_append", *here, *added)
        self.time("rename", "rename_node", *here, node, path, moved, None, None, "", *by, str(uuid.uuid4()), 1024, 64)
        self.time("delete", "delete_node", *here, node, moved, *by, str(uuid.uuid4()))

    def _claim(self, what: str, node: str, path: str, kind: str) -> None:
        self._number += 1
        rest = (kind, self._number, 0o644, None, None, 1, "agent", "s1", str(uuid.uuid4()), 7)
        self.time(what, "claim_name", self.tenant, self.agent, node, path, *rest)

    def medians(self) -> dict[str, float]:
        """Microseconds."""
        return {what: 1e6 * statistics.median(took) for what, took in self.took.items()}


def measure(report: Report, quick: bool) -> None:
    with rig() as server:
        ((tenant, agent),) = server.sql("select tenant_id::text, id::text from agents where slug = 'b'")
        server.sql("update agent_namespaces set only_follower = 'bench'")
        one = Statements(server.dsn, tenant, agent)
        one.make_directory("/d")
        for _ in range(50):
            one.life("/d")
        one.took.clear()
        for _ in range(200 if quick else 2000):
            one.life("/d")
    found = one.medians()
    report.note(f"one bare upsert of 1 KB: {found['floor']:.0f} us")
    for row, what in ROWS.items():
        report.say(row, found[what] / found["floor"])


if __name__ == "__main__":
    run(__doc__, measure)
