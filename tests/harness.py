"""What the tests stand on: a real Postgres, databases cloned from a template, real mounts, a clean end.

Decided here and only here: how a server and a mount are started for a test, when they count as ready,
and what counts as a clean end. Everything lives under one suite folder in the temporary directory,
marked with its owner's pid and start time, so that two suites run side by side and the next one
removes what a killed one left behind.

Threading: plain blocking code, called from fixtures and from synchronous tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fusefs.db import embedded
from fusefs.db.pool import open_database
from fusefs.fuse.mounting import abort_connection
from fusefs.rules.errors import FsError
from fusefs.rules.paths import RESERVED
from fusefs.store import check

SUITE_PREFIX = "fusefs-test-"
MAX_FILE_BYTES = 16 * 1024 * 1024
# A cold start takes about one second; a loaded machine with two cores has shown ten.
READY_DEADLINE_S = 60.0
EXIT_DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parent.parent
FUSEFS = Path(sysconfig.get_path("scripts")) / "fusefs"
DATA = "data"
# Durability is of no use to a test, and autovacuum would disturb the plans and counts that tests assert.
POSTGRES_SETTINGS = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}


# The suite folder


def process_start(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def make_suite_dir() -> Path:
    """Make the folder that holds all that this run leaves outside the repository."""
    base = tempfile.gettempdir()
    if len(base) > 40:
        base = "/tmp"  # a Unix socket's path may have 107 bytes
    path = Path(tempfile.mkdtemp(prefix=SUITE_PREFIX, dir=base))
    path.chmod(0o755)  # Postgres runs as another user when we are root
    (path / "owner").write_text(f"{os.getpid()} {process_start(os.getpid())}")
    return path


def sweep_stale(base: Path) -> None:
    """Remove the suite folders in `base` whose owner has ended, with their mounts and servers."""
    for path in base.glob(f"{SUITE_PREFIX}*"):
        try:
            pid, started = (path / "owner").read_text().split()
            if path.stat().st_uid != os.geteuid() or str(process_start(int(pid))) == started:
                continue
        except (OSError, ValueError):
            continue  # another user's, or being made or removed right now
        with contextlib.suppress(FsError):  # its server cannot be stopped: the folder stays for a person to look at
            remove_suite_dir(path)


def remove_suite_dir(path: Path) -> list[str]:
    """Unmount, stop and delete everything under a suite folder. Returns the mounts that were left."""
    left = mounts_under(path)
    for mountpoint in left:
        lazy_umount(mountpoint)
    embedded.stop(path / DATA)
    if not mounts_under(path):  # never delete through a mount
        shutil.rmtree(path, ignore_errors=True)
    return left


# Postgres


class PostgresServer:
    """The embedded Postgres in the suite folder, as the product starts it, but without fsync."""

    def __init__(self, suite_dir: Path) -> None:
        self._data_dir = suite_dir / DATA
        self._dsn = ""

    def start(self) -> None:
        """Make and start the server; returns when it answers."""
        self._dsn = embedded.ensure_running(self._data_dir)
        for name, value in POSTGRES_SETTINGS.items():
            self.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        self.execute(sql.SQL("SELECT pg_reload_conf()"))

    def stop(self) -> None:
        embedded.stop(self._data_dir)

    def dsn(self, database: str = "postgres") -> str:
        return make_conninfo(self._dsn, dbname=database)

    def execute(self, statement: sql.Composable) -> None:
        """Run one statement outside a transaction, as the superuser."""
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            conn.execute(statement)

    def create_database(self, name: str, template: str = "template0") -> str:
        """Make a database from a template that nobody is connected to, and return its DSN."""
        self.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        self.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@dataclass(frozen=True, slots=True)
class Namespace:
    """One tenant and one agent in a test database."""

    dsn: str
    tenant_id: str
    agent_id: str
    tenant: str
    agent: str

    def execute(self, statement: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, past row-level security, and return its rows."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            cursor = conn.execute(statement, params)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def only_follower(self) -> str | None:
        """The origin of the one daemon that follows, whose changes are announced to nobody."""
        ((found,),) = self.execute("select only_follower from agent_namespaces where agent_id = %s", (self.agent_id,))
        return found  # type: ignore[no-any-return]


def make_namespace(dsn: str, tenant: str | None = None, agent: str | None = None) -> Namespace:
    """Insert a tenant (or reuse the one of that slug) and an agent in it."""
    tenant = tenant or f"t-{uuid.uuid4().hex[:8]}"
    agent = agent or f"a-{uuid.uuid4().hex[:8]}"
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute("SELECT id FROM tenants WHERE slug = %s", (tenant,)).fetchone()
        tenant_id = row[0] if row else uuid.uuid4()
        if not row:
            conn.execute("INSERT INTO tenants (id, slug) VALUES (%s, %s)", (tenant_id, tenant))
        agent_id = uuid.uuid4()
        conn.execute("INSERT INTO agents (id, tenant_id, slug) VALUES (%s, %s, %s)", (agent_id, tenant_id, agent))
        for path in RESERVED:  # as `fusefs agent add` does
            conn.execute(
                "INSERT INTO agent_files (tenant_id, agent_id, path, content, kind, mode, version)"
                " VALUES (%s, %s, %s, '', 'dir', 493, 1)",
                (tenant_id, agent_id, path),
            )
    return Namespace(dsn, str(tenant_id), str(agent_id), tenant, agent)


def audit(dsn: str) -> None:
    """Fail when the stored files of any namespace break an invariant."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        namespaces = conn.execute("SELECT tenant_id::text, agent_id::text FROM agent_namespaces").fetchall()
    if namespaces:
        findings = trio.run(_findings, dsn, namespaces)
        assert not findings, "the stored files break an invariant:\n" + "\n".join(map(str, findings))


