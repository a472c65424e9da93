"""What everyday operations cost, counted: FUSE requests and round trips to Postgres.

The counts are the promise that docs/internals/performance.md makes; a test fails when one grows. No test
asserts a time.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fusefs.rules.config import Settings
from tests import harness
from tests.mount.sides import eventually

FILES = 1000
DIRECTORIES = 40


@pytest.fixture(scope="module")
def budget_mount(module_mount: harness.MountFactory) -> harness.Mount:
    return module_mount(session="budget")


@pytest.fixture
def root(budget_mount: harness.Mount, request: pytest.FixtureRequest) -> Path:
    path = budget_mount.path / request.node.name
    path.mkdir()
    os.listdir(path)
    return path


@pytest.fixture
def cost(budget_mount: harness.Mount) -> harness.Mount:
    # The first file takes a thousand incarnation numbers from the sequence, once.
    (budget_mount.path / "warm").write_text("warm")
    counted(budget_mount)
    return budget_mount


def counted(daemon: harness.Mount) -> None:
    """Wait until the daemon has counted the namespace, which it does two seconds after its first use."""
    eventually(lambda: daemon.status()["background_rounds"] > 0, "the first round of the background")


def _write(path: Path, text: str, flags: int) -> None:
    fd = os.open(path, flags, 0o644)
    os.write(fd, text.encode())
    os.close(fd)


def _settled(path: Path) -> None:
    """RELEASE is asynchronous: an answer to a later request of the file shows that it was handled."""
    os.stat(path)
    os.listdir(path.parent)


def test_memory_of_an_idle_mount(mount: harness.MountFactory) -> None:
    daemon = mount(session="idle")
    resident_kb = re.findall(r"^Rss: +(\d+) kB", Path(f"/proc/{daemon.pid}/smaps_rollup").read_text(), re.M)
    assert int(resident_kb[0]) < 80 * 1024


def test_create_write_close(cost: harness.Mount, root: Path) -> None:
    with cost.counting() as count:
        _write(root / "f", "text", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert count.counts.trips <= 1, "one commit, at close"
    assert count.counts.barriers <= 1, "a name that is not there has nothing to be stale against"
    assert count.counts.total <= 6, count.counts.requests


def test_exclusive_create_write_close(mount: harness.MountFactory) -> None:
    daemon = mount(session="first")
    counted(daemon)
    (daemon.path / "warm").write_text("warm")
    for others, trips in ((0, 1), (1, 2)):
        if others:
            mount(session="second")
        with daemon.counting() as count:
            _write(daemon.path / f"f{others}", "text", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        assert count.counts.trips <= trips, "the commit at close; where others follow, the claim before"
        assert count.counts.barriers <= 1
        assert count.counts.total <= 6, count.counts.requests


def test_read_what_was_just_written(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("text")
    _settled(root / "f")
    with cost.counting() as count:
        assert (root / "f").read_text() == "text"
    assert count.counts.trips == 0
    assert count.counts.total <= 6, count.counts.requests


def test_read_again(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("text")
    (root / "f").read_text()
    with cost.counting() as count:
        (root / "f").read_text()
    assert count.counts.trips == 0
    assert count.counts.requests["read"] == 0, "the kernel's pages serve it"
    assert count.counts.requests["flush"] == 0, "a reader has nothing to commit"
    assert count.counts.total <= 3, count.counts.requests


def test_read_of_a_file_larger_than_the_memory_for_contents_is_one_trip(
    mount: harness.MountFactory, namespace: harness.Namespace
) -> None:
    """And not one for each READ of 128 KiB."""
    size = Settings().content_cache_bytes + 1
    daemon = mount(env={"HANGO_FS_MAX_FILE_BYTES": str(size)})
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/large', repeat('x', %s))",
        (namespace.tenant_id, namespace.agent_id, size),
    )
    assert (daemon.path / "large").stat().st_size == size
    counted(daemon)
    with daemon.counting() as found:
        assert (daemon.path / "large").read_bytes() == b"x" * size
    assert found.counts.requests["read"] > 100
    assert found.counts.trips == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="where others than root get in, the kernel checks modes and asks")
def test_changes_in_a_row_ask_for_no_attributes(cost: harness.Mount, root: Path) -> None:
    for name in ("a", "b", "c"):
        (root / name).write_text("text")
    with cost.counting() as count:
        for name in ("a", "b", "c"):
            os.unlink(root / name)
    assert count.counts.requests["unlink"] == 3
    assert count.counts.requests["getattr"] == 0, count.counts.requests


def test_rewrite(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("one")
    _settled(root / "f")
    with cost.counting() as count:
        _write(root / "f", "two", os.O_WRONLY | os.O_TRUNC)
    assert count.counts.trips <= 1
    assert count.counts.barriers <= 2, "one before the check at open, and perhaps a heartbeat"
    assert count.counts.total <= 5, count.counts.requests


def test_append(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("one\n")
    _settled(root / "f")
    with cost.counting() as count:
        _write(root / "f", "two\n", os.O_WRONLY | os.O_APPEND)
    assert count.counts.trips <= 1
    assert count.counts.total <= 6, count.counts.requests


def test_rename(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("one")
    _settled(root / "f")
    with cost.counting() as count:
        os.rename(root / "f", root / "g")
    assert count.counts.trips <= 1
    assert count.counts.total <= 3, count.counts.requests


def test_rename_of_a_directory_is_one_trip(cost: harness.Mount, root: Path) -> None:
    (root / "d").mkdir()
    for number in range(50):
        (root / "d" / str(number)).write_text("text")
    with cost.counting() as count:
        os.rename(root / "d", root / "e")
    assert count.counts.trips <= 1
    assert count.counts.total <= 3, count.counts.requests


def test_stat(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("one")
    os.stat(root / "f")
    with cost.counting() as count:
        for _ in range(10):
            os.stat(root / "f")
            assert not (root / "missing").exists()
    assert count.counts.trips == 0
    assert count.counts.total <= 2, "the kernel answers, also that a name is absent"


def test_unlink(cost: harness.Mount, root: Path) -> None:
    (root / "f").write_text("one")
    _settled(root / "f")
    with cost.counting() as count:
        os.unlink(root / "f")
    assert count.counts.trips <= 1
    assert count.counts.total <= 3, count.counts.requests


def test_untar(mount: harness.MountFactory, tmp_path: Path) -> None:
    daemon = mount(session="alone")
    (daemon.path / "warm").write_text("warm")
    counted(daemon)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(100):
        (source / str(number)).write_text("text")
    subprocess.run(["tar", "cf", tmp_path / "t.tar", "-C", tmp_path, "source"], check=True)
    with daemon.counting() as count:
        subprocess.run(["tar", "xf", tmp_path / "t.tar", "-C", daemon.path, "--no-same-owner"], check=True)
    # One commit each; times and modes ride along. tar creates with O_EXCL: the only mount need not claim names.
    assert count.counts.trips <= 100 + 5
    assert count.counts.total <= 9 * 100 + 20, count.counts.requests


def test_cold_grep(
    module_mount: harness.MountFactory, module_namespace: harness.Namespace, budget_mount: harness.Mount
) -> None:
    tree = budget_mount.path / "tree"
    tree.mkdir()
    for directory in range(DIRECTORIES):
        (tree / str(directory)).mkdir()
        for number in range(FILES // DIRECTORIES):
            (tree / str(directory) / str(number)).write_text(f"line\nneedle {directory} {number}\n")
    cold = module_mount(session="cold", namespace=module_namespace)
    with cold.counting() as count:
        done = subprocess.run(["grep", "-rc", "needle", cold.path / "tree"], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == FILES
    # Three listings begin the walk, and three misses the sweep; then 32 directories and 128 files come at once.
    assert count.counts.trips <= 24
    assert count.counts.total <= 5 * FILES + 20 * DIRECTORIES, count.counts.requests
