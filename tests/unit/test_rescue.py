"""The rescue directory: whole files or none, ours alone, and nothing that a stranger puts there is believed."""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path

import pytest

from fusefs.core.rescue import RescueDirectory
from fusefs.rules.errors import Corrupt, NotFound, RescueFailed
from fusefs.rules.model import Attrs
from fusefs.rules.scope import Principal, Scope
from fusefs.store.rescue import Rescued

SCOPE = Scope(str(uuid.uuid4()), str(uuid.uuid4()), "s1", Principal.AGENT)
WRITE = Rescued(
    "/notes\n%s.md",
    str(uuid.uuid4()),
    7,
    append=False,
    write_id=str(uuid.uuid4()),
    taken=3,
    attrs=Attrs(0o640, None, 7, 123),
)


@pytest.fixture
def directory(tmp_path: Path) -> RescueDirectory:
    return RescueDirectory(str(tmp_path / "deep" / "rescue"))


def where(directory: RescueDirectory) -> Path:
    assert directory.path is not None
    return Path(directory.path)


def test_round_trip(directory: RescueDirectory) -> None:
    assert directory.list_kept() == ([], [])
    content = b"first line\n\0\xff"
    kept_id = directory.keep(SCOPE, WRITE, content, "Unavailable")
    kept, found = directory.read(kept_id)
    assert found == content
    assert (kept.id, kept.size, kept.reason, kept.scope, kept.rescued) == (
        kept_id,
        len(content),
        "Unavailable",
        SCOPE,
        WRITE,
    )
    assert directory.list_kept() == ([kept], [])
    directory.drop(kept_id)
    assert directory.list_kept() == ([], [])
    for gone in (directory.read, directory.drop):
        with pytest.raises(NotFound):
            gone(kept_id)


def test_only_the_owner_can_read_it(directory: RescueDirectory) -> None:
    old = os.umask(0)
    try:
        kept_id = directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    finally:
        os.umask(old)
    assert stat.S_IMODE(where(directory).stat().st_mode) == 0o700
    assert stat.S_IMODE((where(directory) / f"{kept_id}.rescued").stat().st_mode) == 0o600


def test_the_oldest_comes_first(directory: RescueDirectory) -> None:
    ids = [directory.keep(SCOPE, WRITE, b"x" * number, "Unavailable") for number in range(5)]
    assert [kept.id for kept in directory.list_kept()[0]] == ids


@pytest.mark.parametrize("kept_id", ["", "../../etc/passwd", "0" * 31, "0" * 32, "A" * 32])
def test_ids_that_name_nothing(directory: RescueDirectory, kept_id: str) -> None:
    directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    for call in (directory.read, directory.drop):
        with pytest.raises(NotFound):
            call(kept_id)


def test_a_directory_that_others_can_enter_is_refused(directory: RescueDirectory) -> None:
    where(directory).mkdir(parents=True, mode=0o755)
    with pytest.raises(RescueFailed, match="0700"):
        directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    with pytest.raises(RescueFailed, match="0700"):
        directory.list_kept()


def test_a_symlink_in_place_of_the_directory_is_refused(directory: RescueDirectory, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    where(directory).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RescueFailed):
        directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (
        RescueDirectory(None),
        RescueDirectory(str(tmp_path / "file")),
        RescueDirectory("/proc/no/where"),
    ):
        with pytest.raises(RescueFailed):
            directory.keep(SCOPE, WRITE, b"x", "Unavailable")


def test_a_full_disk_leaves_nothing_behind(directory: RescueDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.keep(SCOPE, WRITE, b"x", "Unavailable")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RescueFailed, match="No space left"):
        directory.keep(SCOPE, WRITE, b"y", "Unavailable")
    assert len(os.listdir(where(directory))) == 1


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n", b"[1]\n", b'{"id": 1}\nx'])
def test_files_that_are_not_ours(directory: RescueDirectory, content: bytes) -> None:
    good = directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    name = f"{'0' * 32}.rescued"
    (where(directory) / name).write_bytes(content)
    found, broken = directory.list_kept()
    assert [kept.id for kept in found] == [good] and broken == [name]
    with pytest.raises(Corrupt):
        directory.read("0" * 32)


def test_links_and_fifos_are_not_followed(directory: RescueDirectory) -> None:
    good = directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    (where(directory) / f"{'1' * 32}.rescued").symlink_to(where(directory) / f"{good}.rescued")
    os.mkfifo(where(directory) / f"{'2' * 32}.rescued")
    found, broken = directory.list_kept()
    assert [kept.id for kept in found] == [good] and len(broken) == 2


def test_a_file_cut_short(directory: RescueDirectory) -> None:
    kept_id = directory.keep(SCOPE, WRITE, b"0123456789", "Unavailable")
    path = where(directory) / f"{kept_id}.rescued"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(Corrupt, match="9 bytes instead of 10"):
        directory.read(kept_id)


def test_what_a_killed_writer_left_is_told(directory: RescueDirectory) -> None:
    good = directory.keep(SCOPE, WRITE, b"x", "Unavailable")
    part = where(directory) / f"{'3' * 32}.part"
    part.write_bytes(b"{")
    assert directory.list_kept()[1] == [], "somebody may be writing it"
    os.utime(part, (1, 1))
    found, broken = directory.list_kept()
    assert [kept.id for kept in found] == [good] and broken == [part.name]
