"""`fusefs offload`: long results of tools, from a shell; and what its hook shares with it.

Decided here and only here: where a result goes (through the mounted directory, or into the database), and that no
command fails because a result could not be stored.

An agent's harness starts one of these for every call of a tool. What stores is imported when something is long; over a
mounted directory nothing heavy is imported even then, and no event loop runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from fusefs.cli import options
from fusefs.cli.groups import FsCommand
from fusefs.rules.errors import BadPath, BadScope, NotFound
from fusefs.rules.results import Held, Offloaded
from fusefs.rules.scope import Principal

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.scope import Scope
    from fusefs.services.mounted_results import MountedResults
    from fusefs.services.offload import ResultStore

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
        write(held.edges(held.size, 0)[0])
        return
    from fusefs.rules.preview import encode

    done = store_long(held, tool_call_id, token_limit, values)
    write(encode(done.text.removesuffix("\n")) + b"\n")


def store_long(held: Held, tool_call_id: str, token_limit: int, values: dict[str, Any]) -> Offloaded:
    """Store a long text. Raises nothing: what cannot be stored is cut, and stderr says so."""
    from fusefs.services.offload import Offload, Unopened, unobserved

    def work(store: ResultStore) -> Coroutine[Any, Any, Offloaded]:
        return Offload(store, limit_tokens=token_limit, observe=unobserved).store(tool_call_id, "", held)

    try:
        mounted = mounted_store(values)
        done = _finish(work(mounted)) if mounted is not None else _in_database(values, work)
    except Exception as exc:  # noqa: BLE001  (whatever keeps it from being stored is told in its place)
        done = _finish(work(Unopened(exc)))
    if done.error_type:
        warn(f"the result could not be stored ({done.error_type}); it is cut")
    return done


def mounted_store(values: dict[str, Any]) -> MountedResults | None:
    """The mounted directory to store into, or None for the database. Raises NotFound where neither is named,
    BadScope for another session than the mount's."""
    from fusefs.services import mounted_results

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
    from fusefs.rules.config import Limits
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


def stream(standard: Any) -> BinaryIO:
    """The bytes of stdin or stdout. Raises BadPath where the caller closed it."""
    if standard is None:
        raise BadPath("stdin or stdout is closed")
    found: BinaryIO = standard.buffer
    return found


def _read(standard: Any) -> Held:
    try:
        return read_from(stream(standard))
    except OSError as exc:
        raise BadPath(f"stdin cannot be read ({exc.strerror})") from exc


def read_from(file: BinaryIO) -> Held:
    """A file to its end, as much of it as is ever kept. Raises OSError."""
    held = Held()
    while piece := file.read(_PIECE):
        held.feed(piece)
    return held


def write(data: bytes) -> None:
    """Write to stdout, and see to it that it arrives."""
    out = stream(sys.stdout)
    out.write(data)
    out.flush()


def warn(text: str) -> None:
    """One line on stderr."""
    from fusefs.cli.output import printable

    click.echo(f"fusefs: {printable(text)}", err=True)
