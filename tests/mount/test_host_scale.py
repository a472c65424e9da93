"""One host daemon, hundreds of sessions: what an idle one costs, and what goes when it goes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import harness
from tests.mount.sides import eventually

AGENTS, SESSIONS = 50, 300
MEMORY_OF_A_SESSION_KB = 40


@pytest.fixture(scope="module")
def host(module_mount: harness.MountFactory) -> harness.Mount:
    return module_mount(layout="host")


@pytest.fixture(scope="module")
def watcher(host: harness.Mount, module_namespace: harness.Namespace) -> Iterator[Path]:
    """A session from which the daemon's status is read, by a descriptor: the folders above it are asked of Postgres
    at each walk."""
    folder = host.path / module_namespace.tenant / module_namespace.agent / "s-watcher"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield Path(f"/proc/self/fd/{fd}")
    os.close(fd)


def status(watcher: Path) -> harness.Counts:
    return harness.Counts.of(harness.status_at(watcher))


def resident_kb(host: harness.Mount) -> int:
    text = Path(f"/proc/{host.pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Rss: +(\d+) kB", text, re.M)[0])


def test_three_hundred_sessions_come_and_go(
    host: harness.Mount, watcher: Path, module_namespace: harness.Namespace
) -> None:
    agents = [harness.make_namespace(module_namespace.dsn, tenant=module_namespace.tenant) for _ in range(AGENTS)]
    folders = [
        host.path / agents[number % AGENTS].tenant / agents[number % AGENTS].agent / f"s-{number}"
        for number in range(SESSIONS)
    ]
    before, memory = harness.status_at(watcher), resident_kb(host)
    for folder in folders:
        folder.mkdir()
        (folder / f"note-{folder.name}").write_text(folder.name)
    during = harness.status_at(watcher)
    assert (during["sessions"], during["namespaces"]) == (
        before["sessions"] + SESSIONS,
        before["namespaces"] + AGENTS,
    )
    assert (resident_kb(host) - memory) / SESSIONS < MEMORY_OF_A_SESSION_KB
    assert sorted(os.listdir(folders[0])) == sorted(os.listdir(folders[AGENTS])), "sessions of one agent share files"

    # Nothing happens in them: no statement goes out, however many there are.
    eventually(lambda: _trips_of_a_round(watcher) == 0, "a round of the background without a statement")

    for folder in folders:
        folder.rmdir()
    eventually(
        lambda: (
            (harness.status_at(watcher)["sessions"], harness.status_at(watcher)["namespaces"])
            == (before["sessions"], before["namespaces"])
        ),
        "ended sessions, and the namespaces that were theirs alone, are forgotten",
    )
    folders[0].mkdir()
    assert (folders[0] / "note-s-0").read_text() == "s-0", "a namespace is opened again"


def _trips_of_a_round(watcher: Path) -> int:
    """Round trips during one round of the background's work (2 s), heartbeats left out."""
    before = status(watcher)
    seen = harness.status_at(watcher)["background_rounds"]
    eventually(lambda: harness.status_at(watcher)["background_rounds"] > seen + 1, "a round of the background")
    return (status(watcher) - before).trips
