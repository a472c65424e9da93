"""Sessions in two daemons, each with a worker, on one directory: runs them in rounds and compares what they see.

Decided here and only here: who the sessions are, when their views must agree, and how daemons are killed and
Postgres restarted under them. The promises that are checked afterwards are the oracle's.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fusefs.db.pool import open_database
from fusefs.rules.errors import NotFound
from fusefs.rules.scope import Principal, Scope
from fusefs.store import check, versions
from tests import harness
from tests.mount.model import oracle
from tests.mount.model.oracle import Record, Run, Violation
from tests.mount.model.worker import UNKNOWN

TOP = "work"
SESSIONS = (("a0", "a1"), ("b0", "b1"))
"""Of each daemon; the names are the beginnings of their tokens."""

ROUND_DEADLINE_S = 180.0
AGREE_DEADLINE_S = 10.0
VERSIONS_READ = 100
Disturb = Callable[[], None]
Tree = dict[str, str | None]


@dataclass
class Figures:
    """What a run did and what came of it."""

    operations: int = 0
    refusals: int = 0
    unknown: int = 0
    conflicts: int = 0
    versions: int = 0
    kills: int = 0
    frozen: int = 0
    restarts: int = 0
    crashes: int = 0
    rescued: int = 0
    torn_reads: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    def add(self, run: Run, found: list[Violation]) -> None:
        results = Counter(record["r"] for record in run.records)
        self.operations += len(run.records)
        self.refusals += results["ESTALE"]
        self.unknown += sum(results[name] for name in UNKNOWN)
        self.conflicts += len(run.conflicts)
        self.versions += len(run.rows)
        self.rescued += len(run.rescued)
        self.torn_reads += len(oracle.torn(run))
        self.violations += map(str, found)


class Crowd:
    """Four sessions, two in each of two host daemons, on one agent's directory.

    Args:
        hosts: their mount points.
        scratch: a directory on the local disk.
    """

    def __init__(self, namespace: harness.Namespace, hosts: tuple[Path, Path], scratch: Path, seed: str) -> None:
        self.namespace = namespace
        self.seed = seed
        self.outages: list[tuple[int, int]] = []
        self.crashes: list[int] = []
        self._scratch = Path(tempfile.mkdtemp(prefix="crowd-", dir=scratch))
        self._own: list[Record] = []
        agents = [host / namespace.tenant / namespace.agent for host in hosts]
        self.views = {name: agent / name / TOP for agent, names in zip(agents, SESSIONS, strict=True) for name in names}
        for view in self.views.values():
            view.parent.mkdir()
        next(iter(self.views.values())).mkdir()
        self._workers = {name: self._start(name, view) for name, view in self.views.items()}

    def _start(self, name: str, view: Path) -> subprocess.Popen[bytes]:
        scratch = self._scratch / name
        scratch.mkdir()
        command = [sys.executable, "-I", str(Path(__file__).with_name("worker.py")), name, view, scratch]
        return subprocess.Popen(
            [*command, self._log(name), self.seed], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
        )

    def _log(self, name: str) -> Path:
        return self._scratch / f"{name}.jsonl"

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()  # type: ignore[union-attr]
        for worker in self._workers.values():
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            worker.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(self._scratch)

    def round(self, each: int, disturb: Mapping[int, Disturb] | None = None) -> None:
        """Let each worker do so many operations.

        Args:
            disturb: what to do when so many operations of all were done.
        """
        waiting = sorted((disturb or {}).items(), reverse=True)
        done, running = 0, set(self._workers)
        deadline = time.monotonic() + ROUND_DEADLINE_S
        with selectors.DefaultSelector() as selector:
            for name, worker in self._workers.items():
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(f"go {each}\n".encode())
                worker.stdin.flush()
                selector.register(worker.stdout, selectors.EVENT_READ, name)
            while running:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                assert ready, f"seed {self.seed}: no end of a round within {ROUND_DEADLINE_S:.0f} s: {running}"
                for key, _ in ready:
                    chunk = os.read(key.fd, 4096)
                    assert chunk, f"seed {self.seed}: the worker {key.data} ended"
                    done += chunk.count(b".")
                    if b"\n" in chunk:
                        running.discard(key.data)
                        selector.unregister(key.fileobj)
                while waiting and waiting[-1][0] <= done:
                    waiting.pop()[1]()

    # -- Comparing ---------------------------------------------------------------------------------

    def stored(self) -> Tree:
        _, files, _ = oracle.load(self.namespace, f"/{TOP}")
        return {path: text for path, (_, _, text) in files.items()}

    def agree(self, more: Mapping[str, Path] | None = None) -> list[Violation]:
        """Every session sees what is stored, a moment after the last operation."""
        found = []
        for name, view in {**self.views, **(more or {})}.items():
            deadline = time.monotonic() + AGREE_DEADLINE_S
            while (seen := self._read_tree(name, view)) != (wanted := self.stored()):
                if time.monotonic() > deadline:
                    wrong = sorted(
                        path for path in {*seen, *wanted} if seen.get(path, "absent") != wanted.get(path, "absent")
                    )
                    lines = [f"{path}: sees {seen.get(path, 'absent')!r}" for path in wrong]
                    lines += [f"{path}: stored is {wanted.get(path, 'absent')!r}" for path in wrong]
                    found.append(Violation("disagreement", f"{name} after {AGREE_DEADLINE_S:.0f} s", tuple(lines)))
                    break
                time.sleep(0.01)
        return found

    def _read_tree(self, name: str, view: Path) -> Tree:
        """What a session sees. It has read all that afterwards, so this is in its log."""
        found: Tree = {}
        for top, directories, files in os.walk(view):
            for directory in directories:
                found[str((Path(top) / directory).relative_to(view))] = None
            for file in files:
                path = str((Path(top) / file).relative_to(view))
                record: Record = {"n": -1, "s": name, "op": "read", "p": path, "t0": time.time_ns(), "r": "ok"}
                try:
                    text = (Path(top) / file).read_bytes().decode("latin-1")
                except OSError as error:
                    found[path] = error.strerror
                    continue
                found[path] = text
                self._own.append(record | {"t1": time.time_ns(), "got": text})
        return found

    def finish(self, fresh: Path, rescued: list[str]) -> tuple[Run, list[Violation]]:
        """Check everything. The workers are idle.

        Args:
            fresh: the agent's directory in a mount made just now.
            rescued: contents in the rescue directory.
        """
        found = self.agree({"fresh": fresh / TOP})
        records = [record for name in self._workers for record in oracle.read_log(self._log(name))] + self._own
        rows, files, conflicts = oracle.load(self.namespace, f"/{TOP}")
        run = Run(records, rows, files, conflicts, self.outages, self.crashes, rescued)
        found += oracle.check(run)
        found += trio.run(self._stored_well, run)
        return run, found

    async def _stored_well(self, run: Run) -> list[Violation]:
        """`fusefs check` has nothing to say, and the API of versions reads what the history has."""
        found = []
        tenant, agent = self.namespace.tenant_id, self.namespace.agent_id
        kept = oracle.kept(run)
        async with open_database(self.namespace.dsn, origin="model", size=1) as db:
            found += [Violation("fusefs check", str(one)) for one in await check.check(db, tenant, agent)]
            scope = Scope(tenant, agent, "model", Principal.SYSTEM)
            rng = random.Random(self.seed)
            for row in rng.sample(list(kept), min(VERSIONS_READ, len(kept))):
                try:
                    text = await versions.read_version(db, scope, f"/{TOP}/{row.path}", row.version, row.lineage)
                except NotFound as error:
                    found.append(Violation("versions", error.message, (str(row),)))
                else:
                    if text.decode("latin-1") != kept[row]:
                        found.append(Violation("versions", f"read_version gives {text!r}", (str(row),)))
        return found


@contextlib.contextmanager
def crowd(namespace: harness.Namespace, hosts: tuple[Path, Path], scratch: Path, seed: str) -> Iterator[Crowd]:
    found = Crowd(namespace, hosts, scratch, seed)
    try:
        yield found
    finally:
        found.close()
