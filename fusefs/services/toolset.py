"""The six file tools of one session: ls, read_file, write_file, edit_file, glob, grep (HF-20).

Decided here and only here: the names of the tools and the texts of their answers. What the tools do is
`services.backend`'s, and how a call becomes a result `services.answers`'.

One `Toolset` is one session: it knows which versions the session has seen (`services.seen`), and which paths the
current batch of calls has changed (HF-08).

Threading: one trio thread; calls of a batch may run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fusefs.rules import paths, text
from fusefs.rules.errors import AlreadyChanged, NotFound
from fusefs.rules.model import Kind, NodeRow
from fusefs.rules.text import binary_notice, one_line
from fusefs.services import descriptions
from fusefs.services.answers import bounded, count, make_tool, page_text
from fusefs.services.backend import Backend
from fusefs.services.inputs import unknown_tool
from fusefs.services.seen import SeenFiles
from fusefs.services.tooling import Tool, ToolCall, ToolResult


class Toolset:
    """The tools of one session.

    Args:
        backend: of the session's scope.

    Attributes:
        tools: in the order in which a model should see them.
        seen: what the session knows of the files.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seen = SeenFiles()
        self._changed: set[str] = set()
        self.tools: tuple[Tool, ...] = (
            make_tool("ls", descriptions.LS, self._ls, read_only=True),
            make_tool("read_file", descriptions.READ_FILE, self._read_file, read_only=True),
            make_tool("write_file", descriptions.WRITE_FILE, self._write_file),
            make_tool("edit_file", descriptions.EDIT_FILE, self._edit_file),
            make_tool("glob", descriptions.GLOB, self._glob, read_only=True),
            make_tool("grep", descriptions.GREP, self._grep, read_only=True),
        )
        self._by_name = {tool.name: tool for tool in self.tools}

    async def call(self, call: ToolCall) -> ToolResult:
        """Run one call. Whatever a model passes, the answer is a result (DE-02, DE-03)."""
        tool = self._by_name.get(call.name)
        return await tool.handler(call) if tool is not None else unknown_tool(call.name, self._by_name)

    def end_batch(self) -> None:
        """The calls of one turn are done: each path may be changed again (HF-08)."""
        self._changed.clear()

    # -- The tools ---------------------------------------------------------------------------------

    async def _ls(self, path: str = "/") -> ToolResult:
        entries = await self.backend.ls(self._path(path))
        lines = [_entry_line(entry.node, entry.target) for entry in entries]
        return ToolResult(bounded(lines, "entries") if lines else "[the directory is empty]")

    async def _read_file(
        self, path: str, offset: int = 1, limit: int = text.DEFAULT_LIMIT, column: int = 1
    ) -> ToolResult:
        path = self._path(path)
        try:
            done = await self.backend.read(path, offset=max(offset, 1), limit=limit, column=column)
        except NotFound:
            self.seen.forget(path)
            raise
        self.seen.note(path, done.seen)
        if done.page is None:
            return ToolResult(binary_notice(done.node.size))
        return page_text(done.page, done.node.path, done.node.version)

    async def _write_file(self, path: str, content: str) -> ToolResult:
        path = self._path(path)
        with self._change(path):
            done = await self.seen.write(self.backend, path, content)
        what = "Created" if done.created else "Replaced"
        return ToolResult(f"{what} {path} ({count(done.size, 'byte')}, version {done.seen.version}).")

    async def _edit_file(self, path: str, old_string: str, new_string: str, replace_all: bool = False) -> ToolResult:
        path = self._path(path)
        with self._change(path):
            done = await self.backend.edit(
                path, old_string, new_string, replace_all=replace_all, expected=self.seen.at(path)
            )
        self.seen.note(path, done.seen)
        places = count(done.count, "place")
        return ToolResult(f"Replaced {places} in {path}, first in line {done.line} (version {done.seen.version}).")

    async def _glob(self, pattern: str, path: str = "/") -> ToolResult:
        found = await self.backend.glob(pattern, self._path(path))
        lines = [one_line(node.path) for node in found.found]
        if found.truncated:
            lines.append(f"[only the first {count(len(lines), 'file')}; use a narrower pattern or path]")
        return ToolResult(bounded(lines, "files") if lines else "No files found.")

    async def _grep(
        self, pattern: str, path: str = "/", include: str | None = None, literal: bool = False
    ) -> ToolResult:
        found = await self.backend.grep(pattern, self._path(path), include=include, literal=literal)
        lines = [f"{one_line(match.path)}:{match.line}:{match.excerpt}" for match in found.found]
        if found.truncated:
            lines.append(f"[only the first {count(len(lines), 'match', 'matches')}; narrow it by path or include]")
        return ToolResult(bounded(lines, "matches") if lines else "No matches found.")

    # -- Inside ------------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        """Models leave out the first slash; there is no directory that such a path could be relative to."""
        return self.backend.path(path if path.startswith("/") else f"/{path}")

    @contextmanager
    def _change(self, path: str) -> Iterator[None]:
        """A path is being changed. Raises AlreadyChanged where this batch has done so; a change that fails does not
        count. Raises Denied for the harness's files, of which the store would let the session make its own: these
        calls are the model's."""
        if paths.is_machine_written(path):
            raise paths.harness_only(path)
        if path in self._changed:
            raise AlreadyChanged(path=path)
        self._changed.add(path)
        try:
            yield
        except BaseException:
            self._changed.discard(path)
            raise


def _entry_line(node: NodeRow, target: str | None) -> str:
    path = one_line(node.path)
    if node.kind is Kind.DIR:
        return f"{path}/"
    if target is not None:
        return f"{path} -> {one_line(target)}"
    return f"{path} ({count(node.size, 'byte')})"
