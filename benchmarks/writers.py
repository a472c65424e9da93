#!/usr/bin/env python3
"""Eight sessions of one daemon that write at once, beside eight clients of pgbench on the same table.

    benchmarks/writers.py [--quick]

One `fusefs host`, eight sessions of one agent, a process in each that rewrites its own 16 files of 1 KB without a
pause; and pgbench with eight clients on rows of its own and the update that such a close commits, triggers included. In
turn, three times ten seconds (quick: two times three). Beside it the daemon's processor time, how much of the time its
thread runs or waits for a core, and the rate where a second host follows the agent. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from _rig import Mounted, Report, Skip, in_turn, rig, run, write

WRITERS = 8
FILES = 16
ROWS = """
select '/p' || client || '-' || n as path, 'file' as kind, 'new' as content
from generate_series(0, 7) client, generate_series(0, 15) n
"""
UPDATE = """\\set n random(0, 15)
update agent_files set content = rpad(:n::text || clock_timestamp()::text, 1024, 'x'), mtime_ns = mtime_ns + 1,
  updated_at = clock_timestamp(), updated_by = 'agent', updated_session = 'pgbench', write_id = gen_random_uuid(),
  write_op = 'write', write_handle = 1
where tenant_id = (select tenant_id from agents where slug = 'b')
  and agent_id = (select id from agents where slug = 'b') and path = '/p' || :client_id || '-' || :n;
"""


def rewrite_until_told(folder: Path, name: str) -> None:
    """The work of one writer: says when its files exist, and how many it wrote until its stdin was closed."""
    paths = [folder / f"{name}-{number}" for number in range(FILES)]
    for path in paths:
        write(path, b"new")
    print("ready", flush=True)
    os.set_blocking(0, False)
    count = 0
    while sys.stdin.buffer.read(1) is None:
        write(paths[count % FILES], f"{name} {count} ".encode().ljust(1024, b"x"))
        count += 1
    print(count)


def rate(mounted: Mounted, seconds: float, busy: list[tuple[float, float]]) -> float:
    """Files a second by all writers. `busy` gets the daemon's processor time and `runnable_s`, in % of the time."""
    tenant = mounted.path / "b" / "b"
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(WRITERS):
            folder = tenant / f"s{number}"
            folder.mkdir(exist_ok=True)
            command = [sys.executable, __file__, str(folder), f"w{number}"]
            # At the end of the block its stdin is closed, and it is waited for.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(stack.enter_context(process))
        said = [process.stdout for process in processes if process.stdout is not None]
        assert [stream.readline() for stream in said] == ["ready\n"] * WRITERS
        began, cpu_s, runnable_s = time.perf_counter(), mounted.cpu_s(), mounted.runnable_s()
        time.sleep(seconds)
        took = time.perf_counter() - began
        busy.append((100 * (mounted.cpu_s() - cpu_s) / took, 100 * (mounted.runnable_s() - runnable_s) / took))
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        return sum(int(stream.read()) for stream in said) / took


def measure(report: Report, quick: bool) -> None:
    if os.geteuid() != 0:
        raise Skip("a host's mount needs root")
    rounds, length = (2, 3) if quick else (3, 10)
    with rig() as server, server.host() as mounted:
        server.generate("b", ROWS)

        def compare(busy: list[tuple[float, float]]) -> dict[str, float]:
            return in_turn(
                rounds,
                pgbench=lambda: server.pgbench(UPDATE, seconds=length, clients=WRITERS),
                host=lambda: rate(mounted, length, busy),
            )

        busy: list[tuple[float, float]] = []
        alone = compare(busy)
        with server.host() as other:
            (other.path / "b" / "b" / "follower").mkdir()
            followed = compare([])
    for medians in (alone, followed):
        report.note(", ".join(f"{name} {value:.0f} a second" for name, value in medians.items()))
    report.say("eight-writers", 100 * alone["host"] / alone["pgbench"])
    report.say("eight-writers-cpu", max(cpu for cpu, _ in busy))
    report.say("eight-writers-thread", max(runnable for _, runnable in busy))
    report.say("eight-writers-followed", 100 * followed["host"] / followed["pgbench"])


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("/"):
        rewrite_until_told(Path(sys.argv[1]), sys.argv[2])
    else:
        run(__doc__, measure)