async def _findings(dsn: str, namespaces: list[tuple[str, str]]) -> list[check.Finding]:
    async with open_database(dsn, origin="audit", size=1) as db:
        return [found for tenant_id, agent_id in namespaces for found in await check.check(db, tenant_id, agent_id)]


# Mounts


def require_fuse() -> None:
    """Fail when this machine cannot mount; skip only where FUSEFS_ALLOW_NO_FUSE=1 says that this is known."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
        problem = "" if shutil.which("fusermount3") else "fusermount3 is missing (Debian package fuse3)"
    except OSError as exc:
        problem = f"/dev/fuse cannot be opened: {exc.strerror}"
    if problem and os.environ.get("FUSEFS_ALLOW_NO_FUSE") == "1":
        pytest.skip(problem)
    if problem:
        pytest.fail(f"{problem}; set FUSEFS_ALLOW_NO_FUSE=1 to skip the tests that mount")


def mount_table(mountinfo: str | None = None) -> Iterator[tuple[str, str]]:
    """(device number, mount point) of every mount that this process sees, or of the text given."""
    for line in (mountinfo or Path("/proc/self/mountinfo").read_text()).splitlines():
        fields = line.split(" ")
        # Blank, tab, newline and backslash are octal escapes there.
        yield fields[2], re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])


def mounts_under(path: Path) -> list[str]:
    """The mount points at or below `path`, the innermost first. Touches no mount, so it cannot hang."""
    prefix = os.path.realpath(path)
    found = [point for _, point in mount_table() if point == prefix or point.startswith(f"{prefix}/")]
    return found[::-1]


def holders(mountpoint: Path) -> list[str]:
    """Which processes have files or their working directory on a mount, as far as we may look."""
    found = []
    for link in [*Path("/proc").glob("[0-9]*/cwd"), *Path("/proc").glob("[0-9]*/fd/*")]:
        with contextlib.suppress(OSError):  # it ended, or it is another user's
            target = os.readlink(link)
            if target.startswith(f"{mountpoint}/") or target == str(mountpoint):
                command = Path(*link.parts[:3], "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{link}: {target} ({command.strip()[:100]})")
    return found


def lazy_umount(mountpoint: str) -> None:
    """Take a mount away however its daemon is: abort the connection, then detach."""
    for device, point in mount_table():
        if point == mountpoint:
            with contextlib.suppress(OSError):  # not ours to abort, or gone already: detaching still works
                abort_connection(int(device.partition(":")[2]), point)
    subprocess.run(["fusermount3", "-u", "-z", "-q", mountpoint], check=False, stdin=subprocess.DEVNULL)


def command_environment(suite_dir: Path, dsn: str | None = None) -> dict[str, str]:
    """The environment of a command under test: nothing of the caller's settings, everything in the suite folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HANGO_", "OTEL_", "PG"))}
    env |= {
        "HANGO_FS_MAX_FILE_BYTES": str(MAX_FILE_BYTES),
        "HANGO_FS_DATA_DIR": str(suite_dir / DATA),
        "XDG_RUNTIME_DIR": str(suite_dir / "run"),
        "XDG_STATE_HOME": str(suite_dir / "state"),
        "XDG_CONFIG_HOME": str(suite_dir / "config"),
        "XDG_DATA_HOME": str(suite_dir / "share"),
        "PYTHONWARNINGS": "always::ResourceWarning",
        "PYTHONFAULTHANDLER": "1",
    }
    (suite_dir / "run").mkdir(mode=0o700, exist_ok=True)
    if dsn is not None:
        env["HANGO_FS_DSN"] = dsn
    return env


