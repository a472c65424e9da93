"""The rescue directory: bytes that Postgres did not take, on the local disk until they are put back.

Decided here and only here: where such bytes lie and in which form. One file each, 0600 in a directory of 0700
that is ours, under a random name; a line of JSON, then the bytes. A file is whole or not there: written under
another name, flushed to the disk, renamed. No symlink is followed.

Threading: plain blocking calls, safe in any thread; the daemon makes them in a worker thread.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from fusefs.rules.errors import BadScope, Corrupt, NotFound, RescueFailed
from fusefs.rules.model import Attrs
from fusefs.rules.scope import Principal, Scope
from fusefs.store.rescue import Rescued

_NAME = re.compile(r"([0-9a-f]{32})\.rescued")
_HEADER_MAX = 64 * 1024
_WRITING_S = 60.0
MAX_BYTES = 1 << 30
"""What the directory holds at most: an outage must not let an agent fill the machine's disk."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One file of the directory. `at` in seconds since 1970; `size` in bytes of content."""

    id: str
    at: float
    size: int
    reason: str
    scope: Scope
    rescued: Rescued


class RescueDirectory:
    """The rescued writes of this machine, or of this user.

    Args:
        path: made on first use. None: there is none, and every `keep` fails.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path

    def keep(self, scope: Scope, rescued: Rescued, content: bytes, reason: str) -> str:
        """Store the bytes of a write. Returns the id. Raises RescueFailed, with nothing left behind."""
        kept_id = uuid.uuid4().hex
        header = {
            "id": kept_id,
            "at": time.time(),
            "size": len(content),
            "reason": reason,
            "scope": {
                "tenant_id": scope.tenant_id,
                "agent_id": scope.agent_id,
                "session": scope.session,
                "principal": scope.principal.value,
            },
            "rescued": {**asdict(rescued), "attrs": rescued.attrs._asdict()},
        }
        data = json.dumps(header).encode() + b"\n" + content
        partial, name = f"{kept_id}.part", f"{kept_id}.rescued"
        with self._opened(make=True) as directory:
            if _bytes_in(directory) + len(data) > MAX_BYTES:
                raise RescueFailed(f"the rescue directory {self.path} is full: it holds at most {MAX_BYTES} bytes")
            try:
                _write_whole(partial, data, directory)
                os.rename(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
                os.fsync(directory)
            except OSError as error:
                for left in (partial, name):
                    with suppress(OSError):
                        os.unlink(left, dir_fd=directory)
                raise RescueFailed(f"the rescue directory {self.path} takes nothing: {error.strerror}") from error
        return kept_id

    def list_kept(self) -> tuple[list[Kept], list[str]]:
        """What is kept, the oldest first, and the names of files that cannot be understood: not ours, or the
        beginning of one whose writer was killed (`.part`, older than a minute).

        Raises RescueFailed for a directory that is not ours alone.
        """
        found: list[Kept] = []
        broken: list[str] = []
        with self._for_reading() as directory:
            if directory is None:
                return [], []
            for name in sorted(os.listdir(directory)):
                if not _NAME.fullmatch(name):
                    if not _is_young(name, directory):
                        broken.append(name)
                    continue
                try:
                    found.append(_parse(_read(name, directory)[0]))
                except FileNotFoundError:
                    continue  # put back or dropped at this moment
                except Corrupt:
                    broken.append(name)
        return sorted(found, key=lambda kept: kept.at), broken

    def read(self, kept_id: str) -> tuple[Kept, bytes]:
        """One of them. Raises NotFound, Corrupt, RescueFailed."""
        with self._for_reading() as directory:
            if directory is None or _NAME.fullmatch(f"{kept_id}.rescued") is None:
                raise NotFound(f"there is no rescued write {kept_id}")
            try:
                header, content = _read(f"{kept_id}.rescued", directory)
            except FileNotFoundError:
                raise NotFound(f"there is no rescued write {kept_id}") from None
        kept = _parse(header)
        if kept.size != len(content):
            raise Corrupt(f"the rescued write {kept_id} has {len(content)} bytes instead of {kept.size}")
        return kept, content

    def drop(self, kept_id: str) -> None:
        """Forget one. Raises NotFound, RescueFailed."""
        with self._for_reading() as directory:
            if directory is None or _NAME.fullmatch(f"{kept_id}.rescued") is None:
                raise NotFound(f"there is no rescued write {kept_id}")
            try:
                os.unlink(f"{kept_id}.rescued", dir_fd=directory)
            except FileNotFoundError:
                raise NotFound(f"there is no rescued write {kept_id}") from None

    @contextmanager
    def _for_reading(self) -> Iterator[int | None]:
        """The open directory; None where there is none yet."""
        if self.path is None or not os.path.lexists(self.path):
            yield None
        else:
            with self._opened(make=False) as directory:
                yield directory

    @contextmanager
    def _opened(self, *, make: bool) -> Iterator[int]:
        if self.path is None:
            raise RescueFailed("there is no rescue directory")
        try:
            if make:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RescueFailed(f"the rescue directory {self.path} cannot be opened: {error.strerror}") from error
        try:
            of = os.fstat(directory)
            if of.st_uid != os.geteuid() or of.st_mode & 0o077:
                raise RescueFailed(f"the rescue directory {self.path} is not its owner's alone (0700)")
            yield directory
        finally:
            os.close(directory)


def _is_young(name: str, directory: int) -> bool:
    """Whether somebody may be writing it just now."""
    try:
        return time.time() - os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime < _WRITING_S
    except FileNotFoundError:
        return True


def _bytes_in(directory: int) -> int:
    total = 0
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size
    return total


def _write_whole(name: str, data: bytes, directory: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def _read(name: str, directory: int) -> tuple[bytes, bytes]:
    """Header line and content. Raises FileNotFoundError; Corrupt for what we did not write."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Corrupt(f"the rescued write {name} cannot be read: {error.strerror}") from error
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Corrupt(f"the rescued write {name} is not a file")
        return file.readline(_HEADER_MAX), file.read()


def _parse(header: bytes) -> Kept:
    try:
        fields = json.loads(header)
        scope = fields["scope"]
        rescued = fields["rescued"]
        return Kept(
            fields["id"],
            float(fields["at"]),
            int(fields["size"]),
            fields["reason"],
            Scope(scope["tenant_id"], scope["agent_id"], scope["session"], Principal(scope["principal"])),
            Rescued(**{**rescued, "attrs": Attrs(**rescued["attrs"]), "backend": _pair(rescued["backend"])}),
        )
    except (ValueError, TypeError, KeyError, BadScope) as error:
        raise Corrupt("a rescued write's first line is not ours") from error


def _pair(numbers: list[int] | None) -> tuple[int, int] | None:
    """JSON has no tuples."""
    if numbers is None:
        return None
    pid, started_us = numbers
    return int(pid), int(started_us)
