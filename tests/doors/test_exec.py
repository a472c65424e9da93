"""`fusefs exec`: the program around a guarded command, in a mount, over the database, and without either."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import harness
from tests.doors.command import MEASURED, Fusefs

LONG = "seq 1 20000"
LONG_OUTPUT = b"".join(b"%d\n" % number for number in range(1, 20001))


@pytest.fixture(scope="module")
def work(module_mount: harness.MountFactory) -> harness.Mount:
    return module_mount(session="s-exec")


def start(suite_dir: Path, arguments: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    """`fusefs exec` as a process of its own."""
    return subprocess.Popen(
        [str(harness.FUSEFS), "exec", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=harness.command_environment(suite_dir),
        **options,  # type: ignore[call-overload]
    )


# Text and exit code


@pytest.mark.parametrize(
    ("command", "text", "code"),
    [
        (["echo", "hi"], "hi\n", 0),
        (["--", "echo", "--timeout"], "--timeout\n", 0),
        (["echo", "--json", "--"], "--json --\n", 0),
        (["sh", "-c", "exit 3"], "[exit code 3]\n", 3),
        (["sh", "-c", "kill $$"], "[ended by SIGTERM; exit code 143]\n", 143),
        (["no-such-command"], "[no-such-command: command not found; exit code 127]\n", 127),
        (["/etc/passwd"], "[/etc/passwd: cannot be run: Permission denied; exit code 126]\n", 126),
        (["--timeout", "0.2", "sleep", "1000"], "[command timed out after 0.2s]\n", 124),
    ],
)
def test_text_and_exit_code(bare_fusefs: Fusefs, command: list[str], text: str, code: int) -> None:
    result = bare_fusefs("exec", *command, check=False)
    assert (result.code, result.text, result.stderr) == (code, text, "")


def test_json(bare_fusefs: Fusefs, tmp_path: Path) -> None:
    result = bare_fusefs("exec", "--json", "--dir", str(tmp_path), "--", "sh", "-c", "pwd; exit 2", check=False)
    assert result.code == 2
    assert result.json["text"] == f"{tmp_path}\n[exit code 2]"
    assert result.json["stdout"]["text"] == f"{tmp_path}\n"
    assert result.json["ended"]["exit_code"] == 2


@pytest.mark.parametrize(
    "arguments", [[], ["--timeout", "0", "true"], ["--timeout", "soon", "true"], ["--bogus", "true"]]
)
def test_a_wrong_command_line(bare_fusefs: Fusefs, arguments: list[str]) -> None:
    assert "hint: " in bare_fusefs.fails(2, "exec", *arguments)


def test_long_output_without_a_mount_is_cut(bare_fusefs: Fusefs) -> None:
    text = bare_fusefs("exec", "--", "sh", "-c", LONG).text
    assert "could not be stored (there is nowhere to store it)" in text
    assert len(text) < 31_000
    assert text.endswith("\n20000\n")


# Stored output


def test_long_output_in_a_mount_is_stored_through_it(bare_fusefs: Fusefs, work: harness.Mount) -> None:
    """Without the database: as inside a container."""
    inner = work.path / "sub"
    inner.mkdir()
    for name in ("toolu_7", "exec"):
        given = [] if name == "exec" else ["--tool-call-id", name]
        text = bare_fusefs("exec", *given, "--dir", str(inner), "--", "sh", "-c", f"pwd >&2; {LONG}").text
        path = f"/large_tool_results/s-exec/{name}"
        assert path in text
        assert len(text) < 1000
        stored = (work.path / path.lstrip("/")).read_bytes()
        assert stored == LONG_OUTPUT + f"[stderr]\n{inner}\n".encode()


def test_long_output_over_the_database(fusefs: Fusefs, agent: harness.Namespace, tmp_path: Path) -> None:
    arguments = ["exec", "--json", "--session", "s-9", "--tool-call-id", "t", "--dir", str(tmp_path)]
    result = fusefs(*arguments, "--", "sh", "-c", LONG).json
    assert result["path"] == "/large_tool_results/s-9/t"
    rows = agent.execute("SELECT content, updated_session FROM agent_files WHERE path = %s", (result["path"],))
    assert rows == [(LONG_OUTPUT.decode(), "s-9")]


def test_an_agent_of_the_environment_is_used_outside_every_mount(
    fusefs: Fusefs, agent: harness.Namespace, tmp_path: Path
) -> None:
    result = fusefs("exec", "--json", "--dir", str(tmp_path), "--", "sh", "-c", LONG).json
    assert result["path"].startswith("/large_tool_results/s-")
    assert agent.execute("SELECT length(content) FROM agent_files WHERE path = %s", (result["path"],)) == [
        (len(LONG_OUTPUT),)
    ]


# Signals and resources


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_process_of_the_command(suite_dir: Path, tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = (
        f"trap 'echo caught; exit 5' INT TERM HUP; setsid sh -c 'echo $$ >{fifo}; sleep 1000' & "
        f"exec 3>{fifo}; echo $$ >&3; while :; do sleep 0.01; done"
    )
    with start(suite_dir, ["--", "bash", "-c", script]) as process, fifo.open() as told:
        pids = [int(told.readline()), int(told.readline())]
        process.send_signal(number)
        output, errors = process.communicate()
    assert output.startswith(b"caught\n")
    assert output.endswith(b"[exit code 5]\n")
    assert errors == b""
    assert process.returncode == 5
    assert [harness.process_start(pid) for pid in pids] == [None, None]


def test_what_nohup_ignores_is_not_heard(suite_dir: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(suite_dir, ["--", "sh", "-c", f"echo $$ >{fifo}; read line <{fifo}; echo $line"])
    finally:
        signal.signal(signal.SIGHUP, previous)
    with process:
        fifo.read_text()
        process.send_signal(signal.SIGHUP)
        fifo.write_text("went on\n")
        assert process.communicate() == (b"went on\n", b"")


def test_memory_stays_bounded(suite_dir: Path, work: harness.Mount) -> None:
    """Also where the output is stored: 256 MB come, at most 32 MiB are kept. That takes 140 MB."""
    script = "head -c 256M /dev/zero | tr '\\0' x; echo; echo LAST"
    done = subprocess.run(
        [*MEASURED, "exec", "--dir", str(work.path), "--", "sh", "-c", script],
        stdin=subprocess.DEVNULL, capture_output=True, env=harness.command_environment(suite_dir), check=True,
    )  # fmt: skip
    assert b"268,435,462 bytes" in done.stdout
    assert done.stdout.endswith(b"LAST\n")
    assert int(done.stderr) < 200 * 1024


def test_a_reader_that_goes_away(suite_dir: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [harness.FUSEFS, "exec", "--", "seq", "1", "10"],
        stdout=writer,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=harness.command_environment(suite_dir),
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
