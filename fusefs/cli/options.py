"""The options of the commands, each named once.

Decided here and only here: an option's name, type, help, and its environment variable (HANGO_FS_<NAME>, or the name
that others know it by); and which options are for the command line alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from fusefs.rules.config import MIB, RESULT_TOKEN_LIMIT, Consistency, Durability, Limits, Settings, VersionCheck
from fusefs.rules.scope import Principal

F = TypeVar("F", bound=Callable[..., Any])

PEOPLE = [principal.value for principal in Principal if principal is not Principal.SYSTEM]
"""Who a person at a command line can be; `system` is the harness itself."""


class Number(click.FloatRange):
    """A number between bounds. NaN is in every range by click's comparison, and nowhere a number of anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{found} is no finite number", param, ctx)
        return found


def option(flag: str, *more: str, **attrs: Any) -> Callable[[F], F]:
    """click.option with the environment variable that every option has."""
    attrs.setdefault("envvar", "HANGO_FS_" + flag.removeprefix("--").replace("-", "_").upper())
    attrs.setdefault("show_envvar", True)
    return click.option(flag, *more, **attrs)


def spoken(flag: str, *more: str, **attrs: Any) -> Callable[[F], F]:
    """An option for the command line alone, without environment variable and key: what destroys something, or
    picks what is destroyed. Left over in an environment it would do so unasked."""
    return option(flag, *more, envvar=None, **attrs)


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several decorators as one; the help lists the options in this order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def was_said(option: str) -> bool:
    """Whether an option is on the command line itself, not in the environment or the file."""
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


data_dir = option("--data-dir", metavar="DIR", help="Where the embedded Postgres keeps its data.")
database = together(
    option("--dsn", metavar="DSN", help="Postgres to use, as a URL or key=value text. Default: an embedded one."),
    data_dir,
)
tenant = option("--tenant", metavar="T", help="Tenant, by slug or UUID.")
agent = option("--agent", metavar="A", help="Agent, by slug or UUID.")
scope = together(tenant, agent)


def _session(text: str) -> Callable[[F], F]:
    return option("--session", metavar="S", help=text)


def _principal(text: str) -> Callable[[F], F]:
    return option("--as", "as_", type=click.Choice(PEOPLE), default=None, help=text)


mount_session = _session("Session id. Default: a new one, which is printed.")
result_session = _session("Session whose result it is. Default: the mount's; for the database it must be named.")
mount_principal = _principal("Whose rights to use. Default: agent (admin for --all).")
host_principal = _principal("Whose rights the sessions have. Default: agent.")
running_session = _session("Session whose output is stored. Default: the mount's, else a new one.")
looking = together(
    _session("Session to look as, with --as agent or member. Default: the mount's, else a new one."),
    _principal("Whose rights to use. Default: owner, who sees every session's files."),
)
acting = together(
    _session("Session to act as; it is recorded. Default: the mount's, else a new one."),
    _principal("Whose rights to use; it is recorded. Default: owner."),
)
serving = together(
    _session("Session to act as; it is recorded. Default: a new one."),
    _principal("Whose rights to use; it is recorded. Default: agent."),
)
limits = together(
    option(
        "--max-file-bytes",
        metavar="BYTES",
        type=click.IntRange(1, 1024 * MIB),
        default=Limits().max_file_bytes,
        show_default=True,
        help="Largest file, in bytes.",
    ),
    option(
        "--max-path-depth",
        metavar="N",
        type=click.IntRange(1, 512),
        default=Limits().max_path_depth,
        show_default=True,
        help="Deepest path, in levels.",
    ),
)
rescue_dir = option(
    "--rescue-dir",
    metavar="DIR",
    type=click.Path(),
    help="Where writes are kept that Postgres does not take. Default: /var/spool/fusefs for root, else a directory "
    "of the user's state.",
)
token_limit = option(
    "--token-limit",
    metavar="N",
    envvar="HANGO_TOOL_RESULT_TOKEN_LIMIT",
    type=click.IntRange(1, 1_000_000),
    default=RESULT_TOKEN_LIMIT,
    show_default=True,
    help="A result of a tool with more tokens, by estimate, is stored.",
)
as_json = option("--json", "as_json", is_flag=True, help="Print JSON.")
yes = spoken("--yes", is_flag=True, help="Do not ask for confirmation.")

mounting = together(
    option("--allow-other", is_flag=True, help="Let other users of this machine in."),
    option(
        "--uid",
        metavar="N",
        type=click.IntRange(0),
        default=os.getuid,
        show_default="yours",
        help="Owner of new files.",
    ),
    option(
        "--gid",
        metavar="N",
        type=click.IntRange(0),
        default=os.getgid,
        show_default="yours",
        help="Group of new files.",
    ),
    option("--foreground", is_flag=True, help="Stay in the foreground, for systemd and containers."),
    option(
        "--consistency",
        type=click.Choice([one.value for one in Consistency]),
        default=Consistency.NOTIFY.value,
        show_default=True,
        help="Learn of others' changes by announcement, or ask at every lookup and open.",
    ),
    option(
        "--version-check",
        type=click.Choice([one.value for one in VersionCheck]),
        default=VersionCheck.SEEN.value,
        show_default=True,
        help="Compare a write with what the session saw last, or only with the version at open.",
    ),
    option(
        "--durability",
        type=click.Choice([one.value for one in Durability]),
        default=Durability.FULL.value,
        show_default=True,
        help="Whether a change waits until the server has it on disk; relaxed: only fsync(2) does.",
    ),
    option("--require-read", is_flag=True, help="Refuse to replace a file that the session never read."),
    option("--xattr", is_flag=True, help="Answer requests for extended attributes."),
    option(
        "--write-timeout",
        metavar="SECONDS",
        type=Number(0.1, 300.0),
        default=Settings().write_timeout_s,
        show_default=True,
        help="How long a write waits for Postgres.",
    ),
    option(
        "--max-nodes",
        metavar="N",
        type=click.IntRange(100),
        default=Settings().max_nodes,
        show_default=True,
        help="So many files of an agent are kept in memory (about 1.2 KB each); the kernel is told to forget others.",
    ),
    option(
        "--listen-dsn",
        metavar="DSN",
        help="Another way to the same database for announcements, where --dsn leads to a pooler without LISTEN.",
    ),
    limits,
    rescue_dir,
    option(
        "--metrics",
        metavar="ADDR",
        help="Serve metrics to Prometheus at HOST:PORT; :PORT is on the loopback. Needs fusefs[metrics].",
    ),
    option("--log-file", metavar="PATH", help="Log of the daemon. Default in the foreground: stderr."),
)
