"""Run benchmarks by the names of their rows, each in a process of its own, and print what falls short.

Decided here and only here: how long one may take, and how it is ended: as by Ctrl-C first, so that it unmounts and
stops its server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from _table import ROWS, TABLE

HERE = Path(__file__).resolve().parent
SKIPPED = 3
LIMIT_S, QUICK_LIMIT_S = 1800, 300
_CLEAN_UP_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to measure (see --list); all if none is named")
    parser.add_argument("--list", action="store_true", help="print the rows, their goals and their files, and end")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: orders of magnitude only")
    parser.add_argument("--json", action="store_true", help="print the values as JSON, and nothing else")
    args = parser.parse_args()
    if args.list:
        for row in TABLE:
            print(f"{row.name:20} {row.goal:14} {row.unit:40} {row.what} (benchmarks/{row.script})")
        return 0
    unknown = [name for name in args.names if name not in ROWS]
    if unknown:
        parser.error(f"no such row: {', '.join(unknown)}; see --list")
    scripts = dict.fromkeys(ROWS[name].script for name in args.names or ROWS)
    with tempfile.TemporaryDirectory(prefix="fusefs-bench-") as top:
        values = Path(top) / "values"
        values.touch()
        failed = [script for script in scripts if not measured(script, values, quick=args.quick, quiet=args.json)]
        found = [json.loads(line) for line in values.read_text().splitlines()]
    short = [one["name"] for one in found if not one["reached"]]
    missing = sorted({row.name for row in TABLE if row.script in scripts} - {one["name"] for one in found})
    if args.json:
        print(json.dumps({"values": found, "not_measured": missing}, indent=1))
    else:
        print(f"\nshort of its goal: {', '.join(short) or 'nothing'}")
        if missing:
            print(f"not measured: {', '.join(missing)}")
    return 1 if short or failed else 0


def measured(script: str, values: Path, *, quick: bool, quiet: bool) -> bool:
    """Run one benchmark; False where it failed (one that was skipped did not)."""
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    out = sys.stderr if quiet else sys.stdout
    print(f"\n{script}", file=out, flush=True)
    command = [sys.executable, HERE / script, "--json", values, *(["--quick"] if quick else [])]
    # In a session of its own: Ctrl-C reaches this process alone, which passes it on once.
    with subprocess.Popen(command, stdout=out.fileno(), start_new_session=True) as process:
        try:
            code = process.wait(limit_s)
        except BaseException as exc:
            end(process)
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
            print(f"ended after {limit_s} s", file=out)
            return False
    return code in (0, SKIPPED)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_CLEAN_UP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # Said, since a shell's background job is made to ignore Ctrl-C.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
