"""The file system for fsspec, as its users see it."""

from __future__ import annotations

import csv
import errno
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest

from fusefs.adapters.fsspec import FusefsFileSystem
from tests.harness import Namespace


@pytest.fixture
def open_files(agent: Namespace) -> Iterator[Callable[..., FusefsFileSystem]]:
    """`open_files(session="s1")` as anybody opens it: by its name."""
    opened: list[FusefsFileSystem] = []

    def start(session: str = "s1", principal: str = "agent") -> FusefsFileSystem:
        files = fsspec.filesystem("fusefs", **options_of(agent, session), principal=principal)
        assert isinstance(files, FusefsFileSystem)
        opened.append(files)
        return files

    yield start
    for files in opened:
        files.close()


@pytest.fixture
def files(open_files: Callable[..., FusefsFileSystem]) -> FusefsFileSystem:
    return open_files()


def options_of(agent: Namespace, session: str = "s1") -> dict[str, Any]:
    # fsspec keeps what it opened; a test closes its own.
    return {
        "dsn": agent.dsn,
        "tenant": agent.tenant,
        "agent": agent.agent,
        "session": session,
        "skip_instance_cache": True,
    }


def write(files: FusefsFileSystem, path: str, text: str, mode: str = "w") -> None:
    with files.open(path, mode) as file:
        file.write(text)


def read(files: FusefsFileSystem, path: str) -> str:
    with files.open(path, "r") as file:
        return str(file.read())


def test_files_come_and_go(files: FusefsFileSystem) -> None:
    files.makedirs("/data/raw")
    write(files, "/data/raw/a.csv", "x,y\n1,2\n")
    write(files, "fusefs:///data/b.csv", "z\n")
    assert files.ls("/data", detail=False) == ["/data/b.csv", "/data/raw"]
    assert files.ls("/data/b.csv", detail=False) == ["/data/b.csv"]
    assert [(entry["name"], entry["type"], entry["size"]) for entry in files.ls("fusefs://data")] == [
        ("/data/b.csv", "file", 2),
        ("/data/raw", "directory", None),
    ]
    assert files.glob("/data/**/*.csv") == ["/data/b.csv", "/data/raw/a.csv"]
    assert files.find("/data") == ["/data/b.csv", "/data/raw/a.csv"]
    assert [found for found, _, _ in files.walk("/data")] == ["/data", "/data/raw"]
    assert files.cat("/data/b.csv") == b"z\n"
    assert files.cat_file("/data/raw/a.csv", 2, 4) == b"y\n"
    assert files.du("/data") == 10
    files.mv("/data/raw", "/data/old")
    assert (files.exists("/data/raw"), files.isdir("/data/old"), files.isfile("/data/old/a.csv")) == (False, True, True)
    files.cp("/data/old", "/data/new", recursive=True)
    assert read(files, "/data/new/a.csv") == "x,y\n1,2\n"
    files.rm("/data", recursive=True)
    assert not files.exists("/data")


def test_it_is_opened_by_url(agent: Namespace, files: FusefsFileSystem) -> None:
    """As pandas does it: a text file with the options beside the address."""
    write(files, "/prices.csv", "day,price\nmon,3\ntue,4\n")
    opened = fsspec.open("fusefs:///prices.csv", "r", **options_of(agent))
    try:
        with opened as file:
            assert list(csv.DictReader(file)) == [{"day": "mon", "price": "3"}, {"day": "tue", "price": "4"}]
    finally:
        opened.fs.close()


def test_a_closed_one_is_not_handed_out_again(agent: Namespace) -> None:
    options = {**options_of(agent), "skip_instance_cache": False}
    first = fsspec.filesystem("fusefs", **options)
    assert fsspec.filesystem("fusefs", **options) is first
    first.close()
    second = fsspec.filesystem("fusefs", **options)
    assert second.exists("/memories")
    second.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda files: files.exists("/a"),
        lambda files: files.isfile("/a"),
        lambda files: files.isdir("/a"),
        lambda files: files.find("/"),
        lambda files: files.glob("/**"),
        lambda files: list(files.walk("/")),
        lambda files: files.ls("/"),
    ],
)
def test_what_cannot_be_asked_is_not_shown_as_absent(
    files: FusefsFileSystem, ask: Callable[[FusefsFileSystem], object]
) -> None:
    files.pipe("/a", b"a")
    files.close()
    with pytest.raises(OSError, match="closed") as caught:
        ask(files)
    assert caught.value.errno == errno.EIO


def test_what_is_absent(files: FusefsFileSystem) -> None:
    files.pipe("/a", b"a")
    assert (files.exists("/none"), files.exists("/a/b"), files.isfile("/none"), files.isdir("/none")) == (False,) * 4
    assert (files.find("/none"), files.glob("/none/*"), files.glob("/a/*")) == ([], [], [])


