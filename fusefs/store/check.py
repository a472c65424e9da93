"""The invariants of the stored files, verified.

Decided here and only here: what must hold of a namespace. `fusefs check` prints what does not; the tests run
it after themselves.

Threading: stateless. Each rule is one statement and sees one moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusefs.db.pool import Database
from fusefs.db.queries import query

RULES = {
    "parents": ("every parent exists and is a directory", query("check_parents")),
    "paths": ("every path is absolute, normalised and outside /.fusefs", query("check_paths")),
    "sizes": ("every size is that of its one content", query("check_sizes")),
    "usage": ("a namespace with a quota is charged with what its files have", query("check_usage")),
    "kinds": ("directories, FIFOs and sockets have no content", query("check_kinds")),
    "incarnations": ("no two rows share an inode number", query("check_incarnations")),
    "newest": ("the newest row of a file's history is its version", query("check_newest")),
    "density": ("a lineage's versions have no gaps", query("check_density")),
    "history": ("a superseded content is kept whole or not at all", query("check_history")),
    "steps": ("a version supersedes what the version before it made", query("check_steps")),
}
"""Name of a rule to its meaning and the statement that lists its violations, at most 100 of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation: of which rule, at which path, and how."""

    rule: str
    path: str
    detail: str


async def check(db: Database, tenant_id: str, agent_id: str) -> list[Finding]:
    """Verify one namespace. An empty list means that everything holds."""
    found = []
    for name, (_, statement) in RULES.items():
        rows = await db.run(tenant_id, statement, tenant_id, agent_id)
        found += [Finding(name, path, detail) for path, detail in rows]
    return found
