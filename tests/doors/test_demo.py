"""The demo, played as a newcomer does: its own home, its own Postgres, a small part of the library."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fusefs.db import embedded
from tests import harness

DEMO = harness.ROOT / "scripts" / "demo"

pytestmark = pytest.mark.kernel


class Demo:
    """Runs `scripts/demo` in a home of its own."""

    def __init__(self, home: Path, env: Mapping[str, str]) -> None:
        self.mounts = home / "fusefs-demo"
        self.data = home / "data"
        self.env = {
            **env,
            "HOME": str(home),
            "HANGO_FS_DATA_DIR": str(self.data),
            "HANGO_FS_RUNTIME_DIR": str(home / "run"),
            "FUSEFS_DEMO_PART": "json",
        }

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [DEMO, *args],
            env=self.env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *args: str, code: int = 0) -> str:
        """Run it to its end; returns what it printed."""
        process = self.start(*args)
        printed, _ = process.communicate(timeout=180)
        assert process.returncode == code, printed
        return printed

    def is_running(self) -> bool:
        return embedded.running_dsn(self.data) is not None

    def mounted(self) -> list[str]:
        return harness.mounts_under(self.mounts)


@pytest.fixture(scope="module")
def home(suite_dir: Path) -> Iterator[Path]:
    """One home for all tests here: making its Postgres takes longer than playing the tour."""
    home = suite_dir / "demo"
    home.mkdir()
    yield home
    shutil.rmtree(home)


@pytest.fixture
def demo(home: Path, suite_dir: Path) -> Iterator[Demo]:
    harness.require_fuse()
    demo = Demo(home, harness.command_environment(suite_dir))
    yield demo
    left = demo.mounted()
    for mountpoint in left:
        harness.lazy_umount(mountpoint)
    embedded.stop(demo.data)
    assert not left, f"mounts were left behind: {left}"


def answer(printed: str, command: str) -> str:
    """What the demo shows below a command."""
    found = re.search(rf"^\$ {re.escape(command)}\n(.*?)(?=^\$ |^\n# )", printed, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no `$ {command}` in:\n{printed}"
    return found[1]


def test_it_plays_twice_and_stops(demo: Demo) -> None:
    first = demo()
    assert "5 of 5 files" in answer(first, f"tar -c -C {os.path.dirname(os.__file__)} -T ~/fusefs-demo/files"
                                           " | tar -x -v -C stdlib")  # fmt: skip
    assert answer(first, "echo '# A new plan' > notes.md").endswith("notes.md: Stale file handle\n")
    assert "(you had version 2, it is at version 3 now)" in answer(first, "tail -n 1 .fusefs/errors")
    assert "Permission denied" in answer(first, "echo 'Obey me.' > memories/rule.md")
    assert "5 files changed" in answer(first, "cd stdlib && git log --oneline --shortstat && git status --short")
    assert re.search(r"/notes.md \| +5 \| owner .*\| # Plan", first)
    assert demo.mounted() == [str(demo.mounts / "two"), str(demo.mounts / "one")]
    assert (demo.mounts / "one" / "notes.md").read_text() == "# Plan\n- read the code: done\n- write the test\n"

    again = demo()
    assert "is mounted already" in again
    assert answer(again, "rm -rf ../two/stdlib ../two/notes.md") == ""
    assert answer(again, "echo '# A new plan' > notes.md").endswith("notes.md: Stale file handle\n")

    # A step that shows something else fails the whole: this part has no `def loads`.
    demo.env["FUSEFS_DEMO_PART"] = "wsgiref"
    assert "demo: `grep -rn 'def loads' stdlib` did not do what it should: exit code 1." in demo(code=1)

    stopped = demo("--stop", "--purge")
    assert "deleted agent demo/tour" in stopped
    assert "stopped the embedded Postgres" in stopped
    assert f"rm -rf ~/{demo.data.name}" in stopped
    assert demo.mounted() == []
    assert not demo.is_running()
    assert not demo.mounts.exists()


def test_an_interrupt_cleans_up(demo: Demo) -> None:
    embedded.ensure_running(demo.data)
    process = demo.start()
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("$ mkdir stdlib"):
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
    assert process.wait(60) == 130, rest
    assert "interrupted: cleaning up" in rest
    assert demo.mounted() == []
    # A server that the demo did not start is not the demo's to stop.
    assert "The embedded Postgres goes on: the demo did not start it." in rest
    assert demo.is_running()


def test_options_are_checked(demo: Demo) -> None:
    assert "unknown option --strop" in demo("--strop", code=2)
    assert "--purge goes with --stop" in demo("--purge", code=2)
    assert "scripts/demo --stop --purge" in demo("--help")
