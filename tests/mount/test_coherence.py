"""What one session changes is seen by another through everything that the kernel keeps.

A plain directory is the model: the same change is made in it, and what a process sees there, through names that it
looked up before and through files, mappings and streams that it holds open, is what the other session must see.

Each way of seeing has a tree of its own, so that none is helped by what another makes the kernel ask for.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests import harness
from tests.mount.sides import Duo, HostFolder, Side, View, eventually

_numbers = itertools.count(1)
PAGE = 4096

MAKE = """
echo kept > kept; printf %06000d 1 > text; echo gone > gone; echo old > old
mkdir dir empty; echo inner > dir/inner; ln -s kept link
"""
HELD = ("kept", "text", "gone", "old", "dir/inner")
STREAMS = (".", "dir", "empty")
MISSING = ("made", "made-dir", "made-dir/x", "new", "moved", "moved/inner")
NAMES = (*HELD, "dir", "empty", "link", *MISSING)

CHANGES = {
    "create": "echo made > made",
    "write": "seq 2000 > text",
    "write-same-size": "printf %06000d 2 > text",
    "append": "echo more >> text",
    "truncate": "truncate -s 100 text",
    "rename-file": "mv old new",
    "rename-over": "mv old text",
    "rename-directory": "mv dir moved",
    "delete": "rm gone",
    "delete-and-create": "rm gone; echo again > gone",
    "chmod": "chmod 640 text; chmod 700 dir",
    "symlink": "ln -sfn text link",
    "mkdir": "mkdir made-dir; echo x > made-dir/x",
    "rmdir": "rmdir empty",
    "remove-tree": "rm -r dir",
}

# A program that knows only the seed's columns, and what it comes to in a directory.
_KEYS = "tenant_id = %(tenant)s AND agent_id = %(agent)s"
_INSERT = (
    "INSERT INTO agent_files (id, tenant_id, agent_id, path, content, size_bytes, version, created_at, updated_at)"
    " VALUES (gen_random_uuid(), %(tenant)s, %(agent)s, %(top)s || '{}', '{}', {}, 1, now(), now())"
)
_UPDATE = (
    "UPDATE agent_files SET content = '{}', size_bytes = {}, version = version + 1, updated_at = now()"
    f" WHERE {_KEYS} AND path = %(top)s || '{{}}'"
)
_DELETE = f"DELETE FROM agent_files WHERE {_KEYS} AND path = %(top)s || '{{}}'"
_MOVE = (
    f"UPDATE agent_files SET path = %(top)s || '{{}}', updated_at = now() WHERE {_KEYS} AND path = %(top)s || '{{}}'"
)
_MOVE_TREE = (
    "UPDATE agent_files SET path = %(top)s || '{1}' || substr(path, length(%(top)s || '{0}') + 1), updated_at = now()"
    f" WHERE {_KEYS} AND (path = %(top)s || '{{0}}' OR path LIKE %(top)s || '{{0}}/%%')"
)
SQL_CHANGES = {
    "insert": (_INSERT.format("/made", "made", 4), "printf made > made"),
    "insert-in-a-new-directory": (_INSERT.format("/made-dir/x", "x", 1), "mkdir made-dir; printf x > made-dir/x"),
    "update": (_UPDATE.format("by sql", 6, "/text"), "printf 'by sql' > text"),
    "delete": (_DELETE.format("/gone"), "rm gone"),
    "rename": (_MOVE.format("/new", "/old"), "mv old new"),
    "rename-over": (f"{_DELETE.format('/text')}; {_MOVE.format('/text', '/old')}", "mv old text"),
    "rename-directory": (_MOVE_TREE.format("/dir", "/moved"), "mv dir moved"),
}


@pytest.fixture(scope="module", params=["two-daemons", "one-host"])
def mounts(request: pytest.FixtureRequest, module_mount: harness.MountFactory) -> tuple[View, ...]:
    """Two sessions of one agent: in a daemon each, or both in the daemon of a host."""
    names = ("s-one", "s-two")
    if request.param == "two-daemons":
        return tuple(module_mount(session=name) for name in names)
    host = module_mount(layout="host")
    agent = host.path / module_mount.namespace.tenant / module_mount.namespace.agent
    folders = tuple(HostFolder(agent / f"{name}-hosted", f"{name}-hosted") for name in names)
    for folder in folders:
        folder.path.mkdir()
    return folders


@pytest.fixture
def duo(mounts: tuple[View, ...], module_namespace: harness.Namespace) -> Iterator[Duo]:
    found = Duo(mounts, module_namespace, f"d{next(_numbers)}")
    yield found
    found.close()


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_ushort),
        ("type", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = ctypes.c_void_p
_libc.readdir.restype = ctypes.POINTER(_Dirent)
for _function in (_libc.readdir, _libc.rewinddir, _libc.closedir):
    _function.argtypes = (ctypes.c_void_p,)


class Stream:
    """An open directory stream, as opendir(3) gives it."""

    def __init__(self, path: Path) -> None:
        self._dir = _libc.opendir(os.fsencode(path))
        assert self._dir

    def rewound(self) -> list[str]:
        """rewinddir(3), and every name from there on."""
        _libc.rewinddir(self._dir)
        names = []
        while entry := _libc.readdir(self._dir):
            names.append(os.fsdecode(entry.contents.name))
        return sorted(set(names) - {".", ".."})

    def close(self) -> None:
        _libc.closedir(self._dir)


def state(found: os.stat_result) -> tuple[str, int | None]:
    """Kind and mode, and the size where it means something."""
    return stat.filemode(found.st_mode), None if stat.S_ISDIR(found.st_mode) else found.st_size


def state_at(path: Path) -> object:
    try:
        return state(os.lstat(path)), os.readlink(path) if path.is_symlink() else None
    except FileNotFoundError:
        return None


def content_at(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


class Watcher:
    """A process that has looked at all of a tree and holds what it can, and what it sees by that."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held = {name: os.open(root / name, os.O_RDONLY) for name in HELD}
        self._mapped = {
            name: mmap.mmap(fd, min(os.fstat(fd).st_size, PAGE), mmap.MAP_SHARED, mmap.PROT_READ)
            for name, fd in self._held.items()
        }
        self._streams = {name: Stream(root / name) for name in STREAMS}
        for _ in range(2):
            for way in WAYS.values():
                way(self)

    def close(self) -> None:
        for mapped in self._mapped.values():
            mapped.close()
        for fd in self._held.values():
            os.close(fd)
        for stream in self._streams.values():
            stream.close()

    def mapped_pages(self) -> dict[str, bytes]:
        return {name: mapped[:] for name, mapped in self._mapped.items()}

    def pages_of_open_files(self) -> dict[str, bytes]:
        return {name: os.pread(fd, 1 << 20, 0) for name, fd in self._held.items()}

    def attributes_of_open_files(self) -> dict[str, object]:
        return {
            name: (state(found := os.fstat(fd)), "removed" if found.st_nlink == 0 else "there")
            for name, fd in self._held.items()
        }

    def names(self) -> dict[str, object]:
        """Entries that the kernel remembers, present and absent, with their attributes."""
        return {name: state_at(self.root / name) for name in NAMES}

    def open_streams(self) -> dict[str, list[str]]:
        return {name: stream.rewound() for name, stream in self._streams.items()}

    def listings(self) -> list[tuple[str, list[str], list[str]]]:
        """Fresh passes over every directory."""
        walked = os.walk(self.root)
        return sorted((os.path.relpath(top, self.root), sorted(dirs), sorted(files)) for top, dirs, files in walked)

    def contents(self) -> dict[str, bytes | None]:
        """Every file by its name, opened and read afresh."""
        return {name: content_at(self.root / name) for name in NAMES if name != "link"}


