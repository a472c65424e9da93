"""Announcements that do not arrive: what a reader may still see until the loss is noticed, and only the new after it.

The bound is in docs/internals/coherence.md: a heartbeat after 5 s of silence, and 5 s for its answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from tests import harness
from tests.mount.sides import eventually
from tests.relay import Line, Which

_numbers = itertools.count(1)
NOTICED_S = 10.0
SLACK_S = 3.0
"""A machine with other work to do gets this much longer before it is a failure."""


class Table:
    """A program that knows only the seed's columns, in one directory."""

    def __init__(self, namespace: harness.Namespace, directory: str) -> None:
        self.conn = psycopg.connect(namespace.dsn, autocommit=True)
        self._keys = {"tenant": namespace.tenant_id, "agent": namespace.agent_id}
        self._directory = directory

    def _run(self, statement: str, name: str, **values: object) -> None:
        keys = {**self._keys, "path": f"/{self._directory}/{name}", **values}
        self.conn.execute(statement, keys)  # type: ignore[call-overload]

    def insert(self, name: str, text: str) -> None:
        self._run(
            "INSERT INTO agent_files (tenant_id, agent_id, path, content) VALUES (%(tenant)s, %(agent)s, %(path)s,"
            " %(text)s)",
            name,
            text=text,
        )

    def update(self, name: str, text: str) -> None:
        self._run(
            "UPDATE agent_files SET content = %(text)s"
            " WHERE tenant_id = %(tenant)s AND agent_id = %(agent)s AND path = %(path)s",
            name,
            text=text,
        )

    def rename(self, name: str, new: str) -> None:
        self._run(
            "UPDATE agent_files SET path = %(new)s"
            " WHERE tenant_id = %(tenant)s AND agent_id = %(agent)s AND path = %(path)s",
            name,
            new=f"/{self._directory}/{new}",
        )

    def move_tree(self, name: str, new: str) -> None:
        self._run(
            "UPDATE agent_files SET path = %(new)s || substr(path, length(%(path)s) + 1)"
            " WHERE tenant_id = %(tenant)s AND agent_id = %(agent)s"
            " AND (path = %(path)s OR path LIKE %(path)s || '/%%')",
            name,
            new=f"/{self._directory}/{new}",
        )

    def delete(self, name: str) -> None:
        self._run(
            "DELETE FROM agent_files WHERE tenant_id = %(tenant)s AND agent_id = %(agent)s AND path = %(path)s", name
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a process sees, by names and through what it holds open."""

    text: str
    size: int
    through_descriptor: str
    names: tuple[str, ...]
    there: tuple[bool, ...]


class Reader:
    """A mount whose link to Postgres can be lost, and a process that holds files of one directory open."""

    def __init__(self, mount: harness.Mount, line: Line, namespace: harness.Namespace) -> None:
        self.mount = mount
        self.line = line
        self.namespace = namespace

    @contextlib.contextmanager
    def watching(self) -> Iterator[Table]:
        """A directory with the file `f`, known to the kernel in every way, and the name `n1`, known as missing."""
        name = f"d{next(_numbers)}"
        self.root = self.mount.path / name
        table = Table(self.namespace, name)
        with table.conn, contextlib.ExitStack() as stack:
            table.insert("n0", "")
            table.insert("f", "text 0")
            eventually((self.root / "f").exists, "the directory")
            self._fd = os.open(self.root / "f", os.O_RDONLY)
            stack.callback(os.close, self._fd)
            self._mapped = stack.enter_context(mmap.mmap(self._fd, 6, mmap.MAP_SHARED, mmap.PROT_READ))
            for _ in range(2):
                assert self.seen(0) == self.expected(0)
                assert self.mapped == "text 0"
            yield table

    @staticmethod
    def change(table: Table, number: int) -> None:
        """The change with this number: another text and size, one name less, one more."""
        table.update("f", f"text {number}" + "." * number)
        table.delete(f"n{number - 1}")
        table.insert(f"n{number}", "")

    @staticmethod
    def expected(number: int) -> Seen:
        text = f"text {number}" + "." * number
        return Seen(text, len(text), text, ("f", f"n{number}"), (False, True, False))

    def seen(self, number: int) -> Seen:
        """What is seen of the change with this number, by opening, stat(2), an open descriptor, a listing, and
        looking up the names before, of and after it."""
        return Seen(
            (self.root / "f").read_text(),
            os.stat(self.root / "f").st_size,
            os.pread(self._fd, 1000, 0).decode(),
            tuple(sorted(os.listdir(self.root))),
            tuple((self.root / f"n{each}").exists() for each in (number - 1, number, number + 1)),
        )

    @property
    def mapped(self) -> str:
        """The mapped page. The kernel reads it, in a system call: a page fault of this process would hold up its
        other threads, and with them the relay through which the daemon asks Postgres."""
        reader, writer = os.pipe()
        try:
            with memoryview(self._mapped) as view:
                os.write(writer, view)
            return os.read(reader, len(self._mapped)).decode()
        finally:
            os.close(reader)
            os.close(writer)

    @property
    def live(self) -> bool:
        return bool(self.mount.status()["live"])

    def losses(self) -> int:
        """How often the daemon has noticed a loss."""
        return sum(event.get("event") == "follow.lost" for event in self.mount.log_events())

    def is_as_before(self, table: Table, number: int) -> None:
        """Announcements are live, the kernel answers by itself again, and the next change is seen."""
        eventually(lambda: self.live, "announcements are live again")
        eventually(lambda: self.seen(number) == self.expected(number), "what Postgres has")
        eventually(lambda: self.mapped == f"text {number}", "the mapped page")
        eventually(self._answers_alone, "the kernel answers by itself")
        self.change(table, number + 1)
        eventually(lambda: self.seen(number + 1) == self.expected(number + 1), "the next change")
        eventually(lambda: self.mapped == f"text {number + 1}", "the next change, mapped")

    def _answers_alone(self) -> bool:
        names = [self.root / name for name in ("f", "missing")]
        for path in names:
            path.exists()
        with self.mount.counting() as counting:
            for path in names:
                path.exists()
        return counting.counts.total == 0


@pytest.fixture(scope="module")
def lines(module_pg: str) -> Iterator[list[Line]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Line(module_pg)) for _ in range(2)]


@pytest.fixture(scope="module")
def readers(
    lines: list[Line], module_mount: harness.MountFactory, module_namespace: harness.Namespace
) -> Iterator[list[Reader]]:
    """Two mounts with a link each. The lines come first, so that the mounts end before them."""
    yield [
        Reader(module_mount(session=f"s-{number}", dsn=line.dsn), line, module_namespace)
        for number, line in enumerate(lines)
    ]
    for line in lines:
        line.thaw()


@pytest.fixture
def reader(readers: list[Reader]) -> Iterator[Reader]:
    yield readers[0]
    readers[0].line.thaw()


def test_connection_cut_and_kept_away(reader: Reader) -> None:
    with reader.watching() as table:
        before = reader.losses()
        reader.line.freeze(Which.LISTENER)
        reader.change(table, 1)
        assert reader.seen(1) == Seen("text 0", 6, "text 0", ("f", "n0"), (True, False, False)), "it is not announced"
        reader.line.cut(Which.LISTENER)
        eventually(lambda: reader.losses() > before and not reader.live, "the loss is noticed")
        eventually(lambda: reader.seen(1) == reader.expected(1), "the kernel's caches are void")
        eventually(lambda: reader.mapped == "text 1", "the mapped page is void")
        for number in range(2, 9):
            reader.change(table, number)
            assert reader.seen(number) == reader.expected(number), "stale after the loss was noticed"
        assert not reader.live
        reader.line.thaw()
        reader.is_as_before(table, 8)


@pytest.mark.parametrize("back", [False, True], ids=["away", "back"])
def test_names_in_use_are_void_too_after_a_loss(reader: Reader, back: bool) -> None:
    """The kernel keeps the name of what is open when the name above it is dropped."""
    with reader.watching() as table, contextlib.ExitStack() as stack:
        for name in ("in/gone", "in/moved", "in/replaced", "in/dir/f"):
            table.insert(name, "old")
        top = reader.root / "in"
        eventually((top / "dir" / "f").exists, "what is given")
        for name in ("gone", "moved", "replaced", "dir"):
            stack.callback(os.close, os.open(top / name, os.O_RDONLY))
        before = reader.losses()
        reader.line.freeze(Which.LISTENER)
        table.delete("in/gone")
        table.rename("in/moved", "in/new")
        table.delete("in/replaced")
        table.insert("in/replaced", "another")
        table.move_tree("in/dir", "in/dir2")
        reader.change(table, 1)
        reader.line.cut(Which.LISTENER)
        if back:
            reader.line.thaw()
        eventually(lambda: reader.losses() > before and reader.live is back, "the loss is noticed")
        eventually(lambda: reader.seen(1).there == reader.expected(1).there, "the kernel's caches are void")
        there = {name for name in ("gone", "moved", "new", "replaced") if (top / name).exists()}
        text = (top / "replaced").read_text()
        assert (there, text) == ({"new", "replaced"}, "another"), "stale after the loss was noticed"
        # A directory in use keeps its name until it is asked for.
        eventually(lambda: not (top / "dir").exists(), "the old name of the directory has gone")
        assert (top / "dir2" / "f").read_text() == "old"
        assert set(os.listdir(top)) == {"new", "replaced", "dir2"}


@pytest.mark.parametrize("how", ["cut", "terminated"])
def test_connection_lost_and_back_at_once(reader: Reader, how: str) -> None:
    # By the lock of who follows: what the connection asked last may be LISTEN, or whether it is alone by now.
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
        " WHERE locktype = 'advisory' AND granted AND datname = current_database()"
    )
    with reader.watching() as table:
        for number in range(1, 9):
            eventually(lambda: reader.live, "announcements are live")
            before = reader.losses()

            def lost(before: int = before) -> bool:
                return reader.losses() > before

            if how == "cut":
                reader.line.freeze(Which.LISTENER)
                reader.change(table, number)
                reader.line.cut(Which.LISTENER)
                reader.line.thaw()
                eventually(lost, "the loss is noticed")
            else:
                # It is live a moment before it has the lock.
                eventually(lambda lost=lost: table.conn.execute(end) and lost(), "the loss is noticed")  # type: ignore[misc]
                reader.change(table, number)
            eventually(
                lambda number=number: reader.seen(number) == reader.expected(number),  # type: ignore[misc]
                f"change {number}",
            )
        reader.is_as_before(table, 8)


def test_l03_what_a_reader_sees_while_the_link_is_down(readers: list[Reader]) -> None:
    """Half open, where the server is not there any more, and stalled, where nothing comes through: nobody is told.
    Until the loss is noticed a reader sees all of the old; from then on only the new. Both at once, since it takes
    a heartbeat and its silence."""
    half_open, stalled = readers
    with half_open.watching() as one, stalled.watching() as two:
        tables = {half_open: one, stalled: two}
        noticed: dict[Reader, float] = {}
        before = {reader: reader.losses() for reader in readers}
        half_open.line.strand(Which.LISTENER)
        stalled.line.freeze(Which.LISTENER)
        began = time.monotonic()
        for reader, table in tables.items():
            reader.change(table, 1)
        old = Seen("text 0", 6, "text 0", ("f", "n0"), (True, False, False))
        while len(noticed) < len(readers):
            for reader in readers:
                seen = reader.seen(1)
                if reader.losses() > before[reader]:
                    noticed.setdefault(reader, time.monotonic() - began)
                else:
                    assert (seen, reader.mapped) == (old, "text 0")
            assert time.monotonic() - began < NOTICED_S + SLACK_S, "the loss is not noticed"
            time.sleep(0.02)
        for reader in readers:
            eventually(lambda reader=reader: reader.seen(1) == reader.expected(1), "the new")  # type: ignore[misc]
            eventually(lambda reader=reader: reader.mapped == "text 1", "the new, mapped")  # type: ignore[misc]
        for number in range(2, 6):
            stalled.change(two, number)
            assert stalled.seen(number) == stalled.expected(number), "stale after the loss was noticed"
        assert not stalled.live, "no connection comes through"
        stalled.line.thaw()
        half_open.is_as_before(one, 1)
        stalled.is_as_before(two, 5)


def test_announcement_that_is_too_long(reader: Reader) -> None:
    """Control characters take six bytes each in JSON: two such paths are more than NOTIFY takes."""
    with reader.watching() as table, psycopg.connect(reader.namespace.dsn, autocommit=True) as conn:
        ((channel,),) = reader.namespace.execute(
            "SELECT channel FROM agent_namespaces WHERE tenant_id = %s AND agent_id = %s",
            (reader.namespace.tenant_id, reader.namespace.agent_id),
        )
        conn.execute(f'LISTEN "{channel}"')
        long = [f"{letter}/" + "/".join(["é" + "\x01" * 240] * 4) for letter in "ab"]
        table.insert(long[0], "long")
        eventually(lambda: (reader.root / long[0]).read_text() == "long", "the long path")
        assert not (reader.root / long[1]).exists()
        table.rename(long[0], long[1])
        eventually(lambda: (reader.root / long[1]).read_text() == "long", "the new name")
        eventually(lambda: not (reader.root / long[0]).exists(), "the old name has gone")
        sent = [json.loads(notify.payload) for notify in conn.notifies(timeout=0.1)]
        assert ["", "reload"] in sent
        reader.change(table, 1)
        eventually(lambda: {"f", "n1"} < set(os.listdir(reader.root)), "the next change")
        eventually(lambda: reader.mapped == "text 1", "the next change, mapped")


def test_burst_of_20000_changes(reader: Reader) -> None:
    count, rounds = 500, 40
    with reader.watching() as table:
        burst = reader.root / "burst"
        assert not burst.exists()
        keys = {"tenant": reader.namespace.tenant_id, "agent": reader.namespace.agent_id, "top": f"/{reader.root.name}"}
        paths = [burst / f"f{number}" for number in range(1, count + 1)]
        table.conn.execute(
            "INSERT INTO agent_files (tenant_id, agent_id, path, content)"
            " SELECT %(tenant)s, %(agent)s, %(top)s || '/burst/f' || n, 'made' FROM generate_series(1, %(count)s) n",
            {**keys, "count": count},
        )
        eventually(lambda: {path.read_text() for path in paths} == {"made"}, "the new files")
        with table.conn.transaction():
            for number in range(2, rounds + 1):
                table.conn.execute(
                    "UPDATE agent_files SET content = path || %(text)s"
                    " WHERE tenant_id = %(tenant)s AND agent_id = %(agent)s AND path LIKE %(top)s || '/burst/f%%'",
                    {**keys, "text": f" {number}"},
                )
        reader.change(table, 1)
        expected = [f"/{path.relative_to(reader.mount.path)} {rounds}" for path in paths]
        eventually(lambda: [os.stat(path).st_size for path in paths] == [*map(len, expected)], "the last sizes")
        # The sizes are the same from the tenth round on.
        eventually(lambda: [path.read_text() for path in paths] == expected, "the last texts")
        eventually(lambda: reader.mapped == "text 1", "the change behind them")
        assert reader.seen(1).text == "text 1."
