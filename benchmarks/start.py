#!/usr/bin/env python3
"""How long a mount takes to be ready, and what an idle one holds in memory.

    benchmarks/start.py [--rounds N]

On an embedded Postgres in a temporary directory, which runs before anything is timed. In turn, N times (11 if
nothing else is said): an interpreter that imports pyfuse3, trio and psycopg and connects once, and `fusefs mount`
until it returns. Prints the medians, their ratio (the goal is at most 3), and the memory of an idle daemon (the goal
is under 80 MB). Run it with the interpreter that has fusefs: .venv/bin/python benchmarks/start.py
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FUSEFS = Path(sys.executable).with_name("fusefs")
IMPORTS = "import sys, pyfuse3, trio, psycopg; psycopg.connect(sys.argv[1]).close()"


def timed(*command: str | Path, env: dict[str, str]) -> float:
    """Seconds that a command takes; it must succeed."""
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def memory_kb(pid: int) -> dict[str, int]:
    """Resident and proportional memory of a process, in KB: shared libraries count whole in the first."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {name: int(size) for name, size in re.findall(r"^(Rss|Pss): +(\d+) kB", text, re.M)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    from fusefs.db import embedded

    with tempfile.TemporaryDirectory(prefix="fusefs-start-") as name:
        top = Path(name)
        top.chmod(0o755)
        env = {**os.environ, "HANGO_FS_RUNTIME_DIR": str(top / "run"), "XDG_STATE_HOME": str(top / "state")}
        (top / "run").mkdir(mode=0o700)
        dsn = embedded.ensure_running(top / "data")
        try:
            for words in (("init",), ("tenant", "add", "b"), ("agent", "add", "b", "--tenant", "b")):
                timed(FUSEFS, *words, "--dsn", dsn, env=env)
            measure(top, env, dsn, args.rounds)
        finally:
            embedded.stop(top / "data")


def measure(top: Path, env: dict[str, str], dsn: str, rounds: int) -> None:
    mountpoint = top / "mount"
    mount = (FUSEFS, "mount", mountpoint, "--dsn", dsn, "--tenant", "b", "--agent", "b")
    imports: list[float] = []
    mounts: list[float] = []
    held: dict[str, int] = {}
    mountpoint.mkdir()
    for _ in range(rounds):
        imports.append(timed(sys.executable, "-c", IMPORTS, dsn, env=env))
        mounts.append(timed(*mount, env=env))
        try:
            (record,) = (top / "run").glob("*.json")
            pid = int(re.findall(r'"pid": (\d+)', record.read_text())[0])
            held = memory_kb(pid)
        finally:
            subprocess.run([FUSEFS, "umount", mountpoint], env=env, check=True, stdout=subprocess.DEVNULL)
    before, ready = statistics.median(imports), statistics.median(mounts)
    print(f"imports and one connection: {before * 1000:.0f} ms (median of {rounds})")
    print(f"fusefs mount until ready:   {ready * 1000:.0f} ms, {ready / before:.2f} times as long")
    print(f"an idle daemon's memory:    {held['Rss'] / 1024:.0f} MB resident, {held['Pss'] / 1024:.0f} MB proportional")


if __name__ == "__main__":
    main()
