"""The README and the quickstart, typed as they stand: what they show is what happens."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness

PAGES = ["README.md", "docs/quickstart.md"]
MARK = "\x1e"  # between the answers of two commands

# What differs from run to run, the longest first.
VOLATILE = [
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UUID"),
    (r"\b[0-9a-f]{8}-(?=notes\.md)", "ID-"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\dZ?", "TIME"),
    (r"(?<=TIME) +\d+$", " PID"),
    (r"^ready: .*", "ready: DSN"),
    (r"^bash: line \d+: ", "bash: "),
]

pytestmark = pytest.mark.kernel


def console(page: str) -> list[tuple[str, str]]:
    """(command, answer) of every ```console block, in the page's order."""
    steps: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", (harness.ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], ""))
            else:
                command, answer = steps.pop()
                steps.append((command, f"{answer}{line}\n"))
    return steps


def comparable(answer: str, home: str) -> list[str]:
    """The words of an answer: pages break long lines, and columns are as wide as what is in them."""
    answer = answer.replace(home, "/root")
    for pattern, word in VOLATILE:
        answer = re.sub(pattern, word, answer, flags=re.MULTILINE)
    return answer.split()


def typed(command: str) -> str:
    """A command as a person types it: after the announcement has reached the other session, and with the
    names that there are."""
    if command.startswith("cat ~/work2/"):
        there = command.removeprefix("cat ")
        here = there.replace("work2", "work")
        command = f"for _ in {{1..200}}; do cmp -s {here} {there} && break; sleep 0.05; done; {command}"
    return re.sub(r"\b[0-9a-f]{8}-(?=notes\.md)", "*-", command)


@pytest.fixture
def home(suite_dir: Path) -> Iterator[Path]:
    home = suite_dir / "tutorial"
    home.mkdir()
    yield home
    left = harness.mounts_under(home)
    for mountpoint in left:
        harness.lazy_umount(mountpoint)
    shutil.rmtree(home)
    assert not left, f"the page leaves mounts behind: {left}"


@pytest.fixture
def database(pg_server: harness.PostgresServer) -> Iterator[str]:
    """An empty one: `fusefs init` is part of the page."""
    dsn = pg_server.create_database("tutorial")
    yield dsn
    harness.audit(dsn)
    pg_server.drop_database("tutorial")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_happens(page: str, home: Path, database: str, suite_dir: Path) -> None:
    harness.require_fuse()
    steps = console(page)
    assert len(steps) > 10
    env = harness.command_environment(suite_dir, database)
    del env["HANGO_FS_MAX_FILE_BYTES"]
    env |= {
        "HOME": str(home),
        "HANGO_FS_RUNTIME_DIR": str(home / "run"),
        "HANGO_FS_DATA_DIR": str(home / "data"),  # the pages use a server that is not the embedded one
        "PATH": f"{harness.FUSEFS.parent}:/usr/bin:/bin",
    }
    if page == "README.md":  # its commands need no init: --create does it for the embedded Postgres
        subprocess.run([harness.FUSEFS, "init"], env=env, check=True, capture_output=True)
    script = "".join(f"{typed(command)}\nprintf '{MARK}'\n" for command, _ in steps)
    done = subprocess.run(
        ["bash", "--norc"],
        input=f"exec 2>&1\n{script}",
        stdout=subprocess.PIPE,
        env=env,
        cwd=harness.ROOT,
        text=True,
        timeout=120,
        check=False,
    )
    answers = done.stdout.split(MARK)
    for (command, shown), answer in zip(steps, answers, strict=False):
        assert comparable(answer, str(home)) == comparable(shown, str(home)), f"{page}: $ {command}\n{answer}"
    assert len(answers) == len(steps) + 1
