"""The concurrent model at any size, on its own embedded Postgres, with daemons killed and Postgres restarted.

    scripts/soak [--minutes N] [--seed S] [--json] [--calm] [--keep DIR]

One epoch after the other, each with an agent of its own: rounds of operations of four sessions in two daemons, in each
epoch one kill -9 of a daemon and one restart of Postgres (every second one a crash, without a checkpoint), then the
oracle. Prints the figures; exits with 1 where there was a violation, and prints it with its seed and the lines of the
logs that show it. Everything is in a temporary directory and goes with it, also after Ctrl-C.

Decided here and only here: when what is disturbed, and how the figures are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from fusefs.db import embedded, migrate
from fusefs.fuse.mounting import abort_connection
from tests import harness
from tests.mount.model.crowd import Crowd, Figures, crowd
from tests.mount.model.oracle import Violation

ROUNDS = 12
EACH = 60
KILL_DEADLINE_S = 2.0


class Soak:
    """A server and two host daemons, over all epochs."""

    def __init__(self, suite_dir: Path, seed: str, *, calm: bool, keep: Path | None) -> None:
        self.figures = Figures()
        self._dir = suite_dir
        self._data = suite_dir / harness.DATA
        self._seed = seed
        self._calm = calm
        self._keep = keep
        self._dsn = embedded.ensure_running(self._data)
        migrate.up(self._dsn)
        first = harness.make_namespace(self._dsn, tenant="soak")
        self._mount = harness.MountFactory(suite_dir, first)
        self._hosts = [self._mount(layout="host"), self._mount(layout="host")]
        self._crowd: Crowd | None = None
        self._faults_told: set[str] = set()

    def close(self) -> None:
        for mount in reversed(self._mount.mounts):
            mount.destroy()
        embedded.stop(self._data)

    # -- Disturbing --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _outage(self) -> Iterator[None]:
        assert self._crowd is not None
        began = time.time_ns()
        yield
        self._crowd.outages.append((began, time.time_ns()))

    def kill(self, which: int) -> None:
        """kill -9, and mount again at the same place, as systemd does."""
        with self._outage():
            old = self._hosts[which]
            old.process.kill()
            try:
                old.process.wait(KILL_DEADLINE_S)
            except subprocess.TimeoutExpired:
                # One of its threads waits for a page that only it could fill: see docs/internals/coherence.md.
                for device, point in harness.mount_table():
                    if point == str(old.path):
                        abort_connection(int(device.partition(":")[2]), point)
                self.figures.frozen += 1
            old.kill()
            self._hosts[which] = self._mount(layout="host", path=old.path)
        self.figures.kills += 1

    def restart(self, *, crash: bool) -> None:
        """Restart Postgres in good order, or as after a power failure."""
        assert self._crowd is not None
        with self._outage():
            if crash:
                running = embedded.running_pid(self._data)
                assert running is not None
                self._crowd.crashes.append(time.time_ns())
                os.kill(running[0], signal.SIGQUIT)
                while harness.process_start(running[0]) is not None:
                    time.sleep(0.01)
            else:
                embedded.stop(self._data)
            embedded.ensure_running(self._data)
        self.figures.restarts += 1
        self.figures.crashes += crash

    # -- Epochs ------------------------------------------------------------------------------------

    def epoch(self, number: int) -> None:
        seed = f"{self._seed}.{number}"
        rng = random.Random(seed)
        namespace = harness.make_namespace(self._dsn, tenant="soak")
        hosts = self._hosts[0].path, self._hosts[1].path
        known = {path.name for path in self._rescued()}
        with crowd(namespace, hosts, self._dir, seed) as workers:
            self._crowd = workers
            killed, restarted = rng.sample(range(ROUNDS), 2)
            found = []
            for at in range(ROUNDS):
                when = rng.randrange(EACH * 3)
                if self._calm or at not in (killed, restarted):
                    workers.round(EACH)
                elif at == killed:
                    which = rng.randrange(2)
                    workers.round(EACH, {when: lambda which=which: self.kill(which)})  # type: ignore[misc]
                else:
                    workers.round(EACH, {when: lambda: self.restart(crash=bool(number % 2))})
                found += workers.agree()
            fresh = self._mount(namespace=namespace, session="fresh")
            rescued = [path.read_bytes().decode("latin-1") for path in self._rescued() if path.name not in known]
            run, more = workers.finish(fresh.path, rescued)
            fresh.umount()
            fresh.destroy()
            self._mount.mounts.remove(fresh)
        found += more + self._faults()
        self.figures.add(run, [])
        self.figures.violations += [f"seed {seed}: {one}" for one in found]
        if found and self._keep is not None:
            (self._keep / f"{seed}.pickle").write_bytes(pickle.dumps(run))

    def _faults(self) -> list[Violation]:
        """What a daemon caught and answered with EIO, since the last epoch."""
        lines = [line for mount in self._mount.mounts for line in mount.unexpected_log() if "handler_failed" in line]
        new = [line for line in lines if line not in self._faults_told]
        self._faults_told.update(new)
        return [Violation("fault in a daemon", line) for line in new]

    def _rescued(self) -> list[Path]:
        return list((self._dir / "state").rglob("*.rescued"))


def line(figures: Figures) -> str:
    return (
        f"{figures.seconds / 60:.1f} min: {figures.operations} operations, {figures.versions} versions, "
        f"{figures.refusals} refusals, {figures.conflicts} conflicts, {figures.torn_reads} torn reads, "
        f"{figures.unknown} without an answer, {figures.rescued} rescued, "
        f"{figures.kills} kills ({figures.frozen} frozen), {figures.restarts} restarts ({figures.crashes} crashes), "
        f"{len(figures.violations)} violations"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default="1", help="decides each worker's operations, and when what is disturbed")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    parser.add_argument("--calm", action="store_true", help="kill and restart nothing")
    parser.add_argument("--keep", type=Path, help="keep the logs of epochs with a violation in this directory")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    harness.require_fuse()
    suite_dir = harness.make_suite_dir()
    harness.sweep_stale(suite_dir.parent)
    began = time.monotonic()
    soak: Soak | None = None
    interrupted = False
    try:
        soak = Soak(suite_dir, args.seed, calm=args.calm, keep=args.keep)
        number = 0
        while time.monotonic() - began < args.minutes * 60:
            before = len(soak.figures.violations)
            soak.epoch(number)
            number += 1
            soak.figures.seconds = time.monotonic() - began
            for text in soak.figures.violations[before:]:
                _say(f"{text}\n")
            if sys.stderr.isatty():
                _say(f"\r\033[K{line(soak.figures)}")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if sys.stderr.isatty():
            _say("\n")
        if soak is not None:
            soak.close()
        harness.remove_suite_dir(suite_dir)
    figures = soak.figures if soak is not None else Figures()
    figures.seconds = time.monotonic() - began
    sys.stdout.write(f"{json.dumps(asdict(figures)) if args.json else f'seed {args.seed}, {line(figures)}'}\n")
    return 130 if interrupted else int(bool(figures.violations))


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGINT)  # trio knows how to end at that one


if __name__ == "__main__":
    sys.exit(main())
