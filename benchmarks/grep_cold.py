#!/usr/bin/env python3
"""What `grep -r` costs where nothing is known yet.

    benchmarks/grep_cold.py [--quick]

2000 files of 4 KB in 40 directories. In turn, five times (quick: twice): one COPY of the contents by a client that
knows what it wants, and `grep -r` in a mount made for it, with its round trips to Postgres counted.
"""

from __future__ import annotations

from _rig import Report, Rig, in_turn, rig, run, seconds, shell

FILES = """
select '/d' || d as path, 'dir' as kind, '' as content from generate_series(0, 39) d
union all
select '/d' || n % 40 || '/f' || n, 'file', t.text || n from generate_series(1, 2000) n,
  (select string_agg(md5(k::text) || E'\\n', '') as text from generate_series(1, 124) k) t
"""
CONTENTS = "select content from agent_files where kind = 'file'"


def measure(report: Report, quick: bool) -> None:
    trips: list[int] = []

    def grep(server: Rig) -> float:
        with server.mount() as mounted:
            before = mounted.trips()
            took = seconds(lambda: shell("grep -r no-such-text . || true", cwd=mounted.path))
            trips.append(mounted.trips() - before)
        return took

    with rig() as server:
        server.generate("b", FILES)
        medians = in_turn(
            2 if quick else 5,
            copy=lambda: seconds(lambda: server.copy_bytes(CONTENTS)),
            grep=lambda: grep(server),
        )
    report.note(", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in medians.items()))
    report.say("grep-cold-trips", max(trips))
    report.say("grep-cold", medians["grep"] / medians["copy"])


if __name__ == "__main__":
    run(__doc__, measure)
