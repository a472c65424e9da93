"""Two or more sessions of one namespace, each with a daemon of its own, and what Postgres says of it all.

Decided here and only here: how a test waits for an announcement (by asking until a deadline, never by
sleeping for a guess), and how it reads rows, history and conflicts.
"""

from __future__ import annotations

import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.harness import Namespace

# Announcements take milliseconds; a loaded machine gets this long before it is a failure.
DEADLINE_S = 10.0
SCRIPT_TIMEOUT_S = 60
STALE = "Stale file handle"


def eventually(condition: Callable[[], object], what: str) -> None:
    """Ask until it holds. A name that is not there yet counts as "not yet"."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Result:
    """How a shell command ended."""

    code: int
    out: str
    err: str


# One script per line: the files for the script, its stdout and its stderr; answers with the exit code.
_WORKER = 'while read -r script out err; do bash -c "$(<"$script")" < /dev/null > "$out" 2> "$err"; echo $?; done'


class View(Protocol):
    """Where a session sees its namespace: a mount of its own, or its folder in a host's mount."""

    @property
    def path(self) -> Path: ...

    @property
    def session(self) -> str: ...


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A session's folder in a host's mount."""

    path: Path
    session: str


class Side:
    """One session's view of the directory under test.

    Scripts run as children of one bash that is started with the side, not of the test's own process: a
    fork there would copy the descriptors that a test holds open, and the copies' close at exec is a flush.
    """

    def __init__(self, mount: View, name: str) -> None:
        self.mount = mount
        self.root = mount.path / name
        self.control = mount.path / ".fusefs"
        self._name = name
        self._scratch = Path(tempfile.mkdtemp(prefix="side-"))
        self._worker = self._popen(_WORKER, stdin=subprocess.PIPE)

    def close(self) -> None:
        """End the side's bash."""
        self._worker.communicate(timeout=SCRIPT_TIMEOUT_S)
        shutil.rmtree(self._scratch)

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    def start(self, script: str, *, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """bash in the directory under test, in the background. Flushes what this process has open."""
        return self._popen(script, stdin=stdin)

    def _popen(self, script: str, *, stdin: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.root,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"},
        )

    def run(self, script: str) -> Result:
        script_path, out, err = (self._scratch / name for name in ("script", "out", "err"))
        script_path.write_text(script)
        assert self._worker.stdin is not None and self._worker.stdout is not None
        self._worker.stdin.write(f"{script_path} {out} {err}\n")
        self._worker.stdin.flush()
        ready, _, _ = select.select([self._worker.stdout], [], [], SCRIPT_TIMEOUT_S)
        assert ready, f"no end within {SCRIPT_TIMEOUT_S} s: {script}"
        return Result(int(self._worker.stdout.readline()), out.read_text(), err.read_text())

    def ok(self, script: str) -> str:
        """Run a script that must succeed in silence; returns stdout."""
        result = self.run(script)
        assert result.code == 0 and not result.err, f"{script}: exit {result.code}: {result.err}"
        return result.out

    def refused(self, script: str) -> Result:
        """Run a script that must fail and say that the file is stale."""
        result = self.run(script)
        assert STALE in result.err, f"{script}: exit {result.code}, stderr {result.err!r}"
        assert result.code != 0, f"{script}: it says {result.err!r} but exits 0"
        return result

    def errors(self, name: str) -> list[str]:
        """The lines of this session's `/.fusefs/errors` on one file."""
        wanted = f"/{self._name}/{name}"
        return [line for line in (self.control / "errors").read_text().splitlines() if wanted in line]

    def conflict_files(self) -> list[bytes]:
        """The contents of everything below `/.fusefs/conflicts`."""
        return [path.read_bytes() for path in (self.control / "conflicts").rglob("*") if path.is_file()]

    def version(self, name: str, number: int) -> bytes:
        return (self.control / "versions" / self._name / name / str(number)).read_bytes()


def finish(process: subprocess.Popen[str]) -> Result:
    """Wait for a started script."""
    out, err = process.communicate(timeout=SCRIPT_TIMEOUT_S)
    return Result(process.returncode, out, err)


class Files:
    """The rows below the directory under test, read past every cache."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace = namespace
        self._name = name

    def path(self, name: str) -> str:
        return f"/{self._name}/{name}"

    def _select(self, columns: str, table: str, name: str, order: str) -> list[tuple[Any, ...]]:
        return self.namespace.execute(
            f"SELECT {columns} FROM {table} WHERE tenant_id = %s AND agent_id = %s AND path = %s ORDER BY {order}",
            (self.namespace.tenant_id, self.namespace.agent_id, self.path(name)),
        )

    def content(self, name: str) -> bytes | None:
        """The stored bytes; None where there is no row."""
        rows = self._select("content, content_bytes", "agent_files", name, "id")
        if not rows:
            return None
        text, raw = rows[0]
        return text.encode() if raw is None else bytes(raw)

    def identity(self, name: str) -> tuple[str, int]:
        """(id, version) of the row."""
        ((node_id, version),) = self._select("id::text, version", "agent_files", name, "id")
        return node_id, version

    def history(self, name: str) -> list[tuple[str, int, int]]:
        """(op, version, size in bytes) of every change recorded at the path, oldest first."""
        return self._select("op, version, size_bytes", "agent_file_versions", name, "seq")

    def superseded(self, name: str) -> list[bytes]:
        """The contents that the history keeps in full at the path, oldest first."""
        rows = self._select("old_state, old_content, old_bytes", "agent_file_versions", name, "seq")
        return [
            text.encode() if state == "text" else bytes(raw) for state, text, raw in rows if state in ("text", "bytes")
        ]

    def conflicts(self, name: str) -> list[bytes]:
        """The bytes of the lost races at the path, oldest first."""
        return [bytes(row[0]) for row in self._select("content", "agent_file_conflicts", name, "at")]


class Duo:
    """Two sessions in one fresh directory."""

    def __init__(self, mounts: tuple[View, ...], namespace: Namespace, name: str) -> None:
        (mounts[0].path / name).mkdir()
        for mount in mounts:
            eventually((mount.path / name).is_dir, f"the new directory in session {mount.session}")
        self.sides = tuple(Side(mount, name) for mount in mounts)
        self.a, self.b = self.sides[:2]
        self.files = Files(namespace, name)

    def close(self) -> None:
        for side in self.sides:
            side.close()

    def given(self, name: str, text: str = "one\n") -> None:
        """A file that session b made and session a has read: a has seen version 1."""
        self.b.ok(f"printf %s '{text}' > {name}")
        eventually(lambda: (self.a / name).read_text() == text, "session a reads the file")

    def stale(self, name: str, text: str = "one\n", newer: str = "two\n") -> None:
        """As `given`, and then session b changed it: what session a has seen is old."""
        self.given(name, text)
        self.b.ok(f"printf %s '{newer}' > {name}")