_WATCHDOG = """
import os, select, sys
from fusefs.fuse.mounting import abort_connection
seconds, *mounts = sys.argv[1:]
os.write(1, b"r")
while os.read(0, 1):
    if not select.select([0], [], [], float(seconds))[0] or not os.read(0, 1):
        for each in mounts:
            number, _, mountpoint = each.partition(":")
            abort_connection(int(number), mountpoint)
        sys.exit(1)
"""


class Watchdog:
    """A process that ends the connections of mounts when a block of a test takes too long: a process that waits
    in a frozen mount cannot be helped otherwise. Use as a context manager for as long as the mounts live."""

    def __init__(self, mounts: Sequence[Mount], seconds: float) -> None:
        points = [str(mount.path) for mount in mounts]
        found = [f"{device.partition(':')[2]}:{point}" for device, point in mount_table() if point in points]
        assert len(found) == len(points)
        self._seconds = seconds
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCHDOG, str(seconds), *found],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.read(1) == b"r"

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """The block must end in time."""
        assert self._process.stdin is not None
        self._process.stdin.write(b".")
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(b".")
            hung = self._process.poll() is not None
        assert not hung, f"it hung; the connections were ended after {self._seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class Counts:
    """What a daemon did.

    Attributes:
        requests: FUSE requests by handler.
        trips: round trips to Postgres.
        barriers: round trips of the listening connection (a heartbeat, every few seconds, is one as well).
    """

    requests: Counter[str] = field(default_factory=Counter)
    trips: int = 0
    barriers: int = 0

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Counts:
        requests = Counter({name: n for name, n in status["requests"].items() if name != "announcement"})
        return cls(requests, int(status["trips"]), int(status["listener_trips"]))

    def __sub__(self, other: Counts) -> Counts:
        requests = Counter(self.requests)
        requests.subtract(other.requests)
        used = Counter({name: n for name, n in requests.items() if n})
        return Counts(used, self.trips - other.trips, self.barriers - other.barriers)

    @property
    def total(self) -> int:
        """All FUSE requests."""
        return self.requests.total()


@dataclass
class Counting:
    """Filled when the block of `Mount.counting` ends."""

    counts: Counts = field(default_factory=Counts)


def status_at(root: Path) -> dict[str, Any]:
    """What the daemon says of itself in the control directory of a session's root."""
    found: dict[str, Any] = json.loads((root / ".fusefs" / "status").read_bytes())
    return found


