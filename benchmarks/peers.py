#!/usr/bin/env python3
"""Everyday agent work beside JuiceFS and the local disk, on one Postgres.

    benchmarks/peers.py [--quick]

Runs the comparison script beside the checkout (1000 files a step, three rounds in turn, medians; quick: 100 files, one
round) and reports its ratios. Needs root, a Postgres server's binaries, and JuiceFS, which that script installs.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _rig import COMPARE, FUSEFS, Report, Skip, run


def compared(files: int, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds by file system and step."""
    if not COMPARE.is_file():
        raise Skip(f"{COMPARE} is not there")
    with tempfile.TemporaryDirectory(prefix="fusefs-peers-") as name:
        out = Path(name) / "out.json"
        command = [sys.executable, COMPARE, "--fusefs", FUSEFS, "--json", out]
        words = ["--files", str(files), "--rounds", str(rounds)]
        # In a process group of its own, so that its own clean-up is what Ctrl-C reaches.
        with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                said, _ = process.communicate()
            except BaseException:
                # Its workload as well, which keeps a mount busy else.
                os.killpg(process.pid, signal.SIGINT)
                process.wait()
                raise
        if process.returncode:
            raise Skip("the comparison script did not succeed; see above")
        print(said, end="")
        medians: dict[str, dict[str, float]] = json.loads(out.read_bytes())["median"]
        return medians


def measure(report: Report, quick: bool) -> None:
    found = compared(*((100, 1) if quick else (1000, 3)))
    ours, theirs, local = (
        {step: max(value, 1e-4) for step, value in found[name].items()} for name in ("fusefs", "juicefs", "local")
    )
    ratios = {step: theirs[step] / ours[step] for step in ours if step != "rename_dir"}
    report.say("peers-mean", statistics.geometric_mean(ratios.values()))
    worst = min(ratios, key=ratios.__getitem__)
    report.note(f"the worst step is {worst}")
    report.say("peers-worst", ratios[worst])
    report.say("read-warm", ours["read_warm"] / local["read_warm"])
    report.say("read-warm-peer", ratios["read_warm"])
    report.say("grep-warm", ours["grep_warm2"] / local["grep_warm2"])
    report.say("grep-warm-peer", ratios["grep_warm2"])
    report.say("find-warm", ours["find_warm"] / local["find_warm"])


if __name__ == "__main__":
    run(__doc__, measure)
