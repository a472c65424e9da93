"""The JSON that coding agents give to a hook after a tool has run, and what they take back.

Decided here and only here: which agents' forms are known, which strings of a tool's result are its long texts, and how
a preview takes a text's place so that the agent accepts it. Claude Code compares a replacement with the tool's own
form and drops one that differs, so strings are replaced where they stand and all else stays. Codex and Gemini CLI take
one text, and only with a decision against the result. What was tried and what is known from documentation alone is in
docs/howto/offload.md.

Threading: pure functions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from fusefs.rules import results
from fusefs.rules.preview import PREVIEW_CHARS
from fusefs.rules.tokens import estimate

MAX_INPUT_BYTES = 64 * 1024 * 1024
"""Of a hook's input: parsed it takes some times as much memory."""

_FILE_TOOLS = frozenset(
    (
        *("Read", "Write", "Edit", "MultiEdit", "NotebookEdit", "LS", "Glob", "Grep"),  # Claude Code
        *("list_directory", "read_many_files", "replace", "search_file_content", "grep_search"),  # Gemini CLI
        "apply_patch",  # Codex
    )
)
"""The agents' own file tools, as `results.NEVER_STORED` are ours: reading a stored result must not store another."""

_ENCODED = frozenset(("blob", "base64", "data"))
"""Keys whose strings are pictures and the like where a media type stands beside them."""

Key = tuple[str | int, ...]


class NotAnEvent(ValueError):
    """The input of a hook is not what it should be; the text quotes nothing of it."""


class Agent(Enum):
    """Whose hook it is."""

    CLAUDE = "claude"
    CODEX = "codex"
    GEMINI = "gemini"


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a result.

    Args:
        at: the keys that lead to it; none where the result as a whole is one text.
        value: the text, or the start of it.
        file: where the agent has the whole; None where `value` is it.
    """

    at: Key
    value: str
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """One call of a tool that has ended. `session` and `directory` are the agent's own, '' where it names none."""

    agent: Agent
    tool: str
    call_id: str
    session: str
    directory: str
    response: Any

    @property
    def is_exempt(self) -> bool:
        """Whether the tool's results are never stored. Of an MCP tool's name (`mcp__server__tool`) the last part
        counts."""
        return self.tool in _FILE_TOOLS or self.tool.rpartition("__")[2] in results.NEVER_STORED


def parse(data: bytes, agent: Agent | None = None) -> Event:
    """What a hook was told.

    Args:
        agent: whose hook it is; None: found out by the event's name and fields.

    Raises NotAnEvent.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise NotAnEvent("it is not JSON") from None
    if not isinstance(found, dict):
        raise NotAnEvent("it is not a JSON object")
    event = found.get("hook_event_name")
    if event not in ("PostToolUse", "AfterTool"):
        raise NotAnEvent("its hook_event_name is neither PostToolUse nor AfterTool")
    if not isinstance(found.get("tool_name"), str) or found.get("tool_response") is None:
        raise NotAnEvent("it has no tool_name or no tool_response")
    if agent is None:
        # A turn's id is Codex's own; else it has taken over Claude Code's form.
        agent = Agent.GEMINI if event == "AfterTool" else Agent.CODEX if "turn_id" in found else Agent.CLAUDE
    call_id, session, directory = (
        value if isinstance(value := found.get(key), str) else "" for key in ("tool_use_id", "session_id", "cwd")
    )
    return Event(agent, found["tool_name"], call_id, session, directory, found["tool_response"])


def long_texts(event: Event, limit_tokens: int) -> list[Text]:
    """The texts to be replaced: none where the result has no more tokens than the limit, else the longest of them,
    until the rest has. A text no longer than a preview stays."""
    found = _texts(event) if event.agent is Agent.CLAUDE else [Text((), _as_one(event))]
    sizes = {text.at: estimate(text.value) for text in found}
    total, chosen = sum(sizes.values()), []
    for text in sorted(found, key=lambda text: sizes[text.at], reverse=True):
        if text.file is not None:
            chosen.append(text)
        elif total > limit_tokens and len(text.value) > PREVIEW_CHARS:
            chosen.append(text)
            total -= sizes[text.at]
    return chosen


def reply(event: Event, previews: Mapping[Key, str]) -> dict[str, Any]:
    """What the hook prints, given the preview of each text that was replaced."""
    if event.agent is not Agent.CLAUDE:
        decision = "block" if event.agent is Agent.CODEX else "deny"
        return {"decision": decision, "reason": previews[()]}
    updated = copy.deepcopy(event.response)
    for at, preview in previews.items():
        updated = _with(updated, at, preview)
    if isinstance(updated, dict) and ("stdout",) in previews:
        # With these Claude Code shows its own notice of the file in the place of stdout.
        updated.pop("persistedOutputPath", None)
        updated.pop("persistedOutputSize", None)
    output = {"hookEventName": "PostToolUse", "updatedToolOutput": updated}
    if event.tool.startswith("mcp__"):
        output["updatedMCPToolOutput"] = updated  # what releases before 2.1.121 read
    return {"suppressOutput": True, "hookSpecificOutput": output}


def _texts(event: Event) -> list[Text]:
    """Every string of a result that is a text."""
    found: list[Text] = []
    waiting: list[tuple[Key, Any]] = [((), event.response)]
    while waiting:
        at, value = waiting.pop()
        if isinstance(value, str):
            found.append(Text(at, value))
        elif isinstance(value, list):
            waiting += [((*at, position), item) for position, item in enumerate(value)]
        elif isinstance(value, dict) and value.get("isImage") is not True:
            is_media = "mimeType" in value or "media_type" in value
            waiting += [((*at, key), item) for key, item in value.items() if not (is_media and key in _ENCODED)]
    # Of a long output Claude Code gives its hooks the start, and a file. Only its own tool is trusted with a path.
    if event.tool == "Bash" and isinstance(event.response, dict):
        file = event.response.get("persistedOutputPath")
        if isinstance(file, str):
            return [replace(text, file=file) if text.at == ("stdout",) else text for text in found]
    return found


def _as_one(event: Event) -> str:
    """A result as one text: what the model would have seen of it, as far as its form is known; else its JSON."""
    value = event.response
    if isinstance(value, dict):
        value = value.get("llmContent" if event.agent is Agent.GEMINI else "content", value)
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    if strings and len(strings) == len(texts):
        return "\n".join(strings)
    return json.dumps(event.response, ensure_ascii=False)


def _with(value: Any, at: Key, text: str) -> Any:
    """A JSON value with another string at a place in it; changes the value itself."""
    if not at:
        return text
    holder = value
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = text
    return value
