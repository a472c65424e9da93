"""Nodes of a namespace as a tar stream, and back (pax format, nothing seeks).

Decided here and only here: what of an archive is kept. Times to the nanosecond; owners only where the namespace
has one of its own (header FUSEFS.owner), since elsewhere files belong to whoever mounts; sockets have no form in
tar. What an archive may hold: files, directories, symlinks, FIFOs and hard links to files before them, which
become copies. Absolute names, `..` and devices are refused.

Threading: plain blocking reads and writes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal, InvalidOperation
from typing import IO

from fusefs.rules.config import Limits
from fusefs.rules.errors import BadConfig, BadPath, NotSupported, TooLarge
from fusefs.rules.model import Kind
from fusefs.store.archive import Entry

OWNER = "FUSEFS.owner"

_TYPES = {
    Kind.FILE: tarfile.REGTYPE,
    Kind.DIR: tarfile.DIRTYPE,
    Kind.SYMLINK: tarfile.SYMTYPE,
    Kind.FIFO: tarfile.FIFOTYPE,
}
_KINDS = {tarfile.DIRTYPE: Kind.DIR, tarfile.SYMTYPE: Kind.SYMLINK, tarfile.FIFOTYPE: Kind.FIFO}
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HardLink:
    """A name for a file that came before it."""

    entry: Entry
    target: str


class Writer:
    """Writes entries to a stream; `close` ends the archive. Made for one export."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, entry: Entry) -> bool:
        """Add one node. False for a kind that tar has no form for."""
        kind = _TYPES.get(entry.kind)
        if kind is None:
            return False
        headers: dict[str, str] = {}
        info = tarfile.TarInfo(entry.path.lstrip("/"))
        info.type = kind
        info.mode = entry.mode
        info.uid, info.gid = entry.uid or 0, entry.gid or 0
        info.mtime = entry.mtime_ns // _NS
        seconds, nanoseconds = divmod(entry.mtime_ns, _NS)
        if nanoseconds:
            headers["mtime"] = f"{Decimal(seconds) + Decimal(nanoseconds) / _NS:f}"
        if entry.uid is not None or entry.gid is not None:
            headers[OWNER] = f"{_owner_text(entry.uid)}:{_owner_text(entry.gid)}"
        info.pax_headers = headers
        if entry.kind is Kind.SYMLINK:
            info.linkname = entry.content.decode("utf-8", "surrogateescape")
            self._tar.addfile(info)
        elif entry.kind is Kind.FILE:
            info.size = len(entry.content)
            self._tar.addfile(info, io.BytesIO(entry.content))
        else:
            self._tar.addfile(info)
        # tarfile remembers every member it wrote: a namespace of 100,000 files would stay in memory.
        self._tar.members.clear()  # type: ignore[attr-defined]
        return True

    def close(self) -> None:
        self._tar.close()


def _owner_text(number: int | None) -> str:
    return "" if number is None else str(number)


def read(stream: IO[bytes], limits: Limits) -> Iterator[Entry | HardLink]:
    """The nodes of an archive, compressed or not.

    Raises BadConfig for what is no tar archive or ends too early, BadPath for a name that would leave the
    namespace, NotSupported for a device, TooLarge before a file over the limit is read.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as tar:
            for info in tar:
                yield _understand(tar, info, limits)
                tar.members.clear()  # type: ignore[attr-defined]
    except (tarfile.TarError, EOFError, OSError) as exc:
        raise BadConfig(f"the archive on stdin cannot be read: {exc}", hint="Give it the output of `tar c`.") from exc


def _understand(tar: tarfile.TarFile, info: tarfile.TarInfo, limits: Limits) -> Entry | HardLink:
    path = _path(info.name)
    kind = Kind.FILE if info.isreg() or info.islnk() else _KINDS.get(info.type)
    if kind is None:
        what = "a device" if info.ischr() or info.isblk() else "of a kind that is not known"
        raise NotSupported(f"it is {what}", path=path)
    content = b""
    if info.isreg():
        if info.size > limits.max_file_bytes:
            raise TooLarge(f"{info.size} bytes, the limit is {limits.max_file_bytes}", path=path)
        content = _content(tar, info)
    elif kind is Kind.SYMLINK:
        content = info.linkname.encode("utf-8", "surrogateescape")
    uid, gid = _owner(info)
    entry = Entry(path, kind, info.mode & 0o7777, uid, gid, _mtime_ns(info), content)
    return HardLink(entry, _path(info.linkname)) if info.islnk() else entry


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    if file is None:
        return b""
    content = file.read()
    if len(content) != info.size:
        raise tarfile.ReadError("unexpected end of data")
    return content


def _path(name: str) -> str:
    if name.startswith("/"):
        raise BadPath(
            "the archive holds an absolute name", path=name, hint="Make it with relative names: `tar c -C DIR .`"
        )
    if ".." in name.split("/"):
        raise BadPath("the archive holds .. in a name", path=name)
    return "/" + name


def _mtime_ns(info: tarfile.TarInfo) -> int:
    try:
        exact = Decimal(info.pax_headers.get("mtime", str(info.mtime)))
        return int((exact * _NS).to_integral_value(rounding=ROUND_FLOOR))
    except (InvalidOperation, ValueError, OverflowError) as exc:
        raise BadConfig(f"the archive holds a time that is no number, of {info.name}") from exc


def _owner(info: tarfile.TarInfo) -> tuple[int | None, int | None]:
    uid, _, gid = info.pax_headers.get(OWNER, "").partition(":")
    return (int(uid) if uid.isdigit() else None, int(gid) if gid.isdigit() else None)
