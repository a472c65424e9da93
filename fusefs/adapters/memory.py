"""Anthropic's memory tool over an agent's `/memories` (extra `anthropic`).

Decided here and only here: the six commands of that tool in the wording that its models know. What is reserved stays
so: a portal whose principal is `agent` may look, and is told who can write (HF-12).

Every command is checked against what is there when it runs: a file that changes at the same moment is an error that
says so, and nothing is overwritten.

Threading: as `portal`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from anthropic.lib.tools import BetaAbstractMemoryTool, ToolError
from anthropic.types.beta import (
    BetaMemoryTool20250818CreateCommand,
    BetaMemoryTool20250818DeleteCommand,
    BetaMemoryTool20250818InsertCommand,
    BetaMemoryTool20250818RenameCommand,
    BetaMemoryTool20250818StrReplaceCommand,
    BetaMemoryTool20250818ViewCommand,
)

from fusefs.adapters.portal import Portal
from fusefs.rules import paths
from fusefs.rules.errors import Exists, FsError, NoMatch, NotFound, NotUnique, outcome
from fusefs.rules.model import Kind
from fusefs.services.backend import Seen, Unseen

P = ParamSpec("P")
T = TypeVar("T")

_MAX_LINES = 999_999
_WIDTH = 6
_DEPTH = 2
"""Levels of a directory that `view` shows."""
_AROUND = 2
"""Lines shown before and after a change."""


class MemoryTool(BetaAbstractMemoryTool):
    """The memory of a portal's agent. Closing the portal is the caller's."""

    def __init__(self, portal: Portal) -> None:
        super().__init__()
        self._portal = portal
        self._backend = portal.backend

    def view(self, command: BetaMemoryTool20250818ViewCommand) -> str:
        return self._told(self._view, self._path(command.path), command)

    def create(self, command: BetaMemoryTool20250818CreateCommand) -> str:
        path = self._path(command.path)
        try:
            self._told(self._backend.write, path, command.file_text, Unseen.ABSENT)
        except Exists:
            raise ToolError(f"File {command.path} already exists") from None
        return f"File created successfully at: {command.path}"

    def str_replace(self, command: BetaMemoryTool20250818StrReplaceCommand) -> str:
        try:
            return self._told(self._replace, self._path(command.path), command)
        except NoMatch:
            raise ToolError(
                f"No replacement was performed, old_str `{command.old_str}` did not appear verbatim in {command.path}."
            ) from None
        except NotUnique as error:
            raise ToolError(
                f"No replacement was performed. Multiple occurrences of old_str `{command.old_str}`: {error.message}. "
                "Please ensure it is unique"
            ) from None

    def insert(self, command: BetaMemoryTool20250818InsertCommand) -> str:
        self._told(self._insert, self._path(command.path), command.insert_line, command.insert_text)
        return f"The file {command.path} has been edited."

    def delete(self, command: BetaMemoryTool20250818DeleteCommand) -> str:
        path = self._path(command.path)
        if path == paths.MEMORIES:
            raise ToolError(f"Cannot delete the {paths.MEMORIES} directory itself")
        self._told(self._backend.delete, path, recursive=True)
        return f"Successfully deleted {command.path}"

    def rename(self, command: BetaMemoryTool20250818RenameCommand) -> str:
        old, new = self._path(command.old_path), self._path(command.new_path)
        if old == paths.MEMORIES:
            raise ToolError(f"Cannot rename the {paths.MEMORIES} directory itself")
        try:
            self._told(self._backend.rename, old, new)
        except Exists:
            raise ToolError(f"The destination {command.new_path} already exists") from None
        return f"Successfully renamed {command.old_path} to {command.new_path}"

    # -- Inside ------------------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        """Raises ToolError for what is not in the memory."""
        try:
            normal = self._backend.path(path)
        except FsError as error:
            raise ToolError(outcome(error).sentence_for_model) from None
        if not paths.is_within(normal, paths.MEMORIES):
            raise ToolError(f"Path must start with {paths.MEMORIES}, got: {path}")
        return normal

    def _told(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something on the portal's thread. Refusals become ToolErrors, but those that a command words itself."""
        try:
            return self._portal.call(work, *args, **kwargs)
        except (Exists, NoMatch, NotUnique):
            raise
        except NotFound as error:
            raise ToolError(f"The path {error.path} does not exist. Please provide a valid path.") from None
        except FsError as error:
            raise ToolError(outcome(error).sentence_for_model) from None

    async def _view(self, path: str, command: BetaMemoryTool20250818ViewCommand) -> str:
        try:
            node = await self._backend.stat(path)
        except NotFound:
            # Nothing was remembered yet, and nobody made the directory.
            if path != paths.MEMORIES:
                raise
            return self._listing(path, [f"{_size(0)}\t{path}"])
        if node.kind is Kind.DIR:
            return self._listing(path, [f"{_size(node.size)}\t{path}", *await self._entries(path, _DEPTH)])
        lines = (await self._load(path))[0].split("\n")
        if len(lines) > _MAX_LINES:
            raise ToolError(f"File {path} exceeds maximum line limit of {_MAX_LINES:,} lines.")
        first, last = command.view_range or (1, -1)
        first = max(first, 1)
        shown = lines[first - 1 : len(lines) if last == -1 else last]
        return f"Here's the content of {path} with line numbers:\n{_numbered(shown, first)}"

    def _listing(self, path: str, lines: list[str]) -> str:
        head = f"Here're the files and directories up to {_DEPTH} levels deep in {path}, excluding hidden items:"
        return "\n".join([head, *lines])

    async def _entries(self, path: str, depth: int) -> list[str]:
        lines = []
        for node in (entry.node for entry in await self._backend.ls(path)):
            if paths.split(node.path)[1].startswith("."):
                continue
            if node.kind is Kind.FILE:
                lines.append(f"{_size(node.size)}\t{node.path}")
            elif node.kind is Kind.DIR:
                below = await self._entries(node.path, depth - 1) if depth > 1 else []
                lines += [f"{_size(node.size)}\t{node.path}/", *below]
        return lines

    async def _load(self, path: str) -> tuple[str, Seen]:
        """A file's text, and what was seen of it. A symlink that leads out of the memory is none of its files."""
        content = await self._backend.read_bytes(path)
        if content.text is None or not paths.is_within(content.node.path, paths.MEMORIES):
            raise ToolError(f"Unsupported file type for {path}")
        return content.text, content.seen

    async def _replace(self, path: str, command: BetaMemoryTool20250818StrReplaceCommand) -> str:
        await self._load(path)
        done = await self._backend.edit(path, command.old_str, command.new_str)
        lines = (await self._load(path))[0].split("\n")
        first = max(done.line - _AROUND, 1)
        shown = _numbered(lines[first - 1 : done.line + _AROUND], first)
        return f"The memory file has been edited. Here is the snippet showing the change (with line numbers):\n{shown}"

    async def _insert(self, path: str, line: int, text: str) -> None:
        content, seen = await self._load(path)
        lines = content.removesuffix("\n").split("\n") if content else []
        if not 0 <= line <= len(lines):
            raise ToolError(
                f"Invalid `insert_line` parameter: {line}. It should be within the range [0, {len(lines)}]."
            )
        lines.insert(line, text.rstrip("\n"))
        await self._backend.write(path, "\n".join(lines) + "\n", seen)


def _numbered(lines: list[str], first: int) -> str:
    return "\n".join(f"{number:>{_WIDTH}}\t{line}" for number, line in enumerate(lines, first))


def _size(size: int) -> str:
    """A size as that tool writes it: 0B, 12B, 1.5K, 2M."""
    value, units = float(size), ["B", "K", "M", "G"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f}{units[0]}" if value == int(value) else f"{value:.1f}{units[0]}"
