"""The pages docs/reference/configuration.md and docs/reference/errors.md, made from the options and the errors
themselves; `scripts/make-reference` writes them, and a test fails when one is out of date.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import click

from fusefs.cli.configfile import in_file, option_key
from fusefs.cli.main import cli
from fusefs.rules.errors import FsError, all_errors

_CONFIGURATION = """# Configuration

<!-- Made by scripts/make-reference from the code. Do not edit. -->

An option of a command can be set in three places. The first that has it wins:

1. the command line;
2. its environment variable;
3. the TOML file named by `--config` or `HANGO_FS_CONFIG`, else `~/.config/fusefs/config.toml` if it is there
   (`$XDG_CONFIG_HOME/fusefs/config.toml`). A table named like a command (`[mount]`, `[gc]`) holds for that
   command and wins over the top-level keys, which hold for every command that has the option.

The whole file is checked by every command: an unknown key, an unknown table or a value of the wrong type ends it
with exit code 2. A flag in the environment is `1` or `true`; in the file it is `true`. A daemon reads all of this
once, at its start. Tables `[[hooks]]` are for [commands that run after a change](../howto/hooks.md).

```toml
dsn = "postgresql://app@db.internal/files"
max_file_bytes = 16777216

[mount]
consistency = "strict"

[gc]
version_days = 90
```

A password belongs in the environment, in the file (mode 0600) or in libpq's `~/.pgpass`. On a command line
everybody can read it; `fusefs mount` and `fusefs host` therefore start over with it in the environment.

## Options
"""

_SPOKEN = """
These have neither a variable nor a key, since one left over from yesterday would destroy something, or pick what is
destroyed, unasked: """

# Read by the code, and no option of a command.
VARIABLES = {
    "HANGO_FS_RUNTIME_DIR": "Where the records of mounts are. Default: `/run/fusefs` for root, else "
    "`$XDG_RUNTIME_DIR/fusefs`, else the state directory.",
    "XDG_CONFIG_HOME": "Base of the TOML file. Default: `~/.config`.",
    "XDG_DATA_HOME": "Base of the embedded Postgres's data. Default: `~/.local/share`; root uses `/var/lib/fusefs`.",
    "XDG_RUNTIME_DIR": "See `HANGO_FS_RUNTIME_DIR`. Not used for root.",
    "XDG_STATE_HOME": "Base of the daemons' logs. Default: `~/.local/state`, for root `/var/log`.",
    "NOTIFY_SOCKET": "Set by systemd: it is told when the mount serves and when it ends.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Base URL of a collector: spans and metrics are sent to it by OTLP. Needs "
    "`fusefs[otlp]`; [observability](../howto/observability.md#send-spans-and-metrics-by-otlp) tells more.",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "URL for metrics alone, with its path.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "URL for spans alone, with its path.",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "`http/protobuf`, which is the default, and no other.",
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "As above, for metrics.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "As above, for spans.",
    "OTEL_METRICS_EXPORTER": "`otlp` sends metrics to the default endpoint, `none` does not send them.",
    "OTEL_TRACES_EXPORTER": "As above, for spans.",
    "OTEL_SDK_DISABLED": "`true`: nothing is sent, whatever the others say.",
    "ANTHROPIC_API_KEY": "The key of the model's API, for the loop of `fusefs.harness`; read from nowhere else.",
    "ANTHROPIC_BASE_URL": "The address of that API, where it is not Anthropic's own.",
    "PGHOST": "As every variable of libpq: fills what the DSN leaves out (`PGPORT`, `PGUSER`, `PGPASSFILE` and so on).",
    "PGPORT": "As above.",
    "PGGSSENCMODE": "As above. Without it and without `gssencmode` in the DSN, GSSAPI is not tried: it costs a trip.",
}

_ERRORS = """# Errors

<!-- Made by scripts/make-reference from the code. Do not edit. -->

One table for every door: what a system call returns in a mounted directory, the HTTP status and the exit code of a
command. A system call returns only a number: the sentence and the hint are in `/.fusefs/errors` of the mount
([control directory](control-directory.md)).

| error | errno | HTTP | exit code | what happened | what to do |
|---|---|---|---|---|---|"""

_ERRORS_END = """
Any other exception is a fault of fusefs: EIO, HTTP 500, exit code 70, and a traceback in the log.

