"""What others change while a request of this mount waits in Postgres never makes two wait for each other.

The kernel holds a page, an inode or a directory until the daemon answers, and what the daemon tells the kernel waits
for these. A watchdog outside this process ends the FUSE connections when a test hangs; the test fails then.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.posix_support import errno_of
from tests.mount.sides import Files, Side, eventually, finish
from tests.mount.test_races import Background
from tests.relay import Line, Which

_numbers = itertools.count(1)
WATCHDOG_S = 25


@pytest.fixture(scope="module")
def line(module_pg: str) -> Iterator[Line]:
    with Line(module_pg) as line:
        yield line


@pytest.fixture(scope="module")
def mounts(line: Line, module_mount: harness.MountFactory) -> tuple[harness.Mount, harness.Mount]:
    """The mount under test, whose statements can be held up, and one that changes what it looks at."""
    mounted = module_mount(session="s-held", dsn=line.dsn)
    mounted.expect_log(r"stale|conflict|refused")
    return mounted, module_mount(session="s-other")


class Pair:
    """One directory, seen by the mount under test (`held`) and the other one."""

    def __init__(self, mounts: tuple[harness.Mount, harness.Mount], namespace: harness.Namespace, name: str) -> None:
        # Made by the other, so that nothing of the mount under test is on its way to Postgres.
        (mounts[1].path / name).mkdir()
        eventually((mounts[0].path / name).is_dir, "the directory in the mount under test")
        self.mount = mounts[0]
        self.held, self.other = (Side(mount, name) for mount in mounts)
        self.files = Files(namespace, name)

    def given(self, script: str) -> None:
        """Let the other make something, and wait until the mount under test has the last of it."""
        self.other.ok(f"{script}; : > .last; rm .last")
        names = sorted(os.listdir(self.other.root))
        eventually(lambda: sorted(os.listdir(self.held.root)) == names, "what is given")

    @contextlib.contextmanager
    def announced(self, count: int = 1) -> Iterator[None]:
        """Return when the daemon under test has taken as many announcements more. It answers, or this hangs."""
        before = self._announcements()
        yield
        eventually(lambda: self._announcements() >= before + count, "the announcements are taken")

    def _announcements(self) -> int:
        return int(self.mount.status()["requests"].get("announcement", 0))


@pytest.fixture(scope="module")
def watchdog(mounts: tuple[harness.Mount, harness.Mount]) -> Iterator[harness.Watchdog]:
    with harness.Watchdog(mounts, WATCHDOG_S) as found:
        yield found


@pytest.fixture
def pair(
    mounts: tuple[harness.Mount, harness.Mount], watchdog: harness.Watchdog, module_namespace: harness.Namespace
) -> Iterator[Pair]:
    with watchdog.watching():
        found = Pair(mounts, module_namespace, f"d{next(_numbers)}")
        yield found
        found.held.close()
        found.other.close()


@contextlib.contextmanager
def frozen(line: Line) -> Iterator[Callable[[], None]]:
    """Hold up what is asked of Postgres, but not the announcements. The value waits until something is held up."""
    line.freeze(Which.STATEMENTS)
    try:
        yield lambda: eventually(lambda: line.held, "a statement waits")
    finally:
        line.thaw()


CHANGES = {
    "written": ("printf new > f", b"new"),
    "appended": ("printf more >> f", b"oldmore"),
    "chmod": ("chmod 600 f", b"old"),
    "replaced": ("mv g f", b"g"),
    "renamed": ("mv f h", None),
    "removed": ("rm f", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_read_in_flight(pair: Pair, line: Line, change: str) -> None:
    """invalidate_inode waits for the page that the read has locked."""
    script, expected = CHANGES[change]
    pair.given("printf old > f; printf g > g")
    got: list[bytes] = []
    with frozen(line) as waits:
        reading = Background(lambda: got.append((pair.held / "f").read_bytes()))
        waits()
        with pair.announced():
            pair.other.ok(script)
    reading.join()
    assert got[0] in (b"old", expected)
    if expected is None:
        eventually(lambda: not (pair.held / "f").exists(), "the name has gone")
    else:
        eventually(lambda: (pair.held / "f").read_bytes() == expected, "the new content")


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (lambda path: os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)), errno.EEXIST),
        (os.mkdir, errno.EEXIST),
        (lambda path: os.symlink("target", path), errno.EEXIST),
    ],
    ids=["create", "mkdir", "symlink"],
)
def test_claim_in_flight(pair: Pair, line: Line, call: Callable[[Path], None], outcome: int) -> None:
    """invalidate_entry waits for the directory, whose lock the kernel holds until the claim is answered."""
    pair.given("echo known > known")
    assert not any((pair.held / name).exists() for name in ("f", "missing"))
    assert (pair.held / "known").read_text() == "known\n"
    with frozen(line) as waits:
        claiming = Background(lambda: call(pair.held / "f"))
        waits()
        with pair.announced(3):
            pair.other.ok("echo theirs > f; echo new > missing; rm known")
    assert errno_of(claiming.join) == outcome
    eventually(lambda: (pair.held / "f").read_text() == "theirs\n", "the others' file")
    eventually((pair.held / "missing").exists, "the name that was missing")
    eventually(lambda: not (pair.held / "known").exists(), "the removed name has gone")


@pytest.mark.parametrize(
    ("call", "script"),
    [
        (lambda root: os.unlink(root / "f"), "echo more >> f; rm known"),
        (lambda root: os.rename(root / "f", root / "moved"), "echo more >> f; rm known; echo new > missing"),
        (lambda root: os.chmod(root / "f", 0o600), "echo more >> f; chmod 640 f"),
        (lambda root: os.truncate(root / "f", 1), "rm f"),
    ],
    ids=["unlink", "rename", "chmod", "truncate"],
)
def test_change_of_a_name_in_flight(pair: Pair, line: Line, call: Callable[[Path], None], script: str) -> None:
    pair.given("echo old > f; echo known > known")
    assert (pair.held / "known").exists() and not (pair.held / "missing").exists()
    with frozen(line) as waits:
        calling = Background(lambda: call(pair.held.root))
        waits()
        with pair.announced():
            pair.other.ok(script)
    assert errno_of(calling.join) in (0, errno.ENOENT, errno.ESTALE)
    names = sorted(path for path in ("f", "known", "moved", "missing") if pair.files.content(path) is not None)
    eventually(lambda: sorted(os.listdir(pair.held.root)) == names, "what Postgres has")
    for name in names:
        eventually(lambda name=name: (pair.held / name).read_bytes() == pair.files.content(name), "its content")


@pytest.mark.parametrize("slow", [False, True], ids=["", "slow"])
@pytest.mark.parametrize("change", ["printf theirs > f", "rm f", "echo theirs > g; mv g f"])
def test_dirty_mapped_page(pair: Pair, line: Line, change: str, slow: bool) -> None:
    """invalidate_inode writes the page back through us, and waits for our answer."""
    pair.given("head -c 8192 /dev/zero | tr '\\0' x > f")
    with contextlib.ExitStack() as stack:
        fd = os.open(pair.held / "f", os.O_RDWR)
        stack.callback(lambda: errno_of(lambda: os.close(fd)))
        view = stack.enter_context(mmap.mmap(fd, 8192))
        # A fault that asks the daemon would hold up this process, and with it the relay to Postgres.
        assert os.pread(fd, 8192, 0) == b"x" * 8192
        view[0:4] = b"mine"
        if slow:
            waits = stack.enter_context(frozen(line))
        with pair.announced():
            pair.other.ok(change)
        if slow and change.startswith("printf"):
            waits()  # the page is on its way back; others are served meanwhile
            pair.mount.status()
    # The page alone, or the whole file where the page came back before the announcement.
    kept = [[b"mine" + b"x" * (size - 4)] for size in (4096, 8192)]
    eventually(lambda: pair.files.conflicts("f") in kept, "the store is kept as a conflict")
    stored = pair.files.content("f")
    eventually(lambda: _content(pair.held / "f") == stored, "what the other session left")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def test_close_that_waits_for_the_row_which_others_change(pair: Pair) -> None:
    pair.given("echo old > f; echo other > g")
    fd = os.open(pair.held / "f", os.O_RDWR | os.O_TRUNC)
    os.write(fd, b"mine")
    dsn = pair.files.namespace.dsn
    with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as watcher:
        holder.execute("UPDATE agent_files SET content = 'theirs' WHERE path = %s", (pair.files.path("f"),))
        closing = Background(lambda: os.close(fd))
        query = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        eventually(lambda: watcher.execute(query).fetchone() is not None, "the commit waits for the row")
        assert (pair.held / "g").read_text() == "other\n", "others are served meanwhile"
        holder.commit()
    assert errno_of(closing.join) == errno.ESTALE
    eventually(lambda: (pair.held / "f").read_text() == "theirs", "the others' text")
    assert pair.files.conflicts("f") == [b"mine"]


def test_storm_of_changes_during_listings(pair: Pair) -> None:
    """A thousand of others, while two processes list all of it over and over."""
    pair.given("for d in $(seq 20); do mkdir d$d; for f in $(seq 10); do echo $f > d$d/f$f; done; done")
    loop = "trap 'exit 0' TERM; while :; do ls -lR > /dev/null; done"
    listing = [pair.held.start(loop) for _ in range(2)]
    namespace = pair.files.namespace
    keys = (namespace.tenant_id, namespace.agent_id)
    where = "tenant_id = %s AND agent_id = %s AND path = %s"
    with psycopg.connect(namespace.dsn, autocommit=True) as conn:
        for number in range(250):
            directory, name = f"d{number % 20 + 1}", f"f{number % 10 + 1}"
            old, new = pair.files.path(f"{directory}/{name}"), pair.files.path(f"{directory}/n{number}")
            conn.execute(f"UPDATE agent_files SET content = %s WHERE {where}", (str(number), *keys, old))
            conn.execute(f"UPDATE agent_files SET path = %s WHERE {where}", (new, *keys, old))
            conn.execute(
                "INSERT INTO agent_files (tenant_id, agent_id, path, content) VALUES (%s, %s, %s, '')", (*keys, old)
            )
            conn.execute(f"DELETE FROM agent_files WHERE {where}", (*keys, old if number % 3 else new))
    for process in listing:
        assert process.poll() is None
        process.terminate()
    for process in listing:
        result = finish(process)
        assert result.code == 0
        assert all("No such file" in line for line in result.err.splitlines()), result.err
    rows = namespace.execute(
        "SELECT path FROM agent_files WHERE tenant_id = %s AND agent_id = %s AND path LIKE %s AND kind = 'file'",
        (*keys, pair.files.path("%")),
    )
    expected = sorted(row[0] for row in rows)
    eventually(lambda: _walk(pair.held) == expected, "the listing is what Postgres has")


def _walk(side: Side) -> list[str]:
    found = [f"{top}/{name}" for top, _, names in os.walk(side.root) for name in names]
    return sorted(path.removeprefix(str(side.mount.path)) for path in found)
