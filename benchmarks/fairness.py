#!/usr/bin/env python3
"""How long a quiet session waits beside one that floods the daemon.

    benchmarks/fairness.py [--seconds S] [--threads N]

One `fusefs host` on an embedded Postgres in a temporary directory, with two sessions of two agents. The quiet one
creates, writes and closes one file after the other, first alone, then while N threads (64 if nothing else is said)
of another process do the same in the other without a pause. Prints p50, p99 and max of the quiet session's
creates. As root, with the interpreter that has fusefs: .venv/bin/python benchmarks/fairness.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

from _rig import rig, write

DATA = b"a line of text that an agent wrote\n" * 30


def latencies_ms(folder: Path, seconds: float) -> list[float]:
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        write(folder / f"note-{len(found)}-{start}", DATA)
        found.append((time.perf_counter() - start) * 1000)
    return sorted(found)


def flood(folder: Path, threads: int) -> None:
    """Write from many threads until stdin is closed; print how many files that were."""
    stop = threading.Event()
    count = [0] * threads

    def work(number: int) -> None:
        while not stop.is_set():
            write(folder / f"flood-{number}-{count[number]}", DATA)
            count[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    sys.stdin.read()
    stop.set()
    for worker in workers:
        worker.join()
    print(sum(count))


def say(what: str, found: list[float]) -> None:
    p50, p99 = found[len(found) // 2], found[int(len(found) * 0.99)]
    print(f"{what:24} p50 {p50:7.1f} ms   p99 {p99:7.1f} ms   max {found[-1]:7.1f} ms   ({len(found)} files)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--flood", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flood is not None:
        flood(args.flood, args.threads)
        return
    with rig() as server:
        for agent in ("quiet", "loud"):
            server.add_agent(agent)
        with server.host() as mounted:
            measure(mounted.path / "b", args.seconds, args.threads)


def measure(tenant: Path, seconds: float, threads: int) -> None:
    quiet, loud = tenant / "quiet" / "s-1", tenant / "loud" / "s-1"
    for folder in (quiet, loud):
        folder.mkdir()
    say("alone", latencies_ms(quiet, seconds))
    flooding = subprocess.Popen(
        [sys.executable, __file__, "--flood", loud, "--threads", str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        found = latencies_ms(quiet, seconds)
    finally:
        written, _ = flooding.communicate()
    say(f"beside {threads} threads", found)
    print(f"the flooding session wrote {written.strip()} files meanwhile")


if __name__ == "__main__":
    main()
