#!/usr/bin/env python3
"""A file that is rewritten 10,000 times: what is dead then, and how large the table is.

    benchmarks/rewrites.py [--quick]

Two files, of 1 KB (in the row) and of 8 KB (in TOAST), each rewritten 10,000 times (quick: 1,000) by open with O_TRUNC,
write, close, one after the other. Space and dead rows half way, at the end, and after VACUUM. Autovacuum is at work
meanwhile, as the tables' settings have it.
"""

from __future__ import annotations

import os

from _bloat import after_vacuum, space
from _rig import Report, rig, run, seconds, write

SIZES = {"in the row": 1024, "in TOAST": 8192}


def measure(report: Report, quick: bool) -> None:
    half = 500 if quick else 5_000
    with rig() as server, server.mount() as mounted:

        def rewrite() -> None:
            for name, size in SIZES.items():
                write(mounted.path / name, os.urandom(size // 2).hex().encode())

        found = []
        for when in ("half way", "at the end"):
            took = seconds(lambda: [rewrite() for _ in range(half)])
            found.append(space(server))
            found[-1].tell(report, f"{when}, {took / half / len(SIZES) * 1e3:.2f} ms each")
        report.say("rewrite-space", found[1].files / found[0].files)
        report.say("rewrite-dead", found[1].dead)
        after_vacuum(report, server)


if __name__ == "__main__":
    run(__doc__, measure)
