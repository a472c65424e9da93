"""`fusefs offload-hook`: the hook of a coding agent after a tool has run.

Decided here and only here: that whatever goes wrong leaves the agent as it was.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from typing import Any

import click

from fusefs.cli import options
from fusefs.cli.groups import FsCommand
from fusefs.cli.offload import read_from, store_long, storing, stream, warn, write
from fusefs.rules import agenthooks
from fusefs.rules.errors import FsError, outcome
from fusefs.rules.preview import encode
from fusefs.rules.results import Held
from fusefs.rules.scope import valid_session


class _HookCommand(FsCommand):
    """A hook that is set up wrongly ends with 1: for agents 2 means that the tool's result is to be withheld."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except (click.ClickException, FsError) as exc:
            text = exc.format_message() if isinstance(exc, click.ClickException) else outcome(exc).text
            raise click.ClickException(text) from exc


@click.command("offload-hook", cls=_HookCommand)
@options.option(
    "--agent-kind",
    type=click.Choice([each.value for each in agenthooks.Agent]),
    default=None,
    help="Whose hook it is. Default: found out by what it is told.",
)
@storing
def offload_hook(agent_kind: str | None, token_limit: int, **values: Any) -> None:
    """Be the hook of an agent that stores its tools' long results and shows it a preview.

    Reads the JSON of one event from stdin: PostToolUse of Claude Code and Codex, AfterTool of Gemini CLI. Prints what
    makes the agent take the preview, or nothing where the result stays. Whatever goes wrong, the agent goes on: the
    exit code is 0, and stderr says what it was.

    \b
    Example:
      fusefs offload-hook < event.json
    """
    try:
        said = _answer(agenthooks.Agent(agent_kind) if agent_kind else None, token_limit, values)
    except agenthooks.NotAnEvent as exc:
        warn(f"the hook's input is not understood ({exc}); nothing was changed")
    except Exception as exc:  # noqa: BLE001  (a hook must not break the agent that calls it)
        warn(f"{outcome(exc).text}; nothing was changed")
    else:
        write(said)


def _answer(agent: agenthooks.Agent | None, token_limit: int, values: dict[str, Any]) -> bytes:
    data = stream(sys.stdin).read(agenthooks.MAX_INPUT_BYTES + 1)
    if len(data) > agenthooks.MAX_INPUT_BYTES:
        raise agenthooks.NotAnEvent(f"it has more than {agenthooks.MAX_INPUT_BYTES} bytes")
    event = agenthooks.parse(data, agent)
    if event.is_exempt:
        return b""
    if not options.was_said("agent"):
        values["directory"] = values["directory"] or event.directory or None
    if values["session"] is None and valid_session(event.session):
        values["session"] = event.session
    previews: dict[agenthooks.Key, str] = {}
    for text in agenthooks.long_texts(event, token_limit):
        held = _whole(text)
        if held.digest.tokens <= token_limit and text.file is not None:
            continue
        done = store_long(held, event.call_id, token_limit, values)
        previews[text.at] = done.text
    return json.dumps(agenthooks.reply(event, previews)).encode() + b"\n" if previews else b""


def _whole(text: agenthooks.Text) -> Held:
    if text.file is not None:
        try:
            if not stat.S_ISREG(os.stat(text.file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            with open(text.file, "rb") as file:
                return read_from(file)
        except (OSError, ValueError):
            warn("the agent's own file of the result cannot be read; only its start is stored")
    return Held.of(encode(text.value))
