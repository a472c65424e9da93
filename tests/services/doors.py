"""Doors of the services for the table of `cases`: the backend by itself, and the six tools."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from fusefs.rules.errors import FsError
from fusefs.rules.model import Kind
from fusefs.services.backend import Backend, Unseen
from fusefs.services.tooling import ToolCall
from fusefs.services.toolset import Toolset
from tests.services.cases import Refused, numbered

T = TypeVar("T")


async def _or_refused(call: Awaitable[T]) -> T:
    try:
        return await call
    except FsError as error:
        raise Refused.from_error(error) from error


class BackendDoor:
    """The backend: it is told what the caller has seen, so it knows nothing of it by itself."""

    lacks = frozenset({"seen"})

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def write(self, path: str, text: str) -> None:
        await _or_refused(self._backend.write(path, text, Unseen.ANY))

    async def read(self, path: str) -> str:
        return (await _or_refused(self._backend.read_bytes(path))).data.decode()

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None:
        await _or_refused(self._backend.edit(path, old, new, replace_all=replace_all))

    async def ls(self, path: str) -> list[str]:
        found = await _or_refused(self._backend.ls(path))
        return sorted(entry.node.path + ("/" if entry.node.kind is Kind.DIR else "") for entry in found)

    async def glob(self, pattern: str, path: str) -> list[str]:
        return [node.path for node in (await _or_refused(self._backend.glob(pattern, path))).found]

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        found = await _or_refused(self._backend.grep(text, path, literal=True))
        return [(match.path, match.line) for match in found.found]

    async def delete(self, path: str) -> None:
        await _or_refused(self._backend.delete(path))


class ToolsDoor:
    """The six tools, as a model calls them."""

    lacks = frozenset({"delete"})

    def __init__(self, tools: Toolset) -> None:
        self._tools = tools

    async def call(self, name: str, **arguments: object) -> str:
        """The text of an answer. Raises Refused for an error."""
        result = await self._tools.call(ToolCall("call", name, arguments))
        self._tools.end_batch()
        if result.is_error:
            raise Refused.from_text(result.for_llm)
        return result.for_llm

    async def write(self, path: str, text: str) -> None:
        await self.call("write_file", path=path, content=text)

    async def read(self, path: str) -> str:
        """read_file does not show whether the last line has an end; the bytes do."""
        shown = numbered(await self.call("read_file", path=path))
        content = (await self._tools.backend.read_bytes(path)).data.decode()
        return shown if content.endswith("\n") else shown.removesuffix("\n")

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None:
        await self.call("edit_file", path=path, old_string=old, new_string=new, replace_all=replace_all)

    async def ls(self, path: str) -> list[str]:
        lines = (await self.call("ls", path=path)).split("\n")
        return sorted(line.rpartition(" (")[0] or line for line in lines if not line.startswith("["))

    async def glob(self, pattern: str, path: str) -> list[str]:
        return self._paths(await self.call("glob", pattern=pattern, path=path))

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        lines = self._paths(await self.call("grep", pattern=text, path=path, literal=True))
        return [(line.split(":")[0], int(line.split(":")[1])) for line in lines]

    async def delete(self, path: str) -> None:
        raise NotImplementedError

    @staticmethod
    def _paths(text: str) -> list[str]:
        return [line for line in text.split("\n") if line.startswith("/")]
