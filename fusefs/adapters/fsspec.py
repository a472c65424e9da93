"""An agent's files as a file system of fsspec (extra `fsspec`), so that pandas and others read and write them by URL.

    fsspec.filesystem("fusefs", dsn=…, tenant="acme", agent="bot", session="s1")
    pandas.read_csv("fusefs:///data/prices.csv", storage_options={"dsn": …, …})

Decided here and only here: that a file is held whole while it is open, since one row holds it; that what is written
goes to Postgres at close, and is checked against the version that was there at open; that refusals are the OSErrors
that callers of such libraries know, with the errno that a mount would give; and that what cannot be asked is never
shown as absent.

fsspec keeps a file system for whoever asks again with the same options; its connections end with the program, or at
`close`.

Threading: as `portal`.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

from fsspec import AbstractFileSystem

from fusefs.adapters.portal import Portal
from fusefs.rules import paths
from fusefs.rules.errors import Exists, FsError, NotFound, NotSupported, outcome
from fusefs.rules.model import Kind, NodeRow
from fusefs.services.backend import Backend, Expected, Unseen

T = TypeVar("T")

_KINDS = {Kind.FILE: "file", Kind.DIR: "directory", Kind.SYMLINK: "link"}


class FusefsFileSystem(AbstractFileSystem):
    """The files of one scope.

    Args: those of `Portal`. Raises what it raises.
    """

    protocol: ClassVar[str] = "fusefs"
    root_marker: ClassVar[str] = "/"

    def __init__(
        self, *, dsn: str, tenant: str, agent: str, session: str, principal: str = "agent", **more: Any
    ) -> None:
        super().__init__(**more)
        self._portal = Portal(dsn, tenant=tenant, agent=agent, session=session, principal=principal)

    def close(self) -> None:
        """End the connections; every later call of this object is refused, and whoever asks again gets a new one."""
        self.clear_instance_cache()
        self._portal.close()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        plain = str(path).removeprefix("fusefs://").removeprefix("fusefs:")
        return "/" + plain.strip("/")

    # -- Looking -----------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        try:
            nodes = [entry.node for entry in self._do(Backend.ls, path)]
        except NotADirectoryError:
            nodes = [self._do(Backend.stat, path)]
        return [_info(each) if detail else each.path for each in nodes]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return _info(self._do(Backend.stat, self._strip_protocol(path)))

    def exists(self, path: str, **_: Any) -> bool:
        return self._type(path) is not None

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] | None = None,
        **more: Any,
    ) -> Iterator[Any]:
        """As fsspec's, on which `find` and `glob` are built; but only what is not there is left out."""
        yield from super().walk(path, maxdepth, topdown, on_error or _pass_over_missing, **more)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._do(Backend.read_bytes, self._strip_protocol(path)).data[start:end]

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    # -- Changing ----------------------------------------------------------------------------------

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        expected = Unseen.ABSENT if mode == "create" else Unseen.ANY
        self._do(Backend.write, self._strip_protocol(path), bytes(value), expected)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        path = self._strip_protocol(path)
        if not create_parents:
            self._do(Backend.stat, paths.split(path)[0])
        self._do(Backend.mkdir, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if not (exist_ok and self.isdir(path)):
            self.mkdir(path)

    def rmdir(self, path: str) -> None:
        self._do(Backend.delete, self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        self._do(Backend.delete, self._strip_protocol(path))

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
        else:
            self.pipe_file(path2, self.cat_file(path1))

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> None:
        """Move a file or a directory in one step; the target must be free."""
        self._do(Backend.rename, self._strip_protocol(path1), self._strip_protocol(path2))

    # -- Inside ------------------------------------------------------------------------------------

    def _type(self, path: str) -> str | None:
        """What is at a path; None: nothing. fsspec's own takes any error for nothing, a database that is away too."""
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode == "rb":
            return io.BytesIO(self._do(Backend.read_bytes, path).data)
        data, expected = self._do(_opened, path, mode)
        return _Written(data, lambda content: self._do(Backend.write, path, content, expected))

    def _do(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a method of the backend. A refusal becomes the OSError of its errno: FileNotFoundError and so on."""
        try:
            return self._portal.call(work, self._portal.backend, *args)
        except FsError as error:
            told = outcome(error)
            raise OSError(told.errno, told.sentence, error.path) from error


def _pass_over_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


class _Written(io.BytesIO):
    """A file that is open for writing; `commit` gets its bytes at close."""

    def __init__(self, data: bytes, commit: Callable[[bytes], object]) -> None:
        super().__init__()
        self._commit = commit
        self.write(data)

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        self._commit(data)


async def _opened(backend: Backend, path: str, mode: str) -> tuple[bytes, Expected]:
    """What a file that is opened for writing holds at first, and what its write will expect."""
    if mode not in ("wb", "ab", "xb"):
        raise NotSupported(f"a file is not opened in the mode {mode}", path=path)
    try:
        content = await backend.read_bytes(path)
    except NotFound:
        return b"", Unseen.ABSENT
    if mode == "xb":
        raise Exists(path=path)
    return content.data if mode == "ab" else b"", content.seen


def _info(node: NodeRow) -> dict[str, Any]:
    return {
        "name": node.path,
        "size": None if node.kind is Kind.DIR else node.size,
        "type": _KINDS.get(node.kind, "other"),
        "mtime": node.mtime_ns / 1e9,
        "version": node.version,
        "id": node.id,
    }
