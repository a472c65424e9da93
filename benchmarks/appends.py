#!/usr/bin/env python3
"""A log that is appended to: what an append costs at each size, and what it leaves behind.

    benchmarks/appends.py [--quick]

A log of 10 KB and one of 1 MiB, to which 100 bytes are appended 1000 times, in turn in batches of 50, each append
opened, written and closed; then another 1000 times to the large one. Beside it the statement alone by pgbench. Space
and dead rows as they are then (autovacuum is at work meanwhile, as the tables' settings have it) and after VACUUM.
Quick: 200 times.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from _bloat import after_vacuum, space
from _rig import Report, in_turn, rig, run, seconds, write

BATCH = 50
LINE = b"x" * 99 + b"\n"
SIZES = {"small": 10_000, "large": 1 << 20}
LOG = """
select '/{name}' as path, 'file' as kind, substr(string_agg(md5(k::text), ''), 1, {size}) as content
from generate_series(1, 33000) k
"""
BARE = """
update agent_files set content = content || repeat('x', 100), write_id = gen_random_uuid(), write_op = 'append'
where tenant_id = (select tenant_id from agents where slug = 'b')
  and agent_id = (select id from agents where slug = 'b') and path = '/{name}';
"""


def append(path: Path) -> float:
    """Milliseconds an append."""
    return 1e3 * seconds(lambda: [write(path, LINE, os.O_APPEND) for _ in range(BATCH)]) / BATCH


def measure(report: Report, quick: bool) -> None:
    batches = (200 if quick else 1000) // BATCH
    with rig() as server:
        for name, size in SIZES.items():
            server.generate("b", LOG.format(name=name, size=size))
        before = space(server)
        with server.mount("--max-file-bytes", str(16 << 20)) as mounted:
            logs = {name: mounted.path / name for name in SIZES}
            took = in_turn(batches, **{name: partial(append, log) for name, log in logs.items()})
            report.note(", ".join(f"{name} {value:.2f} ms an append" for name, value in took.items()))
            report.say("append-growth", took["large"] / took["small"])
            first = space(server)
            first.tell(report, "after the first thousand of each")
            report.say("append-history", (first.versions - before.versions) / (2 * batches * BATCH))
            for _ in range(batches):
                append(logs["large"])
            second = space(server)
        second.tell(report, "after the second thousand at 1 MiB")
        report.say("append-space", second.files / first.files)
        after_vacuum(report, server)
        bare = {name: 1e3 / server.pgbench(BARE.format(name=name), seconds=2) for name in SIZES}
        ratio = bare["large"] / bare["small"]
        report.note(f"bare SQL: small {bare['small']:.2f} ms, large {bare['large']:.2f} ms, {ratio:.0f} times")


if __name__ == "__main__":
    run(__doc__, measure)
