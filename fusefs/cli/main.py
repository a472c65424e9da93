"""The entry point `fusefs`: finds the command, runs it, and turns whatever happens into an exit code.

Decided here and only here: which commands there are, and what a person sees of an error: one sentence,
a hint, an exit code from `errors.outcome`, never a traceback (except with --debug).

Nothing heavy is imported here: `fusefs status` must not pay for trio and psycopg (about 0.2 s).
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from typing import Any

import click

from fusefs.cli.groups import LazyGroup
from fusefs.rules.errors import FsError, outcome

COMMANDS = {
    "mount": ("fusefs.cli.mount:mount", "Mount the files of an agent as a directory."),
    "host": ("fusefs.cli.mount:host", "Mount every session of every agent, for the containers of this machine."),
    "umount": ("fusefs.cli.umount:umount", "Unmount a directory and wait for its daemon to end."),
    "status": ("fusefs.cli.status:status", "List the mounts of this machine."),
    "init": (
        "fusefs.cli.schema:init",
        "Prepare a database: start the embedded Postgres if no DSN is given, and create or update the schema.",
    ),
    "migrate": ("fusefs.cli.schema:migrate", "Apply, take back and list the schema's migrations."),
    "tenant": ("fusefs.cli.tenants:tenant", "Add, list and remove tenants."),
    "agent": ("fusefs.cli.tenants:agent", "Add, list and remove agents."),
    "check": ("fusefs.cli.check:check", "Verify what is stored, of one agent, a tenant's agents or all."),
    "versions": (
        "fusefs.cli.versions:versions",
        "List the versions of a file, deleted ones included, or write one to stdout.",
    ),
    "restore": (
        "fusefs.cli.versions:restore",
        "Make an old version of a file the newest one; a deleted file is made anew.",
    ),
    "conflicts": (
        "fusefs.cli.conflicts:conflicts",
        "List the writes that lost a race, read them, and decide about them.",
    ),
    "rescue": ("fusefs.cli.rescue:rescue", "List the writes that Postgres did not take, put them back, or drop them."),
    "export": ("fusefs.cli.transfer:export", "Write an agent's files to stdout as a tar archive."),
    "import": ("fusefs.cli.transfer:import_", "Read a tar archive from stdin into an agent's files."),
    "exec": (
        "fusefs.cli.exec:exec_",
        "Run a command for a model: bounded in time and output, and with nothing of it left running.",
    ),
    "offload": (
        "fusefs.cli.offload:offload",
        "Pass a tool's output on, or store it and print a preview where it is too long for a model.",
    ),
    "offload-hook": (
        "fusefs.cli.offload_hook:offload_hook",
        "Be the hook of an agent that stores its tools' long results and shows it a preview.",
    ),
    "grep": ("fusefs.cli.grep:grep", "Find lines in an agent's files, without a mount."),
    "mcp": ("fusefs.cli.mcp:mcp", "Serve an agent's files to MCP clients, as tools and resources."),
    "mcp-proxy": (
        "fusefs.cli.mcp_proxy:mcp_proxy",
        "Run a stdio MCP server, and store what its tools give that is too long for a model.",
    ),
    "df": ("fusefs.cli.usage:df", "Show the files and the history of each agent, with their bytes and quotas."),
    "gc": (
        "fusefs.cli.usage:gc",
        "Remove superseded contents and large tool results that are old enough, and what is over a history's quota.",
    ),
}
"""Each command by name: where it is, and the first sentence of its help; `fusefs --help` then imports none of them."""

INTERRUPTED = 130
"""128 + SIGINT, as a shell says it."""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Where our output goes has no room for it, which is no fault of ours."""

BROKEN_PIPE = 141
"""128 + SIGPIPE."""


@dataclass(slots=True)
class Run:
    """What one run of the program was asked to do about its own errors."""

    debug: bool = False
    log_path: str = ""
    ready_fd: int | None = None


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"fusefs {version('fusefs')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    commands_by_name=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog='Shell completion: eval "$(_FUSEFS_COMPLETE=bash_source fusefs)" (also zsh_source, fish_source).',
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Agent files in Postgres, mounted as a real directory.

    \b
    Example:
      fusefs init
      fusefs mount ~/work --tenant acme --agent coder --create
    """


def main(args: list[str] | None = None) -> None:
    """Run one command and exit the process."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Run one command; returns its exit code and prints its error, if any, to stderr."""
    state = Run()
    try:
        code: Any = cli.main(args, prog_name="fusefs", standalone_mode=False, obj=state)
        sys.stdout.flush()
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.ClickException as exc:
        _complain(state, exc.format_message(), _usage_hint(exc), exc.exit_code)
        return exc.exit_code
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone (`| head`): that is its right. What is still buffered goes nowhere.
        # click exits by itself in that case, and in no other here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except BaseException as exc:  # noqa: BLE001  (the one place where every error ends)
        return _report(state, exc)
    return code if isinstance(code, int) else 0


def _report(state: Run, exc: BaseException) -> int:
    cause = _root_cause(exc)
    if isinstance(cause, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(cause, OSError) and cause.errno in _FULL:
        # What is still buffered would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _complain(
            state, f"no room to write: {cause.strerror}", "Free some space, then run it again.", FsError.exit_code
        )
        return FsError.exit_code
    result = outcome(cause)
    hint = result.hint
    if not isinstance(cause, FsError):
        where = f"The log is {state.log_path}." if state.log_path else "Run it again with --debug to see where."
        hint = f"This is a fault of fusefs. {where}"
        if state.log_path and not state.debug:
            # A daemon's stderr is its log: the place for the details of an unexpected error.
            _print_traceback(exc)
    if state.debug:
        _print_traceback(exc)
    _complain(state, result.text, hint, result.exit_code)
    return result.exit_code


def _root_cause(exc: BaseException) -> BaseException:
    """The one error that a person should hear of: trio wraps what its tasks raise in groups."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    leaves = [_root_cause(inner) for inner in exc.exceptions]
    for kind in (KeyboardInterrupt, FsError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def _usage_hint(exc: click.ClickException) -> str:
    hint = getattr(exc, "hint", None)
    if isinstance(hint, str):
        return hint
    ctx = getattr(exc, "ctx", None)
    return f"See `{ctx.command_path} --help`." if ctx is not None else ""


def _complain(state: Run, text: str, hint: str, exit_code: int) -> None:
    from fusefs.cli.output import printable
    from fusefs.telemetry.logs import scrub

    # Scrubbed: a DSN that was typed as a wrong argument is quoted by click, and this may be a log.
    text, hint = printable(scrub(text.strip().rstrip("."))), printable(hint)
    click.echo(f"fusefs: {text}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    if state.ready_fd is not None:
        from fusefs.cli.background import report_failure

        report_failure(state.ready_fd, text, hint, exit_code)


def _print_traceback(exc: BaseException) -> None:
    import traceback

    from fusefs.telemetry.logs import scrub

    click.echo(scrub("".join(traceback.format_exception(exc))), err=True, nl=False)


if __name__ == "__main__":
    main()
