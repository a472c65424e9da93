"""Commands and the trees of processes that they start: what ends them, and that nothing is left.

A script prints a line `NAME PID` for each process to be watched; only when all are there is anything done to it. When
`run_tree` returns everything has been reaped, so nothing here waits for a process to go away.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from trio import MemorySendChannel

from fusefs.services.processes import Ended, Patience, run_tree, without_database
from tests.harness import process_start

LONG_S = 60.0
"""Longer than any test may take: a limit that must not be reached."""

BRIEF_S = 0.1


@dataclass
class Run:
    """One command, and what came of it."""

    ended: Ended = field(default_factory=lambda: Ended(-1))
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    @property
    def pids(self) -> dict[str, int]:
        """The processes that told of themselves."""
        lines = [line.split() for line in self.stdout.decode().splitlines(keepends=True) if line.endswith("\n")]
        return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}

    @property
    def alive(self) -> dict[str, int]:
        return {name: pid for name, pid in self.pids.items() if process_start(pid) is not None}


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that is not ours to reap."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], LONG_S)[0])
    finally:
        os.close(handle)


def patient(timeout_s: float = LONG_S, grace_s: float = LONG_S, linger_s: float = LONG_S) -> Patience:
    return Patience(timeout_s, grace_s, linger_s)


async def run(
    *command: str,
    patience: Patience,
    parts: int = 0,
    when_there: Callable[[MemorySendChannel[int], dict[str, int]], object] | None = None,
    directory: str = "/",
    stdin: bytes = b"",
    environment: dict[str, str] | None = None,
) -> Run:
    """Run a command; once so many of its processes have told of themselves, do something to it.

    Args:
        when_there: is given the channel for signals, and the processes.
    """
    result = Run()
    sender, signals = trio.open_memory_channel[int](4)
    waiting = parts

    def on_stdout(data: bytes) -> None:
        nonlocal waiting
        result.stdout += data
        if waiting and when_there is not None and len(result.pids) == waiting:
            waiting = 0
            when_there(sender, result.pids)

    result.ended = await run_tree(
        command,
        directory=directory,
        environment=dict(os.environ) if environment is None else environment,
        patience=patience,
        on_stdout=on_stdout,
        on_stderr=result.stderr.extend,
        stdin=stdin,
        signals=signals,
    )
    return result


async def shell(script: str, **options: object) -> Run:
    return await run("bash", "-c", script, **options)  # type: ignore[arg-type]


# The end of a command


@pytest.mark.parametrize(
    ("script", "code", "by_signal"),
    [
        ("true", 0, None),
        ("exit 3", 3, None),
        ("kill -KILL $$", 137, signal.SIGKILL),
        ("kill -TERM $$", 143, signal.SIGTERM),
        ("yes | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}", 141, None),
        ("cat; test $? -eq 0", 0, None),
        ("read line; exit $?", 1, None),
        ("exec </dev/tty", 1, None),
    ],
)
async def test_a_command_that_ends_by_itself(script: str, code: int, by_signal: int | None) -> None:
    result = await shell(script, patience=patient())
    assert result.ended == Ended(code, by_signal)


async def test_output_is_complete_and_apart() -> None:
    result = await shell("seq 1 200000; seq 1 100000 >&2", patience=patient())
    assert result.stdout == b"".join(b"%d\n" % number for number in range(1, 200001))
    assert result.stderr == b"".join(b"%d\n" % number for number in range(1, 100001))


async def test_what_was_printed_while_we_were_busy_is_not_lost(tmp_path: Path) -> None:
    """More than one read takes, and all of it before the end of the supervisor is heard of."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = (
        "import fcntl, os, sys\n"
        "fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)\n"
        "os.write(1, b'%d\\n' % os.getppid())\n"
        "open(sys.argv[1]).read()\n"
        "os.write(1, b'x' * 500000)\n"
    )
    output = bytearray()

    def on_stdout(data: bytes) -> None:
        if not output:
            fifo.write_text("go on")
            assert has_ended(int(data))
        output.extend(data)

    await run_tree(
        [sys.executable, "-c", script, str(fifo)],
        directory="/",
        environment=dict(os.environ),
        patience=patient(),
        on_stdout=on_stdout,
        on_stderr=len,
    )
    assert output.count(b"x") == 500_000


