"""Doors of the adapters for the table of cases of every door (`tests/services/cases.py`).

All of them block, so each call goes to a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio
from anthropic.lib.tools import ToolError

from fusefs.adapters.deepagents import FusefsBackend
from fusefs.adapters.fsspec import FusefsFileSystem
from fusefs.adapters.memory import MemoryTool
from fusefs.adapters.portal import Portal
from tests.harness import Namespace
from tests.services.cases import Refused

T = TypeVar("T")


class DeepagentsDoor:
    """It knows what was read, but an edit is made on whatever is there, so it is not what the cases of "seen" ask for;
    what it does instead is in test_deepagents.py."""

    lacks = frozenset({"seen"})

    def __init__(self, portal: Portal) -> None:
        self._backend = FusefsBackend(portal)

    async def _do(self, call: Callable[[], T]) -> T:
        """The result of a call, whose class differs. Raises Refused for one with an error."""
        result = await trio.to_thread.run_sync(call)
        error = getattr(result, "error", None)
        if error is not None:
            raise Refused.from_text(error.replace("_", " "))
        return result

    async def write(self, path: str, text: str) -> None:
        await self._do(lambda: self._backend.write(path, text))

    async def read(self, path: str) -> str:
        data = (await self._do(lambda: self._backend.read(path, limit=1_000_000))).file_data
        assert data is not None
        return data["content"]

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None:
        await self._do(lambda: self._backend.edit(path, old, new, replace_all))

    async def ls(self, path: str) -> list[str]:
        return sorted(info["path"] for info in (await self._do(lambda: self._backend.ls(path))).entries or [])

    async def glob(self, pattern: str, path: str) -> list[str]:
        found = await self._do(lambda: self._backend.glob(pattern, path))
        return sorted(info["path"] for info in found.matches or [])

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        found = await self._do(lambda: self._backend.grep(text, path))
        return sorted((match["path"], match["line"]) for match in found.matches or [])

    async def delete(self, path: str) -> None:
        await self._do(lambda: self._backend.delete(path))


class FsspecDoor:
    """fsspec has patterns of its own, and nothing to edit or search with. A file is checked from open to close."""

    lacks = frozenset({"edit", "glob", "grep", "seen"})

    def __init__(self, namespace: Namespace, session: str) -> None:
        self.files = FusefsFileSystem(
            dsn=namespace.dsn,
            tenant=namespace.tenant,
            agent=namespace.agent,
            session=session,
            skip_instance_cache=True,
        )

    async def _do(self, call: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(call)
        except OSError as error:
            raise Refused.from_errno(error) from error

    async def write(self, path: str, text: str) -> None:
        def write() -> None:
            with self.files.open(path, "wb") as file:
                file.write(text.encode())

        await self._do(write)

    async def read(self, path: str) -> str:
        return await self._do(lambda: self.files.cat_file(path).decode())

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None:
        raise NotImplementedError

    async def ls(self, path: str) -> list[str]:
        found = await self._do(lambda: self.files.ls(path))
        return sorted(info["name"] + ("/" if info["type"] == "directory" else "") for info in found)

    async def glob(self, pattern: str, path: str) -> list[str]:
        raise NotImplementedError

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        raise NotImplementedError

    async def delete(self, path: str) -> None:
        await self._do(lambda: self.files.rm_file(path))


class MemoryDoor:
    """The memory tool of an administrator. The paths of the cases are below `/memories`; a memory is replaced as a
    model does it, by deleting it first."""

    lacks = frozenset({"glob", "grep", "seen"})

    def __init__(self, portal: Portal) -> None:
        self._memory = MemoryTool(portal)

    async def _do(self, command: str, **arguments: object) -> str:
        try:
            said = await trio.to_thread.run_sync(lambda: self._memory.call({"command": command, **arguments}))
        except ToolError as error:
            raise Refused.from_text(str(error).replace("did not appear", "is not in the file")) from error
        assert isinstance(said, str)
        return said

    async def write(self, path: str, text: str) -> None:
        try:
            await self._do("create", path=f"/memories{path}", file_text=text)
        except Refused as error:
            if "already exists" not in error.kind:
                raise
            await self._do("delete", path=f"/memories{path}")
            await self._do("create", path=f"/memories{path}", file_text=text)

    async def read(self, path: str) -> str:
        said = await self._do("view", path=f"/memories{path}")
        return "\n".join(line.split("\t", 1)[1] for line in said.split("\n")[1:])

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None:
        await self._do("str_replace", path=f"/memories{path}", old_str=old, new_str=new)

    async def ls(self, path: str) -> list[str]:
        lines = (await self._do("view", path=f"/memories{path}")).split("\n")[2:]
        shown = [line.split("\t", 1)[1].removeprefix("/memories") for line in lines]
        return sorted(each for each in shown if "/" not in each.removeprefix(f"{path}/").rstrip("/"))

    async def glob(self, pattern: str, path: str) -> list[str]:
        raise NotImplementedError

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        raise NotImplementedError

    async def delete(self, path: str) -> None:
        await self._do("delete", path=f"/memories{path}")
