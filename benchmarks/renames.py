#!/usr/bin/env python3
"""What the rename of a directory costs, and that the contents below it do not count.

    benchmarks/renames.py [--quick]

Two directories of 1000 files, of 1 KB and of 100 KB, renamed to and fro in turn with pgbench's committed upsert of
1 KB, eleven times (quick: three times). The dearer of the two counts. VACUUM before each: nobody renames a directory
twenty times a second, and what earlier rounds left dead would be measured with it (half as much again).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from _rig import Report, Rig, in_turn, rig, run, seconds

FILES = """
select '/{name}' as path, 'dir' as kind, '' as content
union all
select '/{name}/f' || n, 'file', substr(t.text, 1, {size}) from generate_series(1, 1000) n,
  (select string_agg(md5(k::text), '') as text from generate_series(1, 3200) k) t
"""


def rename(server: Rig, root: Path, name: str) -> float:
    server.sql("vacuum agent_files")
    there = root / name
    away = root / f"{name}-moved"
    one, other = (there, away) if there.exists() else (away, there)
    return seconds(lambda: one.rename(other))


def measure(report: Report, quick: bool) -> None:
    with rig() as server:
        for name, size in (("small", 1000), ("large", 100_000)):
            server.generate("b", FILES.format(name=name, size=size))
        with server.mount() as mounted:
            medians = in_turn(
                3 if quick else 11,
                floor=server.floor_s,
                small=partial(rename, server, mounted.path, "small"),
                large=partial(rename, server, mounted.path, "large"),
            )
    report.note(", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in medians.items()))
    report.say("rename-directory", max(medians["small"], medians["large"]) / medians["floor"])


if __name__ == "__main__":
    run(__doc__, measure)
