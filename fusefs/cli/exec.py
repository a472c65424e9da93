"""`fusefs exec`: run a command for a model, and print what the model is told of it.

Decided here and only here: where output goes that is too long to be shown. Without --agent and --session on the
command line that is the mounted namespace in which the command runs, through the mount; else it is the database; where
there is neither, output is cut.
"""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fusefs.cli import options, target
from fusefs.cli.groups import FsCommand
from fusefs.cli.output import print_json
from fusefs.rules.config import Limits
from fusefs.rules.errors import NotFound

if TYPE_CHECKING:
    from fusefs.db.pool import Database
    from fusefs.rules.scope import Scope
    from fusefs.services.commands import CommandResult
    from fusefs.services.offload import ResultStore


@click.command(cls=FsCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@options.option(
    "--timeout",
    metavar="SECONDS",
    type=options.Number(0, 86400, min_open=True),
    default=120.0,
    show_default=True,
    help="How long the command may run.",
)
@options.option("--dir", "directory", metavar="DIR", default=".", help="Where it runs. Default: the current directory.")
@options.option(
    "--tool-call-id",
    metavar="ID",
    default="exec",
    show_default=True,
    help="The tool call whose result it is: it names the file of a long one.",
)
@options.database
@options.scope
@options.running_session
@options.limits
@options.as_json
def exec_(**values: Any) -> int:
    """Run a command for a model: bounded in time and output, and with nothing of it left running.

    Prints what the model is told. Ends with the command's exit code, 128 + N when signal N ended it, 124 when its time
    was over, 126 or 127 when it could not be run. No shell reads COMMAND: name one where you want it.

    \b
    Example:
      fusefs exec --timeout 60 -- make test
      fusefs exec --dir ~/work -- bash -c 'grep -rn TODO . | head'
    """
    values["directory"] = os.path.abspath(values["directory"])
    result = _run(values)
    if values["as_json"]:
        print_json(asdict(result))
    else:
        click.echo(result.text.encode())
    return result.ended.exit_code


def _run(values: dict[str, Any]) -> CommandResult:
    import trio

    named = options.was_said("agent") or options.was_said("session")
    store = None if named else _mounted(values["directory"])
    if store is not None or not (named or values["agent"]):
        return trio.run(_guarded, values, store)

    async def on_database(db: Database, scope: Scope, path: str) -> CommandResult:
        from fusefs.services.database_results import DatabaseResults

        limits = Limits(max_file_bytes=values["max_file_bytes"], max_path_depth=values["max_path_depth"])
        return await _guarded(values, DatabaseResults(db, scope, limits))

    return target.run_on(target.locate(values["directory"], values), values, on_database)


def _mounted(directory: str) -> ResultStore | None:
    import trio

    from fusefs.services import mounted_results

    try:
        return mounted_results.find(directory, trio.to_thread.run_sync)
    except (NotFound, OSError):
        # In none, or in one that does not answer: then the command says so itself.
        return None


async def _guarded(values: dict[str, Any], store: ResultStore | None) -> CommandResult:
    """Run the command, with the signals that would end this process going to it."""
    import trio

    from fusefs.services import commands
    from fusefs.services.offload import Offload, unobserved
    from fusefs.services.processes import Patience

    offload = None
    if store is not None:
        offload = Offload(store, limit_tokens=commands.INLINE_TOKENS, observe=unobserved)
    # What nohup(1) made us ignore, the command shall not hear of either.
    heard = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    with trio.open_signal_receiver(*heard) as signals:
        return await commands.run(
            values["command"],
            directory=values["directory"],
            patience=Patience(timeout_s=values["timeout"]),
            offload=offload,
            call_id=values["tool_call_id"],
            signals=signals,
        )