async def test_stdin_directory_and_environment(tmp_path: Path) -> None:
    result = await shell(
        'cat; pwd; echo "$WORD"; env | grep -c ^HOME=',
        patience=patient(),
        stdin=b"given\n" * 20000,
        directory=str(tmp_path),
        environment={"PATH": os.environ["PATH"], "WORD": "said"},
    )
    assert result.stdout == b"given\n" * 20000 + f"{tmp_path}\nsaid\n0\n".encode()


async def test_a_command_inherits_no_descriptor_and_no_signal_disposition() -> None:
    script = (
        'ls /proc/self/fd | wc -l; grep -E "^Sig(Blk|Ign)" /proc/self/status; '
        'ps -o sid= -p $$,$PPID | tr -d " "; echo $$ $PPID'
    )
    result = await shell(script, patience=patient())
    count, blocked, ignored, *sessions, own = result.stdout.decode().splitlines()
    assert count == "4"  # 0, 1, 2, and the directory that ls reads
    # Bits 31 and 32 are the C library's own; posix_spawn(3) sets them.
    assert (int(blocked.split()[1], 16) | int(ignored.split()[1], 16)) & 0x7FFFFFFF == 0
    assert set(sessions) == set(own.split())  # each leads its own


@pytest.mark.parametrize(
    ("command", "code", "why"),
    [
        ("/nowhere/at/all", 127, "/nowhere/at/all: cannot be run: No such file or directory"),
        ("no-such-command", 127, "no-such-command: command not found"),
        ("odd\udcff\n", 127, "odd�␊: command not found"),
        ("/etc/passwd", 126, "/etc/passwd: cannot be run: Permission denied"),
        ("/", 126, "/: cannot be run: Permission denied"),
        ("./bare", 126, "./bare: cannot be run: Exec format error"),
        ("nul\0", 126, "nul␀: cannot be run: NUL or half a character in it"),
        ("\ud800", 126, "���: cannot be run: NUL or half a character in it"),
        ("", 127, "no command was given"),
    ],
)
async def test_a_command_that_cannot_be_run(tmp_path: Path, command: str, code: int, why: str) -> None:
    (tmp_path / "bare").write_text("no program")
    (tmp_path / "bare").chmod(0o755)
    result = await run(command, patience=patient(), directory=str(tmp_path))
    assert result.ended == Ended(code, failure=why)


async def test_arguments_that_cannot_be_passed() -> None:
    result = await run("echo", "x" * 200_000, patience=patient())
    assert result.ended == Ended(126, failure="echo: cannot be run: Argument list too long")
    result = await run("echo", "a\0b", patience=patient())
    assert result.ended == Ended(126, failure="echo: cannot be run: NUL or half a character in it")


async def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    result = await run("true", patience=patient(), directory=gone)
    assert result.ended == Ended(126, failure=f"{gone}: cannot run there: No such file or directory")


# The end of a tree

PARTS = {
    "child": "sleep 1000 & echo child $!",
    "pipe": "sleep 1000 | cat & echo pipe $!",
    "grandchild": "bash -c 'sleep 1000 & echo grandchild $!; wait' &",
    "orphan": "(sleep 1000 & echo orphan $!)",
    "group": "set -m; sleep 1000 & echo group $!; set +m",
    "session": "setsid bash -c 'echo session $$; exec sleep 1000' &",
    "daemon": "setsid bash -c 'setsid bash -c \"echo daemon \\$\\$; exec sleep 1000\" & exit'",
    "deaf": "bash -c 'trap \"\" TERM INT HUP; echo deaf $$; while :; do sleep 1000; done' &",
    "stopped": "bash -c 'echo stopped $$; kill -STOP $$; sleep 1000' &",
    "quiet": "nohup sleep 1000 >/dev/null 2>&1 </dev/null & echo quiet $!",
}
TREE = "\n".join(PARTS.values())


async def test_a_signal_reaches_the_whole_tree() -> None:
    result = await shell(
        f"{TREE}\nwait",
        patience=patient(grace_s=BRIEF_S),
        parts=len(PARTS),
        when_there=lambda signals, _: signals.send_nowait(signal.SIGHUP),
    )
    assert result.pids.keys() == PARTS.keys()
    assert result.alive == {}
    assert result.ended == Ended(129, signal.SIGHUP)


