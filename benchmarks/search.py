#!/usr/bin/env python3
"""`fusefs grep`, which searches in Postgres, beside `grep -r` through a mount that knows every file.

    benchmarks/search.py [--quick]

100,000 files of 2 KB in 1,000 directories (quick: 5,000), made by SQL. In turn, three times, the command and grep(1):
a text that is in two files, one that is in each (of which the command shows the first 1000 lines), and a regular
expression. pg_trgm has no part in it: under row-level
security its index is not used (docs/internals/schema.md).
"""

from __future__ import annotations

import subprocess

from _rig import Report, in_turn, rig, run, seconds, shell

FILES = """
select '/d' || d as path, 'dir' as kind, '' as content from generate_series(0, {count} / 100 - 1) d
union all
select '/d' || n % ({count} / 100) || '/f' || n, 'file',
  t.text || 'number ' || n || case when n in (7, 4007) then E'\\nneedle\\n' else '' end
  from generate_series(1, {count}) n,
  (select string_agg(md5(k::text) || E' common\\n', '') as text from generate_series(1, 50) k) t
"""
PATTERNS = {
    "search-rare": ("-F", "needle"),
    "search-common": ("-F", "common"),
    "search-regex": ("-E", "number [0-9]+7$"),
}


def measure(report: Report, quick: bool) -> None:
    with rig() as server:
        server.generate("b", FILES.format(count=5_000 if quick else 100_000))
        with server.mount("--max-file-bytes", str(64 << 20)) as mounted:
            shell("grep -r warm . || true", cwd=mounted.path)
            for row, words in PATTERNS.items():

                def ours(words: tuple[str, ...] = words) -> None:
                    server.fusefs("grep", *[word for word in words if word != "-E"], "--agent", "b", "--tenant", "b")

                def theirs(words: tuple[str, ...] = words) -> None:
                    subprocess.run(["grep", "-r", *words, "."], cwd=mounted.path, check=True, stdout=subprocess.DEVNULL)

                took = in_turn(1 if quick else 3, ours=lambda: seconds(ours), theirs=lambda: seconds(theirs))
                report.note(f"fusefs grep {took['ours']:.2f} s, grep -r {took['theirs']:.2f} s")
                report.say(row, took["ours"] / took["theirs"])


if __name__ == "__main__":
    run(__doc__, measure)
