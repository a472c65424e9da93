"""What differs on a terminal: progress bars and questions. The terminal is a real one (a pty)."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.doors.command import Fusefs
from tests.doors.test_cli_admin import put
from tests.doors.test_cli_files import member

BOUND_S = 60


class Terminal:
    """A pty; `read_until` returns what was shown so far."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.shown = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.shown:
            ready, _, _ = select.select([self.ours], [], [], BOUND_S)
            assert ready, self.shown
            self.shown += os.read(self.ours, 65536)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_export_and_import_show_a_bar_on_a_terminal_only(
    fusefs: Fusefs, agent: harness.Namespace, suite_dir: Path, terminal: Terminal
) -> None:
    put(agent, "/a", "x")
    env = harness.command_environment(suite_dir, agent.dsn) | {"TERM": "xterm"}
    command = [harness.FUSEFS, "export", f"{agent.tenant}/{agent.agent}"]
    shown = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=terminal.theirs, timeout=BOUND_S, check=True
    )
    terminal.read_until(b"export")
    command = [harness.FUSEFS, "import", f"{agent.tenant}/{agent.agent}"]
    subprocess.run(command, env=env, input=shown.stdout, stderr=terminal.theirs, timeout=BOUND_S, check=True)
    terminal.read_until(b"imported, ")
    assert b"import " in terminal.shown
    assert fusefs("export", agent.agent).stderr == ""
    assert fusefs("import", agent.agent, stdin=shown.stdout).stderr.count("\n") == 1


def test_an_archive_is_not_written_to_a_terminal(agent: harness.Namespace, suite_dir: Path, terminal: Terminal) -> None:
    env = harness.command_environment(suite_dir, agent.dsn)
    done = subprocess.run(
        [harness.FUSEFS, "export", agent.agent],
        env=env,
        stdout=terminal.theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 2
    assert "stdout is a terminal" in done.stderr


def wait_for_end(process: subprocess.Popen[bytes], terminal: Terminal, answer: bytes) -> int:
    """Python loses a ^C that arrives between its last check and its read; a person presses again, and so do we."""
    for _ in range(BOUND_S):
        try:
            return process.wait(1)
        except subprocess.TimeoutExpired:
            if answer == b"\x03":
                os.write(terminal.ours, answer)
    process.kill()
    raise AssertionError(f"the command still waits: {terminal.shown!r}")


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, 1), (b"y\n", 0, 0), (b"\x03", 130, 1)])
def test_removing_asks_on_a_terminal(
    agent: harness.Namespace, suite_dir: Path, terminal: Terminal, answer: bytes, code: int, left: int
) -> None:
    env = harness.command_environment(suite_dir, agent.dsn)
    command = [harness.FUSEFS, "agent", "remove", agent.agent, "--tenant", agent.tenant]
    # `setsid --ctty` makes the pty the controlling terminal, so that ^C is a signal.
    with subprocess.Popen(
        ["setsid", "--ctty", *command],
        env=env,
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
    ) as process:
        terminal.read_until(b"[y/N]:")
        os.write(terminal.ours, answer)
        assert wait_for_end(process, terminal, answer) == code
    assert b"with 0 files" in terminal.shown
    assert agent.execute("select count(*) from agents where id = %s", (agent.agent_id,)) == [(left,)]


def test_a_name_with_escapes_is_shown_harmless(fusefs: Fusefs, agent: harness.Namespace) -> None:
    fusefs("import", agent.agent, stdin=member("\x1b]0;title\x07x", b"1"))
    text = fusefs("versions", "/\x1b]0;title\x07x", "--agent", agent.agent).text
    assert "\x1b" not in text
    assert "/\\x1b]0;title\\x07x" in text
