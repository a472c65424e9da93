"""The life of a mount as its surroundings see it: background, registry, status, umount, dead and frozen daemons."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from fusefs.cli import mountpoint, processes, registry
from fusefs.rules.errors import MountFailed
from tests import harness
from tests.doors.command import Fusefs
from tests.doors.test_cli_admin import put
from tests.mount.sides import eventually

pytestmark = pytest.mark.kernel
BOUND_S = 60


class Commands:
    """Runs `fusefs` as a process of its own, with its folders in the test's directory."""

    def __init__(self, folder: Path, suite_dir: Path, namespace: harness.Namespace) -> None:
        self.folder = folder
        self.namespace = namespace
        self.env = harness.command_environment(suite_dir, namespace.dsn)
        self.env |= {"HANGO_FS_RUNTIME_DIR": str(folder / "run"), "XDG_STATE_HOME": str(folder / "state")}

    def __call__(self, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [harness.FUSEFS, *args],
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )

    def ok(self, *args: str | Path, **env: str) -> str:
        done = self(*args, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, code: int, *args: str | Path, **env: str) -> str:
        done = self(*args, **env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert done.stderr.startswith("fusefs: ")
        assert "Traceback" not in done.stderr
        return done.stderr

    def mount(self, where: Path, *args: str, **env: str) -> str:
        return self.ok("mount", where, "--tenant", self.namespace.tenant, "--agent", self.namespace.agent, *args, **env)

    def status(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.ok("status", "--json"))
        return found


@pytest.fixture
def commands(
    suite_dir: Path, tmp_path_factory: pytest.TempPathFactory, namespace: harness.Namespace
) -> Iterator[Commands]:
    harness.require_fuse()
    folder = Path(tempfile.mkdtemp(dir=suite_dir))
    made = Commands(folder, suite_dir, namespace)
    yield made
    for one in made.status():
        made("umount", "--force", one["mountpoint"])
    assert harness.mounts_under(folder) == []


@pytest.fixture
def where(commands: Commands) -> Path:
    path = commands.folder / "mnt"
    path.mkdir()
    return path


def pid_of(commands: Commands) -> int:
    (one,) = commands.status()
    return int(one["pid"])


def test_mount_is_ready_when_the_command_returns(commands: Commands, where: Path) -> None:
    text = commands.mount(where, "--session", "s-1")
    of = f"tenant {commands.namespace.tenant}, agent {commands.namespace.agent}, session s-1"
    assert text == f"mounted {where} ({of})\n"
    (where / "a").write_text("x")
    (one,) = commands.status()
    assert one["state"] == "alive"
    assert one["mountpoint"] == str(where)
    assert one["session"] == "s-1"
    assert (one["tenant_id"], one["agent_id"]) == (commands.namespace.tenant_id, commands.namespace.agent_id)
    assert f"{where}  alive" in commands.ok("status")
    pid, started = one["pid"], one["process_start"]
    assert os.getsid(pid) == pid
    assert commands.ok("umount", where) == f"unmounted {where}\n"
    assert processes.start_time(pid) != started
    assert commands.status() == []
    assert commands.ok("status").splitlines()[0] == "no mounts"
    assert commands.namespace.execute("select content from agent_files where path = '/a'") == [("x",)]


def test_a_new_session_is_printed(commands: Commands, where: Path) -> None:
    text = commands.mount(where)
    (one,) = commands.status()
    assert f"session {one['session']})" in text
    assert one["session"].startswith("s-")


def test_the_record_is_private_and_whole(commands: Commands, where: Path) -> None:
    commands.mount(where)
    (file,) = (commands.folder / "run").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    record = json.loads(file.read_text())
    mount = processes.mount_at(str(where))
    assert mount is not None
    assert record["connection"] == mount.connection


def test_create_makes_tenant_and_agent(commands: Commands, where: Path) -> None:
    args = ("mount", where, "--tenant", "new-tenant", "--agent", "new-agent")
    assert "there is no tenant new-tenant" in commands.fails(3, *args)
    commands.ok(*args, "--create")
    assert sorted(os.listdir(where)) == ["memories", "skills"]
    commands.ok("umount", where)
    commands.ok(*args, "--create")


def test_a_password_is_in_no_command_line_log_or_record(commands: Commands, where: Path) -> None:
    dsn = make_conninfo(commands.namespace.dsn, password="hunter2")
    commands.mount(where, "--dsn", dsn)
    pid = pid_of(commands)
    assert b"--foreground" in Path(f"/proc/{pid}/cmdline").read_bytes()
    texts = [Path(f"/proc/{pid}/cmdline").read_text(), commands.ok("status", "--json")]
    texts += [path.read_text() for folder in ("run", "state") for path in (commands.folder / folder).rglob("*.*")]
    assert not any("hunter2" in text for text in texts)
    assert "hunter2" in Path(f"/proc/{pid}/environ").read_text()


@pytest.mark.parametrize("option", ["--dsn", "--listen-dsn"])
def test_a_password_on_the_command_line_of_the_foreground_is_hidden(
    commands: Commands, where: Path, option: str
) -> None:
    dsn = make_conninfo(commands.namespace.dsn, password="hunter2")
    with foreground(commands, where, option, dsn) as (process, ready):
        assert ready["pid"] == process.pid
        assert b"hunter2" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


@contextmanager
def foreground(
    commands: Commands, where: Path, *args: str, **env: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A mount in the foreground, from its ready line to SIGTERM."""
    names = ("--tenant", commands.namespace.tenant, "--agent", commands.namespace.agent)
    process = subprocess.Popen(
        [harness.FUSEFS, "mount", where, *names, "--foreground", *args],
        env=commands.env | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0


def test_foreground_prints_its_ready_line_and_ends_on_sigterm(commands: Commands, where: Path) -> None:
    with foreground(commands, where) as (process, ready):
        assert ready["event"] == "ready"
        assert ready["mountpoint"] == str(where)
        assert ready["tenant_id"] == commands.namespace.tenant_id
        assert ready["agent_id"] == commands.namespace.agent_id
        assert pid_of(commands) == process.pid
    assert commands.status() == []


def test_systemd_is_told(commands: Commands, where: Path) -> None:
    address = str(commands.folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(BOUND_S)
        with foreground(commands, where, NOTIFY_SOCKET=address):
            assert manager.recv(100) == b"READY=1"
        assert manager.recv(100) == b"STOPPING=1"


# What is wrong before a mount


def test_the_daemons_error_and_exit_code_are_relayed(commands: Commands, where: Path) -> None:
    args = ("mount", where, "--tenant", commands.namespace.tenant, "--agent")
    text = commands.fails(3, *args, "nope")
    assert text.splitlines()[0] == "fusefs: there is no agent nope"
    assert text.splitlines()[1].startswith("hint: ")
    text = commands.fails(11, *args, "x", "--dsn", "postgresql://u:hunter2@127.0.0.1:1/x")
    assert "does not answer" in text
    assert "hunter2" not in text
    assert commands.status() == []


def test_a_database_without_the_schema(commands: Commands, where: Path, pg_server: harness.PostgresServer) -> None:
    dsn = pg_server.create_database("test_cli_empty")
    try:
        text = commands.fails(13, "mount", where, "--tenant", "a", "--agent", "b", "--dsn", dsn)
        assert "holds no schema of fusefs" in text
        assert "hint: Run `fusefs init`." in text
    finally:
        pg_server.drop_database("test_cli_empty")


def test_mount_points_that_cannot_be_used(commands: Commands, where: Path) -> None:
    args = ("--tenant", commands.namespace.tenant, "--agent", commands.namespace.agent)
    (where / "file").write_text("x")
    assert "is not empty" in commands.fails(14, "mount", where, *args)
    assert "is not a directory" in commands.fails(14, "mount", where / "file", *args)
    assert "mkdir -p" in commands.fails(14, "mount", where / "none", *args)
    assert (where / "file").read_text() == "x"


def test_options_that_do_not_go_together(commands: Commands, where: Path) -> None:
    assert "no tenant was named" in commands.fails(10, "mount", where)
    assert "--session needs --agent" in commands.fails(10, "mount", where, "--tenant", "x", "--session", "s")
    assert "--all and --agent" in commands.fails(2, "mount", where, "--all", "--agent", "x")
    assert "for administrators" in commands.fails(2, "mount", where, "--all", "--as", "agent")


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MountFailed, match="fusermount3 is missing") as caught:
        mountpoint.prepare(str(tmp_path))
    assert "apt install fuse3" in caught.value.given_hint
    monkeypatch.setattr(mountpoint, "FUSE_DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(MountFailed, match="is missing") as caught:
        mountpoint.prepare(str(tmp_path))
    assert "modprobe fuse" in caught.value.given_hint


def test_a_directory_that_is_mounted_already(commands: Commands, where: Path) -> None:
    commands.mount(where)
    pid = pid_of(commands)
    args = ("--tenant", commands.namespace.tenant, "--agent", commands.namespace.agent)
    assert f"already by pid {pid}" in commands.fails(14, "mount", where, *args)
    link = commands.folder / "link"
    link.symlink_to(commands.folder)
    assert f"already by pid {pid}" in commands.fails(14, "mount", link / "mnt", *args)
    assert pid_of(commands) == pid


def test_two_at_once_do_not_stack(commands: Commands, where: Path) -> None:
    names = ("--tenant", commands.namespace.tenant, "--agent", commands.namespace.agent)
    started = [
        subprocess.Popen([harness.FUSEFS, "mount", where, *names], env=commands.env, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    codes = []
    for process in started:
        process.communicate(timeout=BOUND_S)
        codes.append(process.returncode)
    assert sorted(codes) == [0, 14]
    assert len([mount for mount in processes.mounts() if mount.mountpoint == str(where)]) == 1


def test_an_interrupt_ends_the_command_and_its_daemon(commands: Commands, where: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(BOUND_S)
        dsn = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x"
        names = ("--tenant", "a", "--agent", "b", "--dsn", dsn)
        command = subprocess.Popen([harness.FUSEFS, "mount", where, *names], env=commands.env, stderr=subprocess.PIPE)
        connection, _ = silent.accept()  # the daemon is there, and waits for Postgres
        (daemon,) = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        handle = os.pidfd_open(int(daemon))
        command.send_signal(signal.SIGINT)
        _, stderr = command.communicate(timeout=BOUND_S)
        assert (command.returncode, stderr.strip()) == (130, b"")
        ended, _, _ = select.select([handle], [], [], BOUND_S)
        assert ended, "the daemon still runs"
        os.close(handle)
        connection.close()


# Unmounting, and what a dead or frozen daemon leaves behind


def test_umount_of_nothing(commands: Commands, where: Path) -> None:
    assert "nothing of fusefs is mounted" in commands.fails(14, "umount", where)
    commands.ok("umount", "--force", where)


def test_umount_names_who_holds_the_mount(commands: Commands, where: Path) -> None:
    commands.mount(where)
    with subprocess.Popen(["sleep", "600"], cwd=where) as holder:
        try:
            text = commands.fails(14, "umount", where)
        finally:
            holder.kill()
    assert f"is busy: in use by {holder.pid} (sleep)" in text
    commands.ok("umount", where)


def test_force_ends_a_busy_mount(commands: Commands, where: Path) -> None:
    commands.mount(where)
    pid = pid_of(commands)
    with subprocess.Popen(["sleep", "600"], cwd=where) as holder:
        commands.ok("umount", "--force", where)
        holder.kill()
    assert processes.start_time(pid) is None
    assert processes.mount_at(str(where)) is None
    assert commands.status() == []


def test_a_killed_daemon_is_dead_and_its_place_is_used_again(commands: Commands, where: Path) -> None:
    commands.mount(where)
    (where / "a").write_text("kept")
    pid = pid_of(commands)
    kill(pid)
    assert [one["state"] for one in commands.status()] == ["dead"]
    commands.mount(where)
    assert [one["state"] for one in commands.status()] == ["alive"]
    assert pid_of(commands) != pid
    assert (where / "a").read_text() == "kept"
    kill(pid_of(commands))
    commands.ok("umount", where)
    assert commands.status() == []


def kill(pid: int) -> None:
    started = processes.start_time(pid)
    assert started is not None
    os.kill(pid, signal.SIGKILL)
    assert processes.wait_gone(pid, started, BOUND_S)


def test_a_frozen_daemon_hangs_nobody_and_its_place_is_used_again(commands: Commands, where: Path) -> None:
    commands.mount(where)
    pid = pid_of(commands)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert [one["state"] for one in commands.status()] == ["frozen"]
        commands.mount(where)
    finally:
        if processes.start_time(pid) is not None:
            os.kill(pid, signal.SIGCONT)
    assert [one["state"] for one in commands.status()] == ["alive"]
    assert pid_of(commands) != pid
    os.kill(pid_of(commands), signal.SIGSTOP)
    commands.ok("umount", "--force", where)
    assert commands.status() == []


def test_force_frees_who_waits_for_a_frozen_daemon(commands: Commands, where: Path) -> None:
    commands.mount(where)
    pid = pid_of(commands)
    os.kill(pid, signal.SIGSTOP)
    # No look-up of that name is in the kernel's cache: it must wait for the daemon.
    with subprocess.Popen(["cat", where / "never-looked-up"], stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        blocked, _, _ = select.select([waiting.stderr], [], [], 0.5)
        assert not blocked
        commands.ok("umount", "--force", where)
        assert waiting.wait(BOUND_S) == 1
        assert "No such file" not in waiting.stderr.read()
    assert commands.status() == []


def test_paths_in_a_host_mount_and_in_one_of_everything(commands: Commands, where: Path) -> None:
    namespace = commands.namespace
    put(namespace, "/a", "x")
    commands.ok("host", where)
    session = where / namespace.tenant / namespace.agent / "s-1"
    session.mkdir()
    assert commands.ok("versions", session / "a", "--version", "1") == "x"
    assert [one["layout"] for one in commands.status()] == ["host"]
    commands.ok("umount", where)
    commands.ok("mount", where, "--all")
    file = where / namespace.tenant / namespace.agent / "a"
    assert commands.ok("versions", file, "--version", "1") == "x"
    with pytest.raises(OSError, match="Read-only"):
        file.write_text("y")
    commands.ok("umount", where)
    commands.ok("mount", where, "--tenant", namespace.tenant, "--rw")
    file = where / namespace.tenant / namespace.agent / "a"
    assert os.listdir(where) == [namespace.tenant]
    file.write_text("y")
    assert commands.ok("versions", file, "--version", "2") == "y"


def test_restore_in_a_mount_is_recorded_as_its_sessions(commands: Commands, where: Path) -> None:
    commands.mount(where, "--session", "s-1")
    (where / "a").write_text("one")
    (where / "a").write_text("two")
    assert "is at version 3 now" in commands.ok("restore", where / "a", "--version", "1")
    eventually(lambda: (where / "a").read_text() == "one", "the restored content")
    (where / "a").write_text("three")
    found = json.loads(commands.ok("versions", where / "a", "--json"))
    assert [(one["version"], one["op"], one["principal"], one["session"]) for one in found[:2]] == [
        (4, "write", "agent", "s-1"),
        (3, "restore", "owner", "s-1"),
    ]


def test_a_read_that_never_ends_is_given_up(commands: Commands, where: Path) -> None:
    commands.mount(where)
    pid = pid_of(commands)
    assert processes.read_with_timeout(f"{where}/.fusefs/status", BOUND_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(processes.NoAnswer):
            processes.read_with_timeout(f"{where}/.fusefs/status", 0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(FileNotFoundError):
        processes.read_with_timeout(f"{where}/none", BOUND_S)


def test_a_reused_pid_is_not_taken_for_the_daemon(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    own = processes.start_time(os.getpid())
    assert own is not None
    record = registry.Record(
        *(str(tmp_path), os.getpid(), own - 1, 0, "agent", "t", "a", None, None, "s", "", "2026-01-01T00:00:00", "")
    )
    registry.write(record)
    assert not record.alive
    assert [one["state"] for one in bare_fusefs("status", "--json").json] == ["dead"]
    registry.remove(record)
    assert registry.all_records() == []


def test_records_that_others_could_have_written_are_not_read(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    record = registry.Record(
        *(str(tmp_path), 1, 1, 0, "agent", "t", "a", None, None, "s", "", "2026-01-01T00:00:00", "")
    )
    registry.write(record)
    (file,) = registry.directory().glob("*.json")
    file.chmod(0o666)
    assert registry.all_records() == []
    file.chmod(0o600)
    assert registry.all_records() == [record]
    file.write_text("{}")
    assert registry.all_records() == []
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert registry.all_records() == []


def test_an_agent_that_is_mounted_is_not_removed(commands: Commands, where: Path) -> None:
    commands.mount(where)
    args = ("agent", "remove", commands.namespace.agent, "--tenant", commands.namespace.tenant, "--yes")
    assert f"is mounted on {where}" in commands.fails(14, *args)
    commands.ok("umount", where)
    commands.ok(*args)
