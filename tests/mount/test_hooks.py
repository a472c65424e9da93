"""Hooks on file events: what they are told, and that nothing they do reaches the mount.

A hook writes to a FIFO that the test reads, so that each waits for the other.
"""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.mount.sides import DEADLINE_S, eventually

pytestmark = pytest.mark.kernel

SECRET = "what the file holds"
TELL = "{ cat; env; } >'%s'"
"""A script that tells what it was given."""


def toml(rules: list[dict[str, Any]]) -> str:
    lines = []
    for rule in rules:
        lines.append("[[hooks]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in rule.items()]
    return "\n".join(lines) + "\n"


def hook(script: str, *events: str, **more: Any) -> dict[str, Any]:
    return {"command": ["/bin/sh", "-c", script], "events": list(events or ("write",)), **more}


class Hooked:
    """Mounts with hooks, and the FIFO that these write to."""

    def __init__(self, folder: Path, factory: harness.MountFactory) -> None:
        self.folder = folder
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self._factory = factory

    def mount(self, *rules: dict[str, Any], session: str = "s-hooks") -> harness.Mount:
        config = self.folder / f"{session}.toml"
        config.write_text(toml(list(rules)))
        return self._factory(session=session, env={"HANGO_FS_CONFIG": str(config)})

    def told(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What the next hook was given: on stdin, and in its environment."""
        event, *environment = self.heard().splitlines()
        return json.loads(event), dict(line.split("=", 1) for line in environment if "=" in line)

    def heard(self) -> str:
        """What the next hook writes to the FIFO. A hook that does not come fails the test."""
        parts = []
        with open(os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as fifo:
            while True:
                assert select.select([fifo], [], [], DEADLINE_S)[0], "no hook has come"
                part = fifo.read(65536)
                if not part:
                    return b"".join(parts).decode()
                parts.append(part)


@pytest.fixture
def hooked(tmp_path: Path, mount: harness.MountFactory) -> Hooked:
    return Hooked(tmp_path, mount)


def skipped(mount: harness.Mount) -> list[tuple[str, int]]:
    return [(one["why"], one["exit_code"]) for one in mount.log_events() if one["event"] == "hooks.skipped"]


# What a hook is told


def test_the_events_and_what_they_say(hooked: Hooked, namespace: harness.Namespace) -> None:
    """Each way in which content comes to be at a path, a lost race, and a stored result."""
    mount = hooked.mount(hook(TELL % hooked.fifo, "write", "conflict", "offload", exclude=["*.tmp"]))
    other = hooked.mount(session="s-other")
    mount.expect_log("fs.refused|conflict")
    known = {"tenant": namespace.tenant_id, "agent": namespace.agent_id, "session": "s-hooks"}

    def expect(event: str, path: str, version: int | None, size: int) -> None:
        assert hooked.told()[0] == {"event": event, **known, "path": path, "version": version, "bytes": size}

    file = mount.path / "a file.txt"
    file.write_text("one")
    expect("write", "/a file.txt", 1, 3)
    with file.open("a") as stream:
        stream.write("more")
    expect("write", "/a file.txt", 2, 7)
    temporary = mount.path / "save.tmp"
    temporary.write_text("saved")
    temporary.rename(file)
    expect("write", "/a file.txt", 3, 5)
    (mount.path / "dir").mkdir()
    (mount.path / "link").symlink_to("dir")
    file.rename(mount.path / "dir" / "moved")
    expect("write", "/dir/moved", 3, 5)

    loser = (mount.path / "dir" / "moved").open("r+")
    loser.read()
    (other.path / "dir" / "moved").write_text("faster")
    loser.seek(0)
    with pytest.raises(OSError, match="Stale"):
        loser.write("lost race")
        loser.close()
    expect("conflict", "/dir/moved", 4, 9)

    results = mount.path / "large_tool_results" / "s-hooks"
    results.mkdir(parents=True)
    (results / "toolu_1").write_text("long")
    expect("offload", "/large_tool_results/s-hooks/toolu_1", 1, 4)


def test_the_surroundings_of_a_hook(hooked: Hooked) -> None:
    script = "{ cat; env; echo cwd=$PWD; echo session=$(ps -o sid= -p $$) pid=$$; } >'%s'"
    mount = hooked.mount(hook(script % hooked.fifo))
    (mount.path / "file").write_text(SECRET)
    event, variables = hooked.told()
    assert {name: variables[f"FUSEFS_{name.upper()}"] for name in event} == {
        name: str(value) for name, value in event.items()
    }
    assert variables["cwd"] == "/"
    assert not [name for name in variables if name.startswith("PG") or name.endswith("DSN")]
    assert SECRET not in json.dumps([event, variables])
    assert SECRET not in mount.log_path.read_text()


def test_only_the_chosen_events_and_paths(hooked: Hooked) -> None:
    mount = hooked.mount(hook(TELL % hooked.fifo, "write", include=["/src/**/*.py", "*.md"], exclude=["/src/old/**"]))
    results = mount.path / "large_tool_results" / "s-hooks"
    for folder in ("src/old", "src/new/deep", "other", str(results)):
        (mount.path / folder).mkdir(parents=True)
    (results / "of_a_tool.md").write_text("not a write")
    for name in ("src/old/a.py", "src/a.txt", "other/a.py", "src/new/deep/a.py", "other/notes.md"):
        (mount.path / name).write_text("x")
    assert [hooked.told()[0]["path"] for _ in range(2)] == ["/src/new/deep/a.py", "/other/notes.md"]


# What a hook may do


def test_a_hook_that_is_of_no_use_is_skipped(hooked: Hooked) -> None:
    """Missing, failing, no JSON, over its time (DE-13): logged, and the next one runs."""
    mount = hooked.mount(
        {"command": ["/no/such/program"], "events": ["write"]},
        {"command": ["/etc/passwd"], "events": ["write"]},
        hook("exit 3"),
        hook("kill -9 $$"),
        hook(f"echo '{SECRET}'"),
        hook("echo '[1]'"),
        hook("head -c 1000000 /dev/zero"),
        hook("sleep 1000", timeout=0.1),
        hook("echo; echo '{\"fine\": true}'"),
        hook(TELL % hooked.fifo),
    )
    mount.expect_log("hooks.skipped")
    (mount.path / "file").write_text(SECRET)
    assert hooked.told()[0]["path"] == "/file"
    done = {"missing": 2, "failed": 2, "not_json": 3, "timed_out": 1, "ran": 2}
    eventually(lambda: mount.status()["hooks"] == done, "every hook ran")
    assert sorted(skipped(mount)) == [
        ("failed", 3),
        ("failed", 137),
        ("missing", 126),
        ("missing", 127),
        ("not_json", 0),
        ("not_json", 0),
        ("not_json", 0),
        ("timed_out", 124),
    ]
    assert SECRET not in mount.log_path.read_text()


def test_nobody_waits_for_a_hook(hooked: Hooked) -> None:
    """While one hangs, everything else goes on. What waits is one event for each file, in their order."""
    mount = hooked.mount(hook(TELL % hooked.fifo))
    (mount.path / "first").write_text("x")
    for _ in range(3):
        for number in range(10):
            with (mount.path / f"later{number}").open("a") as file:
                file.write("x")
    assert hooked.told()[0]["path"] == "/first"
    events = [hooked.told()[0] for _ in range(10)]
    assert [event["path"] for event in events] == [f"/later{number}" for number in range(10)]
    assert {(event["version"], event["bytes"]) for event in events} == {(3, 3)}


@pytest.fixture
def deaf_hook(hooked: Hooked) -> tuple[harness.Mount, list[int]]:
    """A mount whose hook runs, with a process that left its group, and the pids of both."""
    script = f"trap '' TERM; setsid sleep 1000 & echo $$ $! >'{hooked.fifo}'; sleep 1000"
    mount = hooked.mount(hook(script))
    (mount.path / "file").write_text("x")
    (mount.path / "unheard").write_text("x")
    return mount, [int(word) for word in hooked.heard().split()]


@pytest.mark.parametrize("way", ["umount", "terminate"])
def test_hooks_end_with_their_daemon(deaf_hook: tuple[harness.Mount, list[int]], way: str) -> None:
    mount, pids = deaf_hook
    getattr(mount, way)()
    assert [harness.process_start(pid) for pid in pids] == [None, None]