async def test_what_lingers_after_its_command_is_ended_by_a_signal_too() -> None:
    def when_it_has_ended(signals: MemorySendChannel[int], pids: dict[str, int]) -> None:
        assert has_ended(pids["main"])
        signals.send_nowait(signal.SIGTERM)

    result = await shell(
        f"echo main $$\n{TREE}\nexit 5",
        patience=patient(grace_s=BRIEF_S),
        parts=len(PARTS) + 1,
        when_there=when_it_has_ended,
    )
    assert result.pids.keys() == {"main", *PARTS}
    assert result.alive == {}
    assert result.ended == Ended(5)


async def test_a_cancelled_command_leaves_nothing() -> None:
    result = Run()
    with trio.CancelScope() as scope:

        def on_stdout(data: bytes) -> None:
            result.stdout += data
            if len(result.pids) == len(PARTS):
                scope.cancel()

        await run_tree(
            ["bash", "-c", f"{TREE}\nwait"],
            directory="/",
            environment=dict(os.environ),
            patience=patient(grace_s=BRIEF_S),
            on_stdout=on_stdout,
            on_stderr=result.stderr.extend,
        )
    assert scope.cancelled_caught
    assert result.pids.keys() == PARTS.keys()
    assert result.alive == {}


async def test_a_command_over_its_time_leaves_nothing_and_keeps_its_output() -> None:
    """Two seconds, so that the tree is there by then on a busy machine."""
    result = await shell(f"{TREE}\nwait", patience=patient(timeout_s=2.0, grace_s=BRIEF_S))
    assert result.pids.keys() == PARTS.keys()
    assert result.alive == {}
    assert result.ended == Ended(124, signal.SIGTERM, timed_out=True)


async def test_a_deaf_command_gets_sigkill_after_the_grace() -> None:
    result = await shell(
        "trap '' TERM; echo deaf $$; while :; do sleep 1000; done",
        patience=patient(grace_s=BRIEF_S),
        parts=1,
        when_there=lambda signals, _: signals.send_nowait(signal.SIGTERM),
    )
    assert result.alive == {}
    assert result.ended == Ended(137, signal.SIGKILL)


async def test_a_command_may_end_in_its_own_way() -> None:
    """It has the whole grace for it, and its own exit code counts."""
    result = await shell(
        "trap 'echo bye; exit 7' TERM; echo polite $$; while :; do sleep 0.01; done",
        patience=patient(),
        parts=1,
        when_there=lambda signals, _: signals.send_nowait(signal.SIGTERM),
    )
    assert result.stdout.endswith(b"\nbye\n")
    assert result.ended == Ended(7)


async def test_a_second_signal_is_passed_on_too() -> None:
    script = "trap 'echo int' INT; trap 'exit 9' HUP; echo there; while :; do sleep 0.01; done"
    answers = {b"there\n": signal.SIGINT, b"int\n": signal.SIGHUP}
    sender, signals = trio.open_memory_channel[int](2)
    ended = await run_tree(
        ["bash", "-c", script],
        directory="/",
        environment=dict(os.environ),
        patience=patient(),
        on_stdout=lambda data: sender.send_nowait(answers[data]),
        on_stderr=len,
        signals=signals,
    )
    assert ended == Ended(9)


async def test_jobs_that_ignore_an_interrupt_are_asked_again_when_their_shell_has_ended() -> None:
    """A shell without job control makes its background jobs ignore SIGINT; nobody waits for the grace for them."""
    result = await shell(
        "bash -c 'trap \"echo asked; exit\" TERM; echo job $$; while :; do sleep 0.01; done' & wait",
        patience=patient(),
        parts=1,
        when_there=lambda signals, _: signals.send_nowait(signal.SIGINT),
    )
    assert result.alive == {}
    assert result.stdout.endswith(b"\nasked\n")
    assert result.ended == Ended(130, signal.SIGINT)


async def test_a_stopped_command_can_end_in_its_own_way_too() -> None:
    result = await shell(
        "trap 'exit 7' TERM; echo stopped $$; kill -STOP $$; while :; do sleep 0.01; done",
        patience=patient(),
        parts=1,
        when_there=lambda signals, _: signals.send_nowait(signal.SIGTERM),
    )
    assert result.ended == Ended(7)


