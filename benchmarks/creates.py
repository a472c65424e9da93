#!/usr/bin/env python3
"""What a new small file costs, with each durability, and where a second mount follows.

    benchmarks/creates.py [--quick]

In turn, five times: pgbench's committed upsert of 1 KB; 500 files created, written (1 KB) and closed in a directory of
their own, in an agent's only mount, in one with `--durability relaxed`, and in one of two. Quick: three times, 100
files.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from _rig import Report, in_turn, rig, run, seconds, write

DATA = b"a line of text that an agent wrote\n" * 30


def create(root: Path, files: int, made: list[int]) -> float:
    """Seconds a file."""
    made.append(0)
    folder = root / f"round{len(made)}"
    folder.mkdir()
    return seconds(lambda: [write(folder / f"note-{number:05}.md", DATA) for number in range(files)]) / files


def measure(report: Report, quick: bool) -> None:
    rounds, files = (3, 100) if quick else (5, 500)
    made: list[int] = []
    with rig() as server, contextlib.ExitStack() as mounts:
        for agent in ("relaxed", "followed"):
            server.add_agent(agent)
        full = mounts.enter_context(server.mount())
        relaxed = mounts.enter_context(server.mount("--durability", "relaxed", agent="relaxed"))
        followed, _ = (mounts.enter_context(server.mount(agent="followed")) for _ in range(2))
        medians = in_turn(
            rounds,
            floor=server.floor_s,
            full=partial(create, full.path, files, made),
            relaxed=partial(create, relaxed.path, files, made),
            followed=partial(create, followed.path, files, made),
        )
    report.note(", ".join(f"{name} {value * 1e6:.0f} us" for name, value in medians.items()))
    report.say("create-small", medians["full"] / medians["floor"])
    report.say("create-followed", medians["followed"] / medians["floor"])
    report.say("durability-relaxed", medians["full"] / medians["relaxed"])


if __name__ == "__main__":
    run(__doc__, measure)
