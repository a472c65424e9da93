"""What `scripts/case-tool` runs: a tool of the session whose mount DIR is in, without using the mount."""

from __future__ import annotations

import json
import os
import posixpath
import sys

import trio

from fusefs.cli import registry
from fusefs.db.pool import open_database
from fusefs.rules.config import Limits
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.services.tooling import ToolCall, ToolResult
from fusefs.services.toolset import Toolset

DEFAULT_PATHS = {"ls", "glob", "grep"}


def translated(tool: str, arguments: dict[str, object], inside: str) -> dict[str, object]:
    """The cases' arguments as the tool's: paths below `inside`, and `glob` of grep is called include."""
    if "path" in arguments or tool in DEFAULT_PATHS:
        arguments["path"] = posixpath.join(inside, str(arguments.get("path", "")))
    if "glob" in arguments:
        arguments["include"] = arguments.pop("glob")
    return arguments


async def call(directory: str, tool: str, arguments: dict[str, object]) -> ToolResult:
    found = registry.containing(os.path.realpath(directory))
    if found is None:
        sys.exit(f"{directory} is in no mount of fusefs")
    record, inside = found
    if record.tenant_id is None or record.agent_id is None or record.session is None:
        sys.exit(f"{directory} is in a mount of more than one session")
    limits = Limits(max_file_bytes=int(os.environ.get("HANGO_FS_MAX_FILE_BYTES", Limits().max_file_bytes)))
    scope = Scope(record.tenant_id, record.agent_id, record.session, Principal.AGENT)
    async with open_database(os.environ.get("HANGO_FS_DSN", record.dsn), origin="case-tool", size=1) as db:
        tools = Toolset(Backend(db, scope, limits))
        return await tools.call(ToolCall("case", tool, translated(tool, arguments, inside)))


def main() -> None:
    directory, tool = sys.argv[1:]
    result = trio.run(call, directory, tool, json.load(sys.stdin))
    sys.stdout.buffer.write(f"{result.for_llm}\n".encode())
    sys.exit(1 if result.is_error else 0)


if __name__ == "__main__":
    main()
