#!/usr/bin/env python3
"""How long a mount takes to be ready, and what an idle one holds in memory.

    benchmarks/start.py [--rounds N]

On an embedded Postgres in a temporary directory, which runs before anything is timed. In turn, N times (11 if
nothing else is said): an interpreter that imports trio and psycopg and connects once, and `fusefs mount`
until it returns. Prints the medians, their ratio (the goal is at most 3), and the memory of an idle daemon (the goal
is under 80 MB). Run it with the interpreter that has fusefs: .venv/bin/python benchmarks/start.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from _rig import Rig, in_turn, rig, seconds

IMPORTS = "import sys, trio, psycopg; psycopg.connect(sys.argv[1]).close()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    with rig() as server:
        measure(server, args.rounds)


def measure(server: Rig, rounds: int) -> None:
    resident = proportional = 0.0

    def imports() -> float:
        return seconds(lambda: subprocess.run([sys.executable, "-c", IMPORTS, server.dsn], check=True))

    def mount() -> float:
        nonlocal resident, proportional
        began = time.perf_counter()
        with server.mount() as mounted:
            took = time.perf_counter() - began
            resident, proportional = mounted.memory_mb("Rss"), mounted.memory_mb("Pss")
        return took

    medians = in_turn(rounds, imports=imports, mount=mount)
    before, ready = medians["imports"], medians["mount"]
    print(f"imports and one connection: {before * 1000:.0f} ms (median of {rounds})")
    print(f"fusefs mount until ready:   {ready * 1000:.0f} ms, {ready / before:.2f} times as long")
    print(f"an idle daemon's memory:    {resident:.0f} MB resident, {proportional:.0f} MB proportional")


if __name__ == "__main__":
    main()
