"""Results kept through a mounted directory: inside a container there is no other way to the database.

Decided here and only here: how the mount and the session of a directory are found, and that a result's file is made
with O_EXCL: in a mount an agent's own harness may make a file under its session's folder once, and never change it.

Imports nothing outside the standard library and `rules`: the filter starts in a few hundredths of a second.

Threading: blocking calls; `call` says where they run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusefs.rules.config import Limits
from fusefs.rules.errors import Exists, NotFound
from fusefs.rules.paths import CONTROL_NAME
from fusefs.rules.scope import valid_session

Caller = Callable[..., Awaitable[Any]]


async def in_place(work: Callable[..., Any], *args: Any) -> Any:
    """Run blocking work where it is called, for a program with nothing else to do."""
    return work(*args)


@dataclass(frozen=True, slots=True)
class MountedResults:
    """A `ResultStore` over the mounted directory `root`.

    Args:
        call: how blocking work is run: `trio.to_thread.run_sync` in a program that runs trio.
    """

    root: str
    session: str
    max_file_bytes: int
    call: Caller = in_place

    async def make_file(self, path: str, data: bytes) -> None:
        await self.call(self._make_file, path, data)

    async def make_directory(self, path: str) -> None:
        await self.call(self._make_directory, path)

    def _make_file(self, path: str, data: bytes) -> None:
        file = self._prepared(path)
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise Exists(path=path) from None
        with open(handle, "wb", buffering=0) as stream:
            left = memoryview(data)
            while left:
                left = left[stream.write(left) :]
        # Closing it is what commits it: an error of that is raised by the `with`.

    def _make_directory(self, path: str) -> None:
        try:
            self._prepared(path).mkdir(mode=0o755)
        except FileExistsError:
            raise Exists(path=path) from None

    def _prepared(self, path: str) -> Path:
        file = Path(self.root, path.lstrip("/"))
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        return file


def find(directory: str, call: Caller = in_place) -> MountedResults:
    """The results of the session whose mounted namespace a directory lies in: the nearest directory, upwards, with a
    control directory that names a session.

    A control directory is absent from listings. One that is listed was made by somebody, perhaps to lead us elsewhere.

    Raises NotFound where there is none, OSError where the mount does not answer.
    """
    start = Path(os.path.abspath(directory))
    for root in (start, *start.parents):
        try:
            status = json.loads((root / CONTROL_NAME / "status").read_bytes())
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
            continue
        session = status.get("session") if isinstance(status, dict) else None
        if not isinstance(session, str) or not valid_session(session) or CONTROL_NAME in os.listdir(root):
            continue
        limit = status.get("max_file_bytes")
        if not isinstance(limit, int) or limit < 1:
            limit = Limits().max_file_bytes
        return MountedResults(str(root), session, limit, call)
    raise NotFound(f"{start} is in no mounted namespace of a session")
