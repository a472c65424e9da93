"""Directories of ten thousand entries, and what other programs do to a directory while it is read.

The entries are rows inserted beside the mount, in one statement: making them one by one through it
would take ten seconds and prove nothing more.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import harness
from tests.mount.sides import eventually

ENTRIES = 10_000


def insert(namespace: harness.Namespace, directory: str, pattern: str, count: int) -> None:
    namespace.execute(
        "INSERT INTO agent_files (tenant_id, agent_id, path, content)"
        " SELECT %s, %s, format(%s, lpad(i::text, 5, '0')), 'x' FROM generate_series(0, %s) AS i",
        (namespace.tenant_id, namespace.agent_id, f"/{directory}/{pattern}", count - 1),
    )


@pytest.fixture(scope="module")
def big(module_namespace: harness.Namespace, shared_mount: harness.Mount) -> Path:
    insert(module_namespace, "big", "entry-%s", ENTRIES)
    eventually((shared_mount.path / "big").is_dir, "the directory in the mount")
    return shared_mount.path / "big"


def test_listing_has_every_entry_once(big: Path) -> None:
    listed = os.listdir(big)
    assert len(listed) == ENTRIES
    assert set(listed) == {f"entry-{i:05d}" for i in range(ENTRIES)}


def test_stream_stays_sound_while_entries_come_and_go(big: Path, module_namespace: harness.Namespace) -> None:
    seen: list[str] = []
    gone: set[str] = set()
    with os.scandir(big) as entries:
        for count, entry in enumerate(entries):
            seen.append(entry.name)
            if count % 100 == 0:
                # One that was read, one that comes far later or was read too, and a new one.
                for name in (entry.name, f"entry-{(count * 7 + 5000) % ENTRIES:05d}"):
                    if name not in gone:
                        os.unlink(big / name)
                        gone.add(name)
                os.symlink("x", big / f"new-{count:05d}")
            if count == ENTRIES // 2:
                insert(module_namespace, "big", "from-outside-%s", 50)
    assert len(seen) == len(set(seen)), "an entry came twice"
    stayed = {f"entry-{i:05d}" for i in range(ENTRIES)} - gone
    assert stayed <= set(seen), "an entry that was there all the time was left out"
    new = {f"new-{count:05d}" for count in range(0, len(seen), 100)}
    outside = {f"from-outside-{i:05d}" for i in range(50)}
    eventually(lambda: outside <= set(os.listdir(big)), "the rows from outside")
    assert set(os.listdir(big)) == stayed | new | outside


def test_files_deleted_by_others_leave_the_listing(big: Path, module_namespace: harness.Namespace) -> None:
    before = set(os.listdir(big))
    module_namespace.execute(
        "DELETE FROM agent_files WHERE tenant_id = %s AND agent_id = %s AND path >= '/big/entry-09000'"
        " AND path <= '/big/entry-09999'",
        (module_namespace.tenant_id, module_namespace.agent_id),
    )
    expected = {name for name in before if not name.startswith("entry-09")}
    eventually(lambda: set(os.listdir(big)) == expected, "the listing without what was deleted")


def test_a_walk_through_more_files_than_are_kept(mount: harness.MountFactory, namespace: harness.Namespace) -> None:
    """The kernel forgets what it is told to, so memory is bounded; what is open, and directories, keep their names."""
    limit, directories, files = 500, 40, 50
    for number in range(directories):
        insert(namespace, f"d{number:02}", "f-%s", files)
    mounted = mount("--max-nodes", str(limit), session="s1")
    held = os.open(mounted.path / "d00" / "f-00000", os.O_RDONLY)
    inside = os.open(mounted.path / "d01", os.O_RDONLY)
    found = [Path(top) / name for top, _, names in os.walk(mounted.path) for name in names]
    assert len([path for path in found if path.name.startswith("f-")]) == directories * files

    def counts() -> tuple[int, int]:
        status = mounted.status()
        return status["nodes"], status["inodes"]

    # A pass begins a sixteenth above the limit, and the directory that is being read is not in it.
    most = limit + limit // 16 + files
    eventually(lambda: max(counts()) <= most, f"at most {most} are known")
    assert os.readlink(f"/proc/self/fd/{held}") == str(mounted.path / "d00" / "f-00000")
    assert os.readlink(f"/proc/self/fd/{inside}") == str(mounted.path / "d01")
    assert os.stat("f-00007", dir_fd=inside).st_size == 1
    os.close(held)
    os.close(inside)
    namespace.execute("update agent_files set content = 'changed' where path in ('/d00/f-00000', '/d02/f-00001')")
    for path in ("d00/f-00000", "d02/f-00001"):
        eventually(lambda path=path: (mounted.path / path).read_text() == "changed", "the change")  # type: ignore[misc]
    assert len(os.listdir(mounted.path / "d00")) == files
