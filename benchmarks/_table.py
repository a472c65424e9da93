"""The goals of speed and size, each named once, and which benchmark measures it.

Decided here and only here: what a row is called, its goal and its unit. `docs/internals/performance.md` holds the same
names with the values measured last; `tests/unit/test_benchmarks.py` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One goal.

    Attributes:
        name: by which `scripts/bench` runs it.
        script: the file in this directory that measures it; one may measure several.
        what: one line on what is measured.
        unit: of the value.
        at_most, at_least: the goal; neither: the value is of interest by itself.
    """

    name: str
    script: str
    what: str
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def goal(self) -> str:
        """The goal in words."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return "no goal"

    def is_reached(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


_FLOORS = "times one committed 1 KB upsert"
_BARE = "times a bare upsert that does not"
_LOCAL = "times the local disk"
_JUICEFS = "times as fast as JuiceFS"

TABLE = (
    Row("peers-mean", "peers.py", "everyday agent work, geometric mean of all steps", _JUICEFS, at_least=5),
    Row("peers-worst", "peers.py", "the worst step, directory rename apart", _JUICEFS, at_least=2),
    Row("read-warm", "peers.py", "reading small files that the mount knows", _LOCAL, at_most=35),
    Row("read-warm-peer", "peers.py", "the same", _JUICEFS, at_least=4),
    Row("grep-warm", "peers.py", "`grep -r` over files that the mount knows", _LOCAL, at_most=35),
    Row("grep-warm-peer", "peers.py", "the same", _JUICEFS, at_least=4),
    Row("find-warm", "peers.py", "`find` over files that the mount knows", _LOCAL, at_most=12),
    Row("git-clone", "trees.py", "`git clone` of 2000 files, then `git status`", _JUICEFS, at_least=4),
    Row("unpack", "trees.py", "`tar x` of 4000 small files in 2400 directories", _JUICEFS, at_least=5),
    Row("create-small", "creates.py", "create, write 1 KB, close", _FLOORS, at_most=5),
    Row("create-followed", "creates.py", "the same where a second mount follows", _FLOORS),
    Row("durability-relaxed", "creates.py", "the same with `--durability relaxed`", "times as fast as with full"),
    Row("rename-directory", "renames.py", "a directory of 1000 files, of 1 KB and of 100 KB", _FLOORS, at_most=100),
    Row(
        "grep-cold-trips", "grep_cold.py", "`grep -r`, 2000 files in 40 directories, empty caches", "trips", at_most=150
    ),
    Row("grep-cold", "grep_cold.py", "the same", "times one COPY of the contents", at_most=4),
    *(
        Row(f"statement-{name}", "statements.py", what, _BARE, at_most=2.5)
        for name, what in (
            ("claim", "a claim in Postgres, not waiting for the disk"),
            ("content", "the first content of a claim"),
            ("create", "a create"),
            ("rewrite", "new content"),
            ("append", "an append"),
            ("rename", "a file's rename"),
            ("delete", "a file's delete"),
        )
    ),
    Row(
        "eight-writers",
        "writers.py",
        "eight sessions of one host that rewrite",
        "% of pgbench's eight clients",
        at_least=60,
    ),
    Row("eight-writers-cpu", "writers.py", "the daemon meanwhile", "% of one core"),
    Row("eight-writers-thread", "writers.py", "its one thread runs, or waits for a core", "% of the time"),
    Row(
        "eight-writers-followed",
        "writers.py",
        "eight writers where a second host follows",
        "% of pgbench's eight clients",
    ),
    Row("million-ready", "million.py", "mount among 1,000,000 files", "times an empty namespace", at_most=1.3),
    Row("million-ls", "million.py", "cold `ls -l` of 50 files there", "times that among 1,000 files", at_most=1.3),
    Row("million-memory", "million.py", "resident after `find .` through all of it", "MB", at_most=300),
    Row("million-find", "million.py", "`find` in the last tenth", "times the first tenth", at_most=1.5),
    Row("large-ls", "large_directory.py", "`ls -f`, an entry of 100,000", "times one of 10,000", at_most=1.3),
    Row(
        "large-create",
        "large_directory.py",
        "a create among 100,000 entries",
        "times one in an empty directory",
        at_most=1.3,
    ),
    Row("append-growth", "appends.py", "an append at 1 MiB", "times one at 10 KB", at_most=25),
    Row("append-history", "appends.py", "history of an append of 100 bytes", "bytes"),
    Row(
        "append-space", "appends.py", "tables after the second thousand at 1 MiB", "times after the first", at_most=1.5
    ),
    Row("rewrite-space", "rewrites.py", "`agent_files` after 10,000 rewrites", "times after 5,000", at_most=1.5),
    Row("rewrite-dead", "rewrites.py", "dead rows after 10,000 rewrites, before VACUUM", "rows", at_most=21_000),
    Row("search-rare", "search.py", "`fusefs grep` in 100,000 files, a rare text", "times `grep -r` in a warm mount"),
    Row("search-common", "search.py", "the same, a text that each file has", "times `grep -r` in a warm mount"),
    Row("search-regex", "search.py", "the same, a regular expression", "times `grep -r` in a warm mount"),
)

ROWS = {row.name: row for row in TABLE}
