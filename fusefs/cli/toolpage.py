"""The page docs/reference/tools.md, made from what models are told; `scripts/make-reference` writes it, and a test
fails when it is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusefs.rules.text import MAX_ANSWER_CHARS, MAX_LINE_CHARS
from fusefs.services import descriptions
from fusefs.services.descriptions import Description

TOOLS = {
    "ls": descriptions.LS,
    "read_file": descriptions.READ_FILE,
    "write_file": descriptions.WRITE_FILE,
    "edit_file": descriptions.EDIT_FILE,
    "glob": descriptions.GLOB,
    "grep": descriptions.GREP,
}
HISTORY = {
    "list_versions": descriptions.LIST_VERSIONS,
    "read_version": descriptions.READ_VERSION,
    "restore_version": descriptions.RESTORE_VERSION,
    "list_deleted": descriptions.LIST_DELETED,
}

_HEAD = f"""# Tools

<!-- Made by scripts/make-reference from the code. Do not edit. -->

The tools that a model has for an agent's files: in Python (`fusefs.services.toolset.Toolset`), in the
[harness](../internals/harness.md), and by [MCP](../howto/mcp.md). They need no mount. The same files through other
libraries: [adapters](../howto/adapters.md).

## What holds for all of them

- **Paths** are absolute in the agent's namespace; without the first slash they mean the same. `..` is refused. Symlinks
  within the namespace are followed, others are refused. `/large_tool_results/ID` is read as the result of the own
  session.
- **Versions.** A session remembers which version of each file it read or wrote. A change of a file that somebody else
  has changed since is refused, and says both versions; the text of a refused write is kept as a conflict
  (`fusefs conflicts`). Times, modes and listings play no part. A file that the session never read may be replaced: the
  old content is in the history.
- **Batches.** Of the calls that a model makes at once, one may change a path; a second is refused, since the model has
  not seen what the first one made of it. A change that failed does not count.
- **Policy.** `/memories` and `/skills` are read only for an agent; `/large_tool_results` and `/conversation_history`
  are the harness's to write, and other sessions' files in them do not exist.
- **Lines** end with LF or CR LF and with nothing else, here as in Postgres and in `grep`. A line over
  {MAX_LINE_CHARS} characters is cut and says so; an answer ends at a whole line below {MAX_ANSWER_CHARS:,} characters
  and says how to go on. With `column`, a line that is longer than an answer is read to its end.
- **Edits** compare as `read_file` shows: without the CR of CR LF. What is inserted gets the line end of its
  surroundings, everything else keeps its bytes. Where the text is not there, the error says whether only white space,
  line ends, the Unicode form, look-alike characters or case differ, and shows the nearest lines; where it is there more
  than once, how often and in which lines, overlapping places counted.
- **Patterns** of `glob` and `include` are bash's, with `**` and braces. **Regular expressions** are Postgres's
  ([documentation](https://www.postgresql.org/docs/current/functions-matching.html#POSIX-SYNTAX-DETAILS)), with `\\b`,
  `\\B` and `\\z` as elsewhere; each line is matched by itself, and a search that takes longer than 10 s is ended.
- **Wrong input** (no JSON, wrong types, unknown or missing arguments, NUL, halves of surrogate pairs) is answered with
  what is wrong and the tool's schema; an unknown tool with the list of the tools.
"""

_HISTORY = """## History

Also served by `fusefs mcp`, after the six.
"""


def render_tools() -> str:
    """The whole page."""
    sections = [_section(name, description) for name, description in TOOLS.items()]
    history = [_section(name, description) for name, description in HISTORY.items()]
    return "\n".join([_HEAD, "## The six tools\n", *sections, _HISTORY, *history])


def _section(name: str, description: Description) -> str:
    schema: Mapping[str, Any] = description.schema
    required = schema["required"]
    rows = [
        f"| `{argument}` | {_type(rule)} | {'yes' if argument in required else 'no'} | {rule['description']} |"
        for argument, rule in schema["properties"].items()
    ]
    table = ["| argument | type | needed | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"### {name}\n", f"{description.text}\n", *table, ""])


def _type(rule: Mapping[str, Any]) -> str:
    """A type with its bounds: `string, 1 to 4096 characters`."""
    least, most = (rule.get(key) for key in ("minLength", "maxLength"))
    if rule["type"] == "string" and (least is not None or most is not None):
        return (
            f"string, {least or 0} to {most} characters" if most is not None else f"string, {least} character or more"
        )
    if "minimum" in rule:
        return f"{rule['type']}, from {rule['minimum']}"
    return str(rule["type"])