@pytest.mark.parametrize("data", [b"", b"\0\xff" * 1000, "æ".encode()], ids=["empty", "binary", "text"])
def test_bytes_are_bytes(files: FusefsFileSystem, data: bytes) -> None:
    files.pipe("/a", data)
    assert files.cat("/a") == data
    with files.open("/a", "rb") as file:
        assert file.read() == data
    assert files.size("/a") == len(data)


def test_modes(files: FusefsFileSystem) -> None:
    write(files, "/a", "one\n", "x")
    write(files, "/a", "two\n", "a")
    write(files, "/b", "made by append\n", "a")
    assert read(files, "/a") == "one\ntwo\n"
    assert read(files, "/b") == "made by append\n"
    with pytest.raises(FileExistsError):
        write(files, "/a", "x", "x")
    with pytest.raises(OSError, match="mode r\\+b") as caught:
        files.open("/a", "r+b")
    assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(FileExistsError):
        files.pipe_file("/a", b"x", mode="create")
    assert read(files, "/a") == "one\ntwo\n"


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_write_is_checked_against_the_version_that_was_opened(
    open_files: Callable[..., FusefsFileSystem], mode: str
) -> None:
    first, second = open_files("s1"), open_files("s2")
    write(first, "/a", "one\n")
    file = first.open("/a", mode)
    file.write("mine\n")
    write(second, "/a", "two\n")
    with pytest.raises(OSError, match="changed since you read it") as caught:
        file.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, "/a")
    assert read(first, "/a") == "two\n"
    # Whoever opens it now is on top of what is there.
    write(first, "/a", "three\n", "a")
    assert read(second, "/a") == "two\nthree\n"


def test_a_file_is_written_once(files: FusefsFileSystem) -> None:
    with files.open("/a", "wb") as file:
        file.write(b"one")
        assert not files.exists("/a")
        file.close()
        file.close()
    assert (files.cat("/a"), files.info("/a")["version"]) == (b"one", 1)


def test_a_file_that_was_not_there_at_open(open_files: Callable[..., FusefsFileSystem]) -> None:
    first, second = open_files("s1"), open_files("s2")
    file = first.open("/a", "w")
    file.write("mine")
    write(second, "/a", "two\n")
    with pytest.raises(FileExistsError):
        file.close()
    file.close()
    assert read(first, "/a") == "two\n"


@pytest.mark.parametrize(
    ("do", "error", "number"),
    [
        (lambda files: files.cat_file("/none"), FileNotFoundError, errno.ENOENT),
        (lambda files: files.open("/none"), FileNotFoundError, errno.ENOENT),
        (lambda files: files.info("/none"), FileNotFoundError, errno.ENOENT),
        (lambda files: files.ls("/none"), FileNotFoundError, errno.ENOENT),
        (lambda files: files.rm_file("/none"), FileNotFoundError, errno.ENOENT),
        (lambda files: files.mkdir("/none/a", create_parents=False), FileNotFoundError, errno.ENOENT),
        (lambda files: files.cat_file("/dir"), IsADirectoryError, errno.EISDIR),
        (lambda files: files.open("/dir", "wb"), IsADirectoryError, errno.EISDIR),
        (lambda files: files.pipe_file("/a/b", b"x"), NotADirectoryError, errno.ENOTDIR),
        (lambda files: files.mkdir("/dir"), FileExistsError, errno.EEXIST),
        (lambda files: files.makedirs("/dir"), FileExistsError, errno.EEXIST),
        (lambda files: files.mv("/a", "/dir"), FileExistsError, errno.EEXIST),
        (lambda files: files.rmdir("/dir"), OSError, errno.ENOTEMPTY),
        (lambda files: files.pipe_file("/memories/x", b"x"), PermissionError, errno.EACCES),
        (lambda files: files.pipe_file("/big", bytes(2 * 1024 * 1024)), OSError, errno.EFBIG),
        (lambda files: files.cat_file("/../a"), OSError, errno.EINVAL),
    ],
)
def test_refusals_are_errors_of_the_system(
    files: FusefsFileSystem, do: Callable[[FusefsFileSystem], object], error: type[OSError], number: int
) -> None:
    files.pipe({"/a": b"a", "/dir/b": b"b"})
    with pytest.raises(error) as caught:
        do(files)
    assert caught.value.errno == number
    assert files.cat("/a") == b"a"
    assert files.cat("/dir/b") == b"b"


def test_an_admin_writes_where_an_agent_may_not(open_files: Callable[..., FusefsFileSystem]) -> None:
    open_files(principal="admin").pipe("/memories/x", b"x")
    assert open_files().cat("/memories/x") == b"x"


def test_what_is_there_already_may_be_made(files: FusefsFileSystem) -> None:
    files.makedirs("/dir", exist_ok=True)
    files.makedirs("/dir", exist_ok=True)
    assert files.modified("/dir").year > 2000


def test_what_cannot_be_opened(agent: Namespace) -> None:
    """It fails closed (HF-15)."""
    options = options_of(agent)
    del options["session"]
    with pytest.raises(TypeError, match="session"):
        fsspec.filesystem("fusefs", **options)