class Mount:
    """A running `fusefs mount --foreground`, from its ready line to its end."""

    def __init__(self, path: Path, command: Sequence[str | Path], env: Mapping[str, str], log_path: Path) -> None:
        self.path = path
        self.log_path = log_path
        self._expected: list[re.Pattern[str]] = []
        self._ended = False
        if not mounts_under(path):  # a mount whose daemon was killed cannot be looked at
            path.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=dict(env), cwd="/"
            )
        try:
            self.ready: dict[str, Any] = json.loads(self._read_ready_line())
            if self.ready.get("event") != "ready":
                raise AssertionError(f"the daemon's first line is not the ready line: {self.ready}")
        except BaseException:
            self.destroy()
            raise

    @property
    def session(self) -> str:
        return str(self.ready["session"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read_ready_line(self) -> bytes:
        """The first line of stdout; an end of file or READY_DEADLINE_S without one is a failure with the log."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + READY_DEADLINE_S
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"no ready line within {READY_DEADLINE_S:.0f} s\n{self.log_tail()}")
                chunk = os.read(self.process.stdout.fileno(), 1)
                if not chunk:
                    code = self.process.wait(EXIT_DEADLINE_S)
                    raise AssertionError(f"the daemon ended with {code} before it was ready\n{self.log_tail()}")
                line += chunk
        return line

    def log_tail(self) -> str:
        """The end of the log, for a failure's message: the last lines that are not at info, then the last ten."""
        lines = [line[:400] for _, line in self._log_lines()]
        notable = [line for line in lines if '"level": "info"' not in line]
        return "\n".join(["the daemon's log:", *notable[-40:], "…", *lines[-10:]])

    def log_events(self) -> list[dict[str, Any]]:
        """The log so far, the lines that are JSON."""
        return [entry for entry, _ in self._log_lines() if entry is not None]

    def _log_lines(self) -> Iterator[tuple[dict[str, Any] | None, str]]:
        for line in self.log_path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            yield (entry if isinstance(entry, dict) else None), line

    def expect_log(self, pattern: str) -> None:
        """Announce a warning or error that the daemon may log: a regular expression found in the line."""
        self._expected.append(re.compile(pattern))

    def unexpected_log(self) -> list[str]:
        """Warnings, errors and lines that are no JSON (a traceback, a ResourceWarning), less the announced."""
        bad = [
            line
            for entry, line in self._log_lines()
            if line.strip() and (entry is None or entry.get("level") not in ("debug", "info"))
        ]
        return [line for line in bad if not any(pattern.search(line) for pattern in self._expected)]

    def status(self) -> dict[str, Any]:
        """What the daemon says of itself in its control directory."""
        return status_at(self.path)

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counting]:
        """Count what the block makes the daemon do, less what reading the counters costs. It begins just after a round
        of the daemon's background, which stores the times of directories: the next one is two seconds away."""
        rounds, deadline = self.status()["background_rounds"], time.monotonic() + 30
        while self.status()["background_rounds"] == rounds:
            assert time.monotonic() < deadline, "the daemon's background stands still"
            time.sleep(0.005)
        idle_start = Counts.of(self.status())
        before = Counts.of(self.status())
        found = Counting()
        yield found
        after = Counts.of(self.status())
        found.counts = (after - before) - (before - idle_start)

    def umount(self) -> None:
        """Unmount as a user does; the daemon must then end by itself with code 0."""
        done = subprocess.run(
            ["fusermount3", "-u", str(self.path)], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            held = "\n".join(holders(self.path))
            raise AssertionError(f"{done.stderr.strip()}; held by:\n{held}\n{self.log_tail()}")
        self.wait()

    def terminate(self) -> None:
        """SIGTERM, as systemd does; the daemon must unmount and end with code 0."""
        self.process.send_signal(signal.SIGTERM)
        self.wait()
        assert str(self.path) not in mounts_under(self.path), "the mount is still there after SIGTERM"

    def wait(self, code: int = 0) -> None:
        """Wait for the daemon's end and require its exit code."""
        try:
            found = self.process.wait(EXIT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER: where each thread stands
            self.process.wait()
            raise AssertionError(f"the daemon still ran {EXIT_DEADLINE_S:.0f} s later\n{self.log_tail()}") from None
        self._close()
        assert found == code, f"the daemon ended with {found}, not {code}\n{self.log_tail()}"

    def kill(self) -> None:
        """kill -9 and leave the dead mount as it is: what a crash leaves behind."""
        self.process.kill()
        self.process.wait()
        self._close()

    def destroy(self) -> None:
        """End the daemon and its mount by force."""
        for mountpoint in mounts_under(self.path):
            lazy_umount(mountpoint)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._close()

    def finish(self) -> None:
        """The teardown of every mount: a clean unmount, exit code 0, and a log without surprises."""
        try:
            if not self._ended:
                self.umount()
        finally:
            self.destroy()
        bad = self.unexpected_log()
        assert not bad, "the daemon's log holds what the test did not announce:\n" + "\n".join(bad[:20])

    def _close(self) -> None:
        self._ended = True
        if self.process.stdout is not None:
            self.process.stdout.close()


class MountFactory:
    """Starts mounts for one test or one module, and ends them all in the reverse order."""

    def __init__(self, suite_dir: Path, namespace: Namespace) -> None:
        self.namespace = namespace
        self.mounts: list[Mount] = []
        self._suite_dir = suite_dir
        self._dir = Path(tempfile.mkdtemp(prefix="m-", dir=suite_dir))
        self._dir.chmod(0o755)

    def __call__(
        self,
        *options: str,
        session: str | None = None,
        principal: str | None = None,
        namespace: Namespace | None = None,
        layout: str = "agent",
        path: Path | None = None,
        dsn: str | None = None,
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> Mount:
        """Mount and wait until it serves.

        Args:
            options: further options of the command, such as `--rw`.
            session, principal: for `--session` and `--as`.
            namespace: another agent than the factory's.
            layout: `agent`, `host` (`fusefs host`) or `all` (`--all`).
            path: where to mount; a fresh directory otherwise.
            dsn: another way to the same database, such as a proxy.
            env: added to the environment.
            wrapper: a command line to put in front, such as `setpriv`.
        """
        require_fuse()
        target = namespace or self.namespace
        n = len(self.mounts)
        where = path or self._dir / f"mnt{n}"
        command: list[str | Path] = [*wrapper, FUSEFS, "host" if layout == "host" else "mount", where, "--foreground"]
        if layout == "agent":
            command += ["--tenant", target.tenant, "--agent", target.agent]
        elif layout == "all":
            command.append("--all")
        if session is not None:
            command += ["--session", session]
        if principal is not None:
            command += ["--as", principal]
        full_env = {**command_environment(self._suite_dir, dsn or target.dsn), **(env or {})}
        mount = Mount(where, [*command, *options], full_env, self._dir / f"mnt{n}.log")
        self.mounts.append(mount)
        return mount

    def finish(self) -> None:
        """End every mount; the first failure is raised after all were ended."""
        with contextlib.ExitStack() as stack:
            for mount in self.mounts:
                stack.callback(mount.finish)
        if not mounts_under(self._dir):
            shutil.rmtree(self._dir)