async def test_background_processes_get_the_time_to_end_and_are_then_ended() -> None:
    result = await shell("sleep 1000 & echo left $!", patience=patient(linger_s=BRIEF_S))
    assert result.alive == {}
    assert result.ended == Ended(0, leftovers=1)
    result = await shell('{ read line; echo "$line"; } < <(sleep 0.2; echo late) &', patience=patient())
    assert result.stdout == b"late\n"
    assert result.ended == Ended(0)


async def test_a_pipe_in_the_hands_of_an_outsider_does_not_hold_us(tmp_path: Path) -> None:
    """A process that is not of the tree holds the end of a pipe, as a server would to which it was passed."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    result = Run()
    outside: list[int] = []

    def on_stdout(data: bytes) -> None:
        result.stdout += data
        if not outside and result.pids:
            outside.append(os.open(f"/proc/{result.pids['holds']}/fd/1", os.O_WRONLY))
            fifo.write_bytes(b"go on\n")

    result.ended = await run_tree(
        ["bash", "-c", f"echo holds $$; read line <{fifo}; echo last"],
        directory="/",
        environment=dict(os.environ),
        patience=patient(),
        on_stdout=on_stdout,
        on_stderr=result.stderr.extend,
    )
    os.close(outside[0])
    assert result.stdout.endswith(b"\nlast\n")
    assert result.ended == Ended(0)


async def test_a_command_that_kills_its_supervisor_is_killed() -> None:
    result = await shell(
        "setsid sleep 1000 & echo other $!; echo self $$; kill -KILL $PPID; sleep 1000", patience=patient()
    )
    assert all(has_ended(pid) for pid in result.pids.values())
    assert result.ended == Ended(137, signal.SIGKILL, failure="the command's supervisor was killed")


async def test_a_signal_that_its_supervisor_never_read(tmp_path: Path) -> None:
    """The socket is then broken, not ended: which is the same to us."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    sender, signals = trio.open_memory_channel[int](0)
    ended = []

    async def run_it() -> None:
        script = f"kill -STOP $PPID; echo stopped; read line <{fifo}; kill -KILL $PPID; sleep 1000"
        ended.append(
            await run_tree(
                ["bash", "-c", script],
                directory="/",
                environment=dict(os.environ),
                patience=patient(),
                on_stdout=lambda data: stopped.set(),
                on_stderr=len,
                signals=signals,
            )
        )

    stopped = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_it)
        await stopped.wait()
        await sender.send(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()
        fifo.write_text("go on\n")
    assert ended == [Ended(137, signal.SIGKILL, failure="the command's supervisor was killed")]


_HARNESS = """
import os, sys, trio
from fusefs.services.processes import Patience, run_tree
async def main():
    await run_tree(["bash", "-c", sys.argv[1]], directory="/", environment=dict(os.environ),
                   patience=Patience(60, 0.1, 60), on_stdout=lambda data: os.write(1, data), on_stderr=len)
trio.run(main)
"""


def test_nothing_outlives_a_harness_that_is_killed() -> None:
    """kill -9 lets it do nothing any more: its supervisor sees the end of the socket."""
    result = Run()
    with subprocess.Popen([sys.executable, "-c", _HARNESS, f"{TREE}\nwait"], stdout=subprocess.PIPE) as harness:
        assert harness.stdout is not None
        while len(result.pids) < len(PARTS):
            chunk = os.read(harness.stdout.fileno(), 4096)
            assert chunk
            result.stdout += chunk
        harness.kill()
    assert {name: has_ended(pid) for name, pid in result.pids.items()} == dict.fromkeys(PARTS, True)


def test_the_way_to_the_database_is_not_in_a_command_s_environment() -> None:
    environment = {
        "HANGO_FS_DSN": "postgresql://u:secret@h/d",
        "HANGO_FS_LISTEN_DSN": "postgresql://u:secret@h/d",
        "PGPASSWORD": "secret",
        "PGSERVICEFILE": "/etc/x",
        "HANGO_FS_AGENT": "coder",
        "PATH": "/bin",
    }
    assert without_database(environment) == {"HANGO_FS_AGENT": "coder", "PATH": "/bin"}