## What the numbers say in a shell

| message | mostly means |
|---|---|
| `Stale file handle` (ESTALE) | somebody changed the file since this session read it: read it again, then retry; \
bytes that were written already are in `/.fusefs/conflicts` |
| `Permission denied` (EACCES) | `/memories` and `/skills` are written by people, `/large_tool_results` and \
`/conversation_history` by the harness |
| `No such file or directory` (ENOENT) | also: a file of another session under `/large_tool_results` or \
`/conversation_history` |
| `File too large` (EFBIG) | over `--max-file-bytes`; the old content is untouched |
| `Disk quota exceeded` (EDQUOT) | over the agent's quota; see `fusefs df` |
| `Invalid or incomplete multibyte or wide character` (EILSEQ) | the name is not UTF-8 |
| `Operation not permitted` (EPERM) | a hard link, or a device node: neither exists here |
| `Operation not supported` (EOPNOTSUPP) | an extended attribute: none is stored |
| `Invalid cross-device link` (EXDEV) | a rename from one session's or agent's folder into another's: tools copy then |
| `Input/output error` (EIO) | Postgres was away longer than `--write-timeout`, or a fault of fusefs: see the log |
| `Transport endpoint is not connected` (ENOTCONN) | the daemon is gone: see \
[troubleshooting](../howto/troubleshooting.md) |
"""


def render_configuration() -> str:
    """The page of options, variables and keys, as Markdown."""
    parts = [_CONFIGURATION, "| option | environment | key | meaning | commands |\n|---|---|---|---|---|"]
    options = list(_options())
    parts += [_option(option, commands) for option, commands in options if option.envvar]
    parts.append(_SPOKEN + ", ".join(_spoken(options)) + ".")
    parts.append("\n## Other variables\n\n| variable | meaning |\n|---|---|")
    parts += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(parts) + "\n"


def render_errors() -> str:
    """The page of errors, as Markdown."""
    own = [error for error in all_errors() if error.__module__ == FsError.__module__]
    rows = [
        f"| {error.__name__} | {errno.errorcode[error.errno]} ({os.strerror(error.errno)}) | {error.http} "
        f"| {error.exit_code} | {(error.__doc__ or '').strip().splitlines()[0]} | {error.hint} |"
        for error in sorted(own, key=lambda one: (one.exit_code, one.__name__))
    ]
    return "\n".join([_ERRORS, *rows, _ERRORS_END])


def _options() -> Iterator[tuple[click.Option, list[str]]]:
    """Each option of the program by its key and help, with the commands that have it."""
    found: dict[tuple[str, str], tuple[click.Option, list[str]]] = {}
    for path, command in _commands(cli, ""):
        for option in command.params:
            if isinstance(option, click.Option):
                key = (option_key(option), option.help or "")
                found.setdefault(key, (option, []))[1].append(path)
    yield from (found[key] for key in sorted(found))


def _spoken(options: list[tuple[click.Option, list[str]]]) -> Iterator[str]:
    commands: dict[str, list[str]] = {}
    for option, paths in options:
        if not option.envvar:
            commands.setdefault(f"--{option_key(option)}", []).extend(paths)
    for name, paths in commands.items():
        yield f"`{name}` ({', '.join(paths)})"


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    with click.Context(group) as ctx:
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            if isinstance(command, click.Group):
                yield from _commands(command, f"{path}{name} ")
            elif command is not None:
                yield path + name, command


def _option(option: click.Option, commands: list[str]) -> str:
    name = f"`{max(option.opts, key=len)}`"
    if isinstance(option.type, click.Choice):
        name += " " + " \\| ".join(f"`{choice}`" for choice in option.type.choices)
    elif not option.is_flag:
        name += f" `{option.metavar or option.type.name.upper()}`"
    meaning = option.help or ""
    if option.show_default and option.default is not None:
        meaning += f" Default: {option.show_default if isinstance(option.show_default, str) else option.default}."
    key = f"`{option_key(option)}`" if in_file(option) else ""
    shown = "all" if option_key(option) in ("config", "debug") else ", ".join(commands)
    return f"| {name} | `{option.envvar}` | {key} | {meaning} | {shown} |"