WAYS: dict[str, Callable[[Watcher], object]] = {
    "mapped-pages": Watcher.mapped_pages,
    "pages-of-open-files": Watcher.pages_of_open_files,
    "attributes-of-open-files": Watcher.attributes_of_open_files,
    "names": Watcher.names,
    "open-streams": Watcher.open_streams,
    "listings": Watcher.listings,
    "contents": Watcher.contents,
}


class Trees:
    """A tree for each way of seeing, and the model."""

    def __init__(self, maker: Side, watchers: list[Side], plain: Path) -> None:
        plain.mkdir()
        script(MAKE, plain)
        maker.ok(f"for way in {' '.join(WAYS)}; do mkdir $way; cd $way; {MAKE} cd ..; done")
        for side in watchers:
            eventually((side / [*WAYS][-1] / "link").is_symlink, "the trees in the watching session")
        self.model = Watcher(plain)
        self.seen = [(way, Watcher(side / way)) for side in watchers for way in WAYS]

    def agree(self, change: str) -> None:
        """Wait until each way of seeing shows what it shows in the model."""
        for way, watcher in self.seen:
            look = WAYS[way]
            expected = look(self.model)
            try:
                eventually(lambda look=look, watcher=watcher, expected=expected: look(watcher) == expected, way)
            except AssertionError:
                assert look(watcher) == expected, f"{way} after {change}"
                raise

    def close(self) -> None:
        self.model.close()
        for _, watcher in self.seen:
            watcher.close()


