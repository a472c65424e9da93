"""`fusefs offload` and `fusefs offload-hook`: long results of tools, from a shell.

Decided here and only here: where a result goes (through the mounted directory, or into the database), and that neither
command fails because a result could not be stored.

Over a mounted directory nothing heavy is imported, and no event loop runs: an agent's harness starts one of these for
every call of a tool.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from fusefs.cli import options
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import printable
from fusefs.rules import agenthooks
from fusefs.rules.config import Limits
from fusefs.rules.errors import BadPath, BadScope, FsError, NotFound, outcome
from fusefs.rules.preview import encode
from fusefs.rules.results import Held, Offloaded
from fusefs.rules.scope import Principal, valid_session
from fusefs.services import mounted_results
from fusefs.services.offload import Offload, ResultStore, Unopened, unobserved

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.scope import Scope

T = TypeVar("T")

_PIECE = 1 << 20

storing = options.together(
    options.token_limit,
    options.option(
        "--dir",
        "directory",
        metavar="DIR",
        type=click.Path(readable=False),
        help="A directory of the mounted namespace to store into. Default: the current one.",
    ),
    options.database,
    options.scope,
    options.result_session,
    options.limits,
)


@click.command(cls=FsCommand)
@options.option("--tool-call-id", metavar="ID", default="", help="The call's id, which becomes the file's name.")
@storing
def offload(tool_call_id: str, token_limit: int, **values: Any) -> None:
    """Pass a tool's output on, or store it and print a preview where it is too long for a model.

    Reads stdin to its end. What is short comes out byte for byte. What is stored goes through the mounted directory
    that --dir or the current directory lies in, as that mount's session; with --agent into the database, as --session.
    Of what cannot be stored start and end are printed, with the reason; the exit code is 0 then, too.

    \b
    Example:
      make 2>&1 | fusefs offload --tool-call-id call_1
      curl -s https://example.org/big.json | fusefs offload --tenant acme --agent coder --session s-1
    """
    held = _read(sys.stdin)
    if held.digest.tokens <= token_limit:
        _write(held.edges(held.size, 0)[0])
        return
    done = _store(held, tool_call_id, token_limit, values)
    if done.error_type:
        _warn(f"the result could not be stored ({done.error_type}); it is cut")
    _write(encode(done.text.removesuffix("\n")) + b"\n")


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
        _warn(f"the hook's input is not understood ({exc}); nothing was changed")
    except Exception as exc:  # noqa: BLE001  (a hook must not break the agent that calls it)
        _warn(f"{outcome(exc).text}; nothing was changed")
    else:
        _write(said)


def _answer(agent: agenthooks.Agent | None, token_limit: int, values: dict[str, Any]) -> bytes:
    import json

    data = _stream(sys.stdin).read(agenthooks.MAX_INPUT_BYTES + 1)
    if len(data) > agenthooks.MAX_INPUT_BYTES:
        raise agenthooks.NotAnEvent(f"it has more than {agenthooks.MAX_INPUT_BYTES} bytes")
    event = agenthooks.parse(data, agent)
    if event.is_exempt:
        return b""
    values["directory"] = values["directory"] or event.directory or None
    if values["session"] is None and valid_session(event.session):
        values["session"] = event.session
    previews: dict[agenthooks.Key, str] = {}
    for text in agenthooks.long_texts(event, token_limit):
        held = _whole(text)
        if held.digest.tokens <= token_limit and text.file is not None:
            continue
        done = _store(held, event.call_id, token_limit, values)
        if done.error_type:
            _warn(f"the result could not be stored ({done.error_type}); it is cut")
        previews[text.at] = done.text
    return json.dumps(agenthooks.reply(event, previews)).encode() + b"\n" if previews else b""


def _whole(text: agenthooks.Text) -> Held:
    if text.file is not None:
        try:
            if not stat.S_ISREG(os.stat(text.file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            with open(text.file, "rb") as file:
                return _read_from(file)
        except (OSError, ValueError):
            _warn("the agent's own file of the result cannot be read; only its start is stored")
    return Held.of(encode(text.value))


def _store(held: Held, tool_call_id: str, token_limit: int, values: dict[str, Any]) -> Offloaded:
    """Store a long text. Raises nothing: what cannot be stored is cut."""

    def work(store: ResultStore) -> Coroutine[Any, Any, Offloaded]:
        return Offload(store, limit_tokens=token_limit, observe=unobserved).store(tool_call_id, "", held)

    try:
        mounted = mounted_store(values)
        return _finish(work(mounted)) if mounted is not None else _in_database(values, work)
    except Exception as exc:  # noqa: BLE001  (whatever keeps it from being stored is told in its place)
        return _finish(work(Unopened(exc)))


def mounted_store(values: dict[str, Any]) -> mounted_results.MountedResults | None:
    """The mounted directory to store into, or None for the database. Raises NotFound where neither is named,
    BadScope for another session than the mount's."""
    if values["directory"] is None and options.was_said("agent"):
        return None
    try:
        found = mounted_results.find(values["directory"] or ".")
    except NotFound:
        if values["agent"] is not None and not options.was_said("directory"):
            return None
        raise
    if options.was_said("session") and values["session"] != found.session:
        raise BadScope(f"the mount is session {found.session}'s, not {values['session']}'s")
    return found


def _in_database(values: dict[str, Any], work: Callable[[ResultStore], Coroutine[Any, Any, T]]) -> T:
    from fusefs.cli.target import Target, run_on
    from fusefs.services.database_results import DatabaseResults

    if values["session"] is None:
        raise BadScope("no session was named")
    limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])

    async def on_database(db: Database, scope: Scope, _path: str) -> T:
        return await work(DatabaseResults(db, scope, limits))

    return run_on(Target(values["dsn"], values["tenant"], values["agent"], "/"), values, on_database, Principal.SYSTEM)


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("it waits for something")


def _stream(standard: Any) -> BinaryIO:
    """The bytes of stdin or stdout. Raises BadPath where the caller closed it."""
    if standard is None:
        raise BadPath("stdin or stdout is closed")
    found: BinaryIO = standard.buffer
    return found


def _read(standard: Any) -> Held:
    try:
        return _read_from(_stream(standard))
    except OSError as exc:
        raise BadPath(f"stdin cannot be read ({exc.strerror})") from exc


def _read_from(file: BinaryIO) -> Held:
    held = Held()
    while piece := file.read(_PIECE):
        held.feed(piece)
    return held


def _write(data: bytes) -> None:
    stream = _stream(sys.stdout)
    stream.write(data)
    stream.flush()


def _warn(text: str) -> None:
    click.echo(f"fusefs: {printable(text)}", err=True)
