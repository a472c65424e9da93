#!/usr/bin/env python3
"""How long the commands take that an agent's harness starts for each call.

    benchmarks/commands.py [--rounds N]

In turn, N times (31 if nothing else is said): `python -c pass`, `fusefs --help`, `fusefs status`, `fusefs offload` with
a short text, and `fusefs offload-hook` with a short result. Prints the medians and what multiple of the first each is
(the goal is under 6). Nothing of it needs a database. Run it with the interpreter that has fusefs:
.venv/bin/python benchmarks/commands.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FUSEFS = Path(sys.executable).with_name("fusefs")
HOOK = b'{"hook_event_name": "PostToolUse", "tool_name": "Bash", "tool_response": {"stdout": "short"}}'
COMMANDS: dict[str, tuple[list[str | Path], bytes]] = {
    "python -c pass": ([sys.executable, "-c", "pass"], b""),
    "fusefs --help": ([FUSEFS, "--help"], b""),
    "fusefs status": ([FUSEFS, "status"], b""),
    "fusefs offload": ([FUSEFS, "offload", "--tool-call-id", "t"], b"short\n"),
    "fusefs offload-hook": ([FUSEFS, "offload-hook"], HOOK),
}
GOAL = 6.0


def timed(command: list[str | Path], stdin: bytes, env: dict[str, str]) -> float:
    """Seconds that a command takes; it must succeed."""
    start = time.perf_counter()
    subprocess.run(command, input=stdin, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="fusefs-commands-") as top:
        env = {**os.environ, "HANGO_FS_RUNTIME_DIR": top, "XDG_CONFIG_HOME": top, "XDG_DATA_HOME": top}
        for _ in range(args.rounds):
            for name, (command, stdin) in COMMANDS.items():
                taken[name].append(timed(command, stdin, env))
    base = statistics.median(taken["python -c pass"])
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"{name}: {median * 1000:.0f} ms, {median / base:.1f} times `python -c pass` (goal: under {GOAL:.0f})")


if __name__ == "__main__":
    main()