def script(text: str, directory: Path) -> None:
    subprocess.run(["bash", "-ec", text], cwd=directory, check=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_seen_through_everything_that_the_kernel_keeps(duo: Duo, tmp_path: Path, change: str) -> None:
    with contextlib.closing(Trees(duo.b, [duo.a], tmp_path / "model")) as trees:
        script(CHANGES[change], tmp_path / "model")
        duo.b.ok(f"for way in {' '.join(WAYS)}; do cd $way; {CHANGES[change]}; cd ..; done")
        trees.agree(change)
        for way, name in itertools.product(WAYS, HELD):
            if (duo.b / way / name).exists():
                times = [os.stat(side / way / name).st_mtime_ns for side in duo.sides]
                assert times[0] == times[1], f"the time of {way}/{name} is not the writer's"


@pytest.mark.parametrize("change", SQL_CHANGES)
def test_change_by_sql_is_seen_through_everything_that_the_kernel_keeps(duo: Duo, tmp_path: Path, change: str) -> None:
    statements, model = SQL_CHANGES[change]
    namespace = duo.files.namespace
    keys = {"tenant": namespace.tenant_id, "agent": namespace.agent_id}
    with (
        contextlib.closing(Trees(duo.b, [duo.a, duo.b], tmp_path / "model")) as trees,
        psycopg.connect(namespace.dsn, autocommit=True) as conn,
    ):
        script(model, tmp_path / "model")
        for way in WAYS:
            with conn.transaction():
                for statement in statements.split("; "):
                    conn.execute(statement, {**keys, "top": duo.files.path(way)})  # type: ignore[call-overload]
        trees.agree(change)


def test_the_kernel_answers_by_itself_until_there_is_a_change(
    module_mount: harness.MountFactory, tmp_path: Path
) -> None:
    """Otherwise the tests above would prove nothing about its caches."""
    mount = module_mount(session="s-alone")
    (mount.path / "alone").mkdir()
    script(MAKE, mount.path / "alone")
    with contextlib.closing(Watcher(mount.path / "alone")) as watcher:
        with mount.counting() as counting:
            watcher.mapped_pages()
            watcher.pages_of_open_files()
            watcher.attributes_of_open_files()
            watcher.names()
        # A symlink's text is not kept, and reading it makes its times doubtful.
        assert counting.counts.requests == {"readlink": 1, "getattr": 1}
        with mount.counting() as counting:
            watcher.contents()
            watcher.listings()
            watcher.open_streams()
        assert not {"lookup", "read"} & set(counting.counts.requests), counting.counts.requests


@pytest.mark.parametrize("by", ["session", "sql"])
def test_process_in_a_directory_that_was_renamed_goes_on(duo: Duo, by: str) -> None:
    duo.b.ok("mkdir d; echo inner > d/inner; mkdir d/below; echo deep > d/below/deep")
    eventually((duo.a / "d" / "below" / "deep").exists, "the directory in session a")
    go_on = "read -r; set -e; cat inner; cat below/deep; echo made > made; mkdir made-dir; ls; pwd -P; cd ..; ls"
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(
        ["bash", "-c", go_on],
        cwd=duo.a / "d",
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        if by == "session":
            duo.b.ok("mv d e")
        else:
            namespace = duo.files.namespace
            keys = {"tenant": namespace.tenant_id, "agent": namespace.agent_id, "top": duo.files.path("")[:-1]}
            with psycopg.connect(namespace.dsn, autocommit=True) as conn:
                conn.execute(_MOVE_TREE.format("/d", "/e"), keys)  # type: ignore[call-overload]
        eventually((duo.a / "e" / "inner").exists, "the new name in session a")
        eventually(lambda: not (duo.a / "d").exists(), "the old name has gone in session a")
        out, err = process.communicate("go\n", timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.split() == ["inner", "deep", "below", "inner", "made", "made-dir", str(duo.a / "e"), "e"]
    eventually(lambda: (duo.b / "e" / "made").read_text() == "made\n", "what it made, in session b")
    assert (duo.b / "e" / "made-dir").is_dir()
    assert not (duo.b / "d").exists()
