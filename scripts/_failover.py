"""Fail over a replicated Postgres under a mount that is being written to, and count what is lost.

Two servers in a directory of their own, one following the other; a real daemon whose DSN names both with
target_session_attrs=read-write; four writers that append numbered lines, one that replaces a file, one that makes new
files. The primary is killed, the standby becomes the primary, the writers go on. Then every line, version and file
that a close() acknowledged is looked for in the new primary, and the mount is compared with it.

With --by hand the standby is promoted with `pg_ctl promote`; with --by patroni Patroni does it, over etcd (Debian
packages patroni and etcd-server). Everything runs on the loopback and is removed at the end.

The exit code is 1 when a line is there twice, and with --mode sync also when something acknowledged is missing or the
mount shows anything else than Postgres has. What --mode async loses is printed: it may lose.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from fusefs.db import embedded, migrate

FUSEFS = Path(sys.executable).with_name("fusefs")
SETTINGS = "wal_level = replica\nmax_wal_senders = 10\nhot_standby = on\nwal_keep_size = 256MB\nshared_buffers = 64MB\n"
LOSSES = ("acknowledged lines missing", "acknowledged files missing", "replacements lost at the end")
BOUND_S = 120.0
"""After which whatever is waited for counts as failed."""


def eventually(condition: Callable[[], Any], what: str, bound_s: float = BOUND_S) -> Any:
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise SystemExit(f"not within {bound_s:.0f} s: {what}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


class Processes:
    """What was started, as the account that runs Postgres; ended by `end`, the newest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.account = embedded._account()
        folder.chmod(0o755)
        self.binaries = embedded._binaries(folder, self.account)
        self._started: list[subprocess.Popen[bytes]] = []

    def _identity(self) -> dict[str, Any]:
        if self.account.uid is None:
            return {}
        return {"user": self.account.uid, "group": self.account.gid, "extra_groups": []}

    def own_folder(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir(mode=0o700)
        if self.account.uid is not None and self.account.gid is not None:
            os.chown(made, self.account.uid, self.account.gid)
        return made

    def run(self, program: str, *args: object) -> None:
        """A program of Postgres. Its output goes to a file: a server that it starts would hold a pipe open."""
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [self.binaries / program, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                check=False,
                timeout=BOUND_S,
                **self._identity(),
            )
            output.seek(0)
            if done.returncode:
                raise SystemExit(f"{program} failed:\n{output.read()}")

    def start(self, name: str, *command: object, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": f"{self.binaries}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", **(env or {})},
                **self._identity(),
            )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


# -- Two servers -------------------------------------------------------------------------------------------


class ByHand:
    """A primary and a standby, and the standby is promoted by a person."""

    def __init__(self, processes: Processes, synchronous: bool) -> None:
        self.processes = processes
        self.synchronous = synchronous
        self.ports = free_ports(2)
        self.data = [processes.folder / "one", processes.folder / "two"]
        self._servers: list[subprocess.Popen[bytes]] = []

    def dsn(self, index: int, database: str = "fusefs") -> str:
        return make_conninfo("", host="127.0.0.1", port=self.ports[index], user="postgres", dbname=database)

    def _start(self, index: int) -> None:
        # In the foreground, so that the process is a child of ours and can be ended for certain.
        self._servers.append(
            self.processes.start(
                self.data[index].name,
                self.processes.binaries / "postgres",
                *("-D", self.data[index], "-p", self.ports[index], "-k", self.data[index]),
                *("-c", "listen_addresses=127.0.0.1"),
            )
        )
        eventually(lambda: answers(self.dsn(index, "postgres")), f"server {index} answers")

    def start(self) -> None:
        run = self.processes.run
        for data in self.data:
            self.processes.own_folder(data.name)
        run("initdb", "-D", self.data[0], "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C")
        with open(self.data[0] / "postgresql.conf", "a") as conf:
            conf.write(SETTINGS)
        self._start(0)
        follow = make_conninfo(self.dsn(0, "replication"), application_name="two")
        run("pg_basebackup", "-D", self.data[1], "-d", follow, "-R", "-X", "stream", "-c", "fast")
        self._start(1)
        if self.synchronous:
            execute(self.dsn(0, "postgres"), "alter system set synchronous_standby_names = 'two'")
            execute(self.dsn(0, "postgres"), "select pg_reload_conf()")
        state = "sync" if self.synchronous else "async"
        eventually(
            lambda: execute(self.dsn(0, "postgres"), "select sync_state from pg_stat_replication") == [(state,)],
            f"the standby follows ({state})",
        )

    def cut_off(self) -> None:
        """The line between the two breaks; nobody else notices."""
        execute(self.dsn(1, "postgres"), "alter system set primary_conninfo = 'host=127.0.0.1 port=1'")
        execute(self.dsn(1, "postgres"), "select pg_reload_conf()")
        eventually(
            lambda: execute(self.dsn(0, "postgres"), "select 1 from pg_stat_replication") == [], "the line is cut"
        )

    def kill(self) -> None:
        self._servers[0].send_signal(signal.SIGQUIT)
        self._servers[0].wait()

    def promote(self) -> int:
        """Returns the index of the new primary."""
        self.processes.run("pg_ctl", "promote", "-w", "-D", self.data[1])
        return 1


class ByPatroni:
    """Two nodes of Patroni over one etcd. What it finds out, and when, is its own affair."""

    def __init__(self, processes: Processes, synchronous: bool) -> None:
        self.processes = processes
        self.synchronous = synchronous
        self.ports = free_ports(6)
        self._nodes: list[subprocess.Popen[bytes]] = []
        for program in ("patroni", "etcd"):
            if shutil.which(program) is None:
                raise SystemExit(f"{program} is not installed (Debian packages patroni, etcd-server)")

    def dsn(self, index: int, database: str = "fusefs") -> str:
        return make_conninfo("", host="127.0.0.1", port=self.ports[index], user="postgres", dbname=database)

    def start(self) -> None:
        client, peer = self.ports[4:6]
        etcd = self.processes.own_folder("etcd")
        url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self.processes.start(
            "etcd-server",
            *("/usr/bin/etcd", "--data-dir", etcd, "--name", "one", "--listen-client-urls", url),
            *("--advertise-client-urls", url, "--listen-peer-urls", peer_url),
            *("--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"one={peer_url}"),
        )
        eventually(lambda: self._get(f"{url}/health"), "etcd answers")
        for index, name in enumerate(("one", "two")):
            self._start_node(index, name, client)
            eventually(lambda index=index: self._state(index) == "running", f"node {name} runs")  # type: ignore[misc]
        eventually(self._replicates, "the standby follows")

    def _start_node(self, index: int, name: str, etcd_port: int) -> None:
        folder = self.processes.own_folder(name)
        port, rest = self.ports[index], self.ports[2 + index]
        config = {
            "scope": "files",
            "name": name,
            "restapi": {"listen": f"127.0.0.1:{rest}", "connect_address": f"127.0.0.1:{rest}"},
            "etcd3": {"hosts": f"127.0.0.1:{etcd_port}"},
            "bootstrap": {
                "dcs": {
                    "ttl": 20,
                    "loop_wait": 5,
                    "retry_timeout": 5,
                    "maximum_lag_on_failover": 1 << 30,
                    "synchronous_mode": self.synchronous,
                    "postgresql": {"use_pg_rewind": False, "parameters": {"wal_keep_size": "256MB"}},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{port}",
                "connect_address": f"127.0.0.1:{port}",
                "data_dir": str(folder / "data"),
                "bin_dir": str(self.processes.binaries),
                "pgpass": str(folder / "pgpass"),
                "pg_hba": [
                    "local all all trust",
                    "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
                "authentication": {
                    "superuser": {"username": "postgres", "password": "of-no-use"},
                    "replication": {"username": "replicator", "password": "of-no-use"},
                },
                "parameters": {"unix_socket_directories": str(folder), "shared_buffers": "64MB"},
            },
        }
        path = folder / "patroni.yml"  # JSON is YAML
        path.write_text(json.dumps(config))
        path.chmod(0o644)
        self._nodes.append(self.processes.start(f"patroni-{name}", "/usr/bin/patroni", path))

    def _get(self, url: str) -> bytes:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bytes(answer.read())
        except (urllib.error.URLError, OSError) as exc:
            return exc.read() if isinstance(exc, urllib.error.HTTPError) else b""

    def _node(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get(f"http://127.0.0.1:{self.ports[2 + index]}/patroni") or b"{}")
        return found

    def _state(self, index: int) -> str:
        assert self._nodes[index].poll() is None, "Patroni has ended"
        return str(self._node(index).get("state"))

    def _replicates(self) -> bool:
        state = "sync" if self.synchronous else "async"
        return any(one.get("sync_state") == state for one in self._node(0).get("replication", []))

    def cut_off(self) -> None:
        raise SystemExit("--cut goes with --by hand: Patroni would repair the line")

    def kill(self) -> None:
        """The machine of the primary is gone: Patroni and Postgres at once."""
        postmaster = int((self.processes.folder / "one" / "data" / "postmaster.pid").read_text().split()[0])
        self._nodes[0].kill()
        os.kill(postmaster, signal.SIGQUIT)
        self._nodes[0].wait()

    def promote(self) -> int:
        eventually(
            lambda: (
                answers(self.dsn(1, "postgres"))
                and execute(self.dsn(1, "postgres"), "select pg_is_in_recovery()") == [(False,)]
            ),
            "Patroni promotes the standby",
        )
        return 1


def answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def execute(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as conn:
        cursor = conn.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


# -- Writers -----------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Does one numbered thing after the other until told to stop; knows which of them were acknowledged."""

    path: Path
    write: Callable[[Path, int], None]
    acknowledged: list[int] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    longest_s: float = 0.0

    def run(self, stop: threading.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            began = time.monotonic()
            try:
                self.write(self.path, number)
            except OSError as exc:
                self.refused.append((number, exc.errno or 0))
            else:
                self.acknowledged.append(number)
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def _put(path: Path, flags: int, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def append(path: Path, number: int) -> None:
    _put(path, os.O_APPEND, f"{number}\n")


def replace(path: Path, number: int) -> None:
    path.read_bytes()  # what others did is seen: a lost version is no conflict
    _put(path, os.O_TRUNC, f"{number}\n")


def make(path: Path, number: int) -> None:
    _put(path / str(number), os.O_CREAT | os.O_EXCL, f"{number}\n")


# -- One failover ------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def mounted(folder: Path, dsn: str, write_timeout_s: float) -> Iterator[Path]:
    where = folder / "mnt"
    where.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HANGO_", "PG", "XDG_"))}
    env |= {"HANGO_FS_DSN": dsn, "HANGO_FS_CONFIG": "/dev/null", "HANGO_FS_MAX_FILE_BYTES": str(16 << 20)}
    env |= {"HANGO_FS_RUNTIME_DIR": str(folder / "run"), "HANGO_FS_RESCUE_DIR": str(folder / "rescue")}
    command = [
        str(FUSEFS),
        "mount",
        str(where),
        "--foreground",
        "--tenant",
        "t",
        "--agent",
        "a",
        "--session",
        "s",
        "--create",
    ]
    with (folder / "mount.log").open("wb") as log:
        daemon = subprocess.Popen(
            [*command, "--write-timeout", str(write_timeout_s)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
        )
    try:
        assert daemon.stdout is not None
        if not daemon.stdout.readline():
            raise SystemExit((folder / "mount.log").read_text())
        yield where
    finally:
        if daemon.poll() is None:
            daemon.terminate()
            try:
                daemon.wait(write_timeout_s + 30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        subprocess.run(["fusermount3", "-uzq", where], check=False)


def fail_over(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    processes = Processes(folder)
    try:
        servers = (ByHand if options.by == "hand" else ByPatroni)(processes, options.mode == "sync")
        say(f"starting two servers ({options.by}, {options.mode})")
        servers.start()
        execute(servers.dsn(0, "postgres"), "create database fusefs")
        migrate.up(servers.dsn(0))
        port = ",".join(str(port) for port in servers.ports[:2])
        both = make_conninfo(
            "",
            host="127.0.0.1,127.0.0.1",
            port=port,
            user="postgres",
            dbname="fusefs",
            target_session_attrs="read-write",
        )
        with mounted(folder, both, options.write_timeout) as where:
            return _under_load(where, servers, options)
    finally:
        processes.end()


def _under_load(where: Path, servers: ByHand | ByPatroni, options: argparse.Namespace) -> dict[str, Any]:
    (where / "made").mkdir()
    logs = [Writer(where / f"log{number}", append) for number in range(4)]
    replacer, maker = Writer(where / "whole", replace), Writer(where / "made", make)
    for writer in (*logs, replacer):
        writer.path.touch()
    writers = [*logs, replacer, maker]
    stop = threading.Event()
    threads = [threading.Thread(target=writer.run, args=(stop,)) for writer in writers]
    say("the writers begin")
    for thread in threads:
        thread.start()
    time.sleep(options.seconds)  # the load before
    if options.cut:
        say(f"the line between the servers breaks, {options.cut} s before the primary does")
        servers.cut_off()
        time.sleep(options.cut)  # the fault
    before = sum(len(writer.acknowledged) for writer in writers)
    say(f"the primary is killed after {before} acknowledged changes")
    servers.kill()
    began = time.monotonic()
    index = servers.promote()
    promoted_s = time.monotonic() - began
    say(f"there is a primary again after {promoted_s:.1f} s")
    at_promotion = [len(writer.acknowledged) for writer in writers]
    try:
        eventually(
            lambda: all(len(writer.acknowledged) > count for writer, count in zip(writers, at_promotion, strict=True)),
            "every writer goes on",
            options.write_timeout + 10,
        )
    except SystemExit as error:
        say(str(error))
    time.sleep(options.seconds)  # the load after
    stop.set()
    for thread in threads:
        thread.join(BOUND_S)
    new = servers.dsn(index)
    stored = dict(execute(new, "select path, content from agent_files where kind = 'file'"))
    missing = doubled = unacknowledged = 0
    for writer in logs:
        lines = Counter(int(line) for line in stored[f"/{writer.path.name}"].split())
        missing += len(set(writer.acknowledged) - lines.keys())
        doubled += sum(count > 1 for count in lines.values())
        unacknowledged += len(lines.keys() - set(writer.acknowledged))
    made = {int(path.rpartition("/")[2]) for path in stored if path.startswith("/made/")}
    lost_files = len(set(maker.acknowledged) - made)
    newest = int(stored["/whole"] or 0)
    differs = _differences(where, stored, writers)
    refusals = Counter(f"{each.write.__name__}: {os.strerror(code)}" for each in writers for _, code in each.refused)
    return {
        "by": options.by,
        "replication": options.mode,
        "cut before the crash, s": options.cut,
        "primary away, s": round(promoted_s, 1),
        "longest call, s": round(max(writer.longest_s for writer in writers), 1),
        "acknowledged": sum(len(writer.acknowledged) for writer in writers),
        "refused": dict(refusals),
        "acknowledged lines missing": missing,
        "lines doubled": doubled,
        "unacknowledged lines there": unacknowledged,
        "acknowledged files missing": lost_files,
        "replacements lost at the end": max(0, (replacer.acknowledged or [0])[-1] - newest),
        "mount differs from Postgres at": differs,
    }


def _differences(where: Path, stored: dict[str, str], writers: list[Writer]) -> list[str]:
    """Where the mount does not show what Postgres has. Announcements have their time to arrive."""
    found: list[str] = []

    def look() -> bool:
        found.clear()
        for path, text in stored.items():
            try:
                if (where / path[1:]).read_text() != text:
                    found.append(path)
            except OSError as exc:
                found.append(f"{path} ({exc.strerror})")
        made = {f"/made/{name}" for name in os.listdir(where / "made")}
        found.extend(f"{path} (not stored)" for path in made - stored.keys())
        for writer in writers[:-1]:
            if writer.refused and writer.refused[-1][0] > (writer.acknowledged or [0])[-1]:
                found.append(f"/{writer.path.name} (refuses: {os.strerror(writer.refused[-1][1])})")
        return not found

    with contextlib.suppress(SystemExit):
        eventually(look, "the mount shows what Postgres has", 10)
    return found[:10]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="try-failover", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--by", choices=["hand", "patroni"], default="hand", help="who promotes the standby")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync", help="how the standby follows")
    parser.add_argument(
        "--cut",
        type=float,
        default=0,
        metavar="S",
        help="break the line between the servers S seconds before the crash",
    )
    parser.add_argument("--seconds", type=float, default=3, metavar="S", help="load before and after the failover")
    parser.add_argument("--write-timeout", type=float, default=60, metavar="S", help="of the mount")
    parser.add_argument("--keep", action="store_true", help="leave the directory with the logs")
    options = parser.parse_args()
    if options.by == "patroni" and options.cut:
        parser.error("--cut goes with --by hand: Patroni would repair the line")
    folder = Path(tempfile.mkdtemp(prefix="fusefs-failover-", dir="/tmp"))
    try:
        result = fail_over(folder, options)
    finally:
        if options.keep:
            say(f"logs are in {folder}")
        elif not os.path.ismount(folder / "mnt"):
            shutil.rmtree(folder, ignore_errors=True)
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:{width}}  {value if value not in ({}, []) else '-'}")
    lost = sum(value for name, value in result.items() if name in LOSSES)
    if result["lines doubled"] or (options.mode == "sync" and (lost or result["mount differs from Postgres at"])):
        sys.exit(1)


if __name__ == "__main__":
    main()
