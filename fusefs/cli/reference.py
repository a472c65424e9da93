"""The page docs/reference/cli.md, made from the commands themselves; `scripts/make-cli-reference` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from fusefs.cli.configfile import in_file, option_key
from fusefs.cli.main import BROKEN_PIPE, INTERRUPTED, cli
from fusefs.rules.errors import FsError, all_errors

_HEAD = """# Command line

<!-- Made by scripts/make-cli-reference from the code. Do not edit. -->

An option can be given in three ways: on the command line, by its environment variable, or by its key in a
TOML file. The few without variable and key are for the command line alone. The command line wins over the
environment, the environment over the file. The file is the one named by `--config` or `HANGO_FS_CONFIG`, else
`~/.config/fusefs/config.toml` if it is there. Top-level keys hold for every command that has the option; a table
named like a command (`[mount]`, `[gc]`) holds for that command alone and wins. An unknown key is refused.

```toml
dsn = "postgresql://app@db.internal/files"
max_file_bytes = 16777216

[mount]
consistency = "strict"
```

An error is one sentence on stderr, `fusefs: …`, mostly with a line `hint: …`. The exit codes are
[at the end](#exit-codes). Shell completion: `eval "$(_FUSEFS_COMPLETE=bash_source fusefs)"` in `~/.bashrc`
(`zsh_source`, `fish_source` for the others).
"""


def render() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    with click.Context(cli, info_name="fusefs") as root:
        for name in cli.list_commands(root):
            command = cli.get_command(root, name)
            if command is not None:
                parts += _command(command, root)
    parts += _exit_codes()
    return "\n".join(parts).rstrip() + "\n"


def _command(command: click.Command, parent: click.Context) -> Iterator[str]:
    with click.Context(command, info_name=command.name, parent=parent) as ctx:
        yield f"## {ctx.command_path}\n" if parent.parent is None else f"### {ctx.command_path}\n"
        text, _, example = inspect.cleandoc(command.help or "").partition("\b\nExample:\n")
        if isinstance(command, click.Group):
            yield text.strip() + "\n"
            for name in command.list_commands(ctx):
                inner = command.get_command(ctx, name)
                if inner is not None:
                    yield from _command(inner, ctx)
            return
        yield f"```\n{ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}\n```\n"
        yield text.strip() + "\n"
        yield "```sh\n" + "\n".join(line.removeprefix("  ") for line in example.rstrip().splitlines()) + "\n```\n"
        yield "| option | meaning | environment | key |\n|---|---|---|---|"
        for option in command.params:
            if isinstance(option, click.Option):
                yield _option(option)
        yield ""


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    if isinstance(option.type, click.Choice):
        names += " " + " \\| ".join(f"`{choice}`" for choice in option.type.choices)
    elif not option.is_flag:
        names += f" `{option.metavar or option.type.name.upper()}`"
    help_text = option.help or ""
    if option.show_default and option.default is not None:
        shown = option.show_default if isinstance(option.show_default, str) else str(option.default)
        help_text += f" Default: {shown}."
    variable = f"`{option.envvar}`" if option.envvar else ""
    key = f"`{option_key(option)}`" if in_file(option) else ""
    return f"| {names} | {help_text} | {variable} | {key} |"


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield "| code | error | what happened |\n|---|---|---|"
    yield "| 0 | | it worked |"
    yield "| 2 | | the command line is wrong |"
    own = [error for error in all_errors() if error.__module__ == FsError.__module__]
    for error in sorted(own, key=lambda one: one.exit_code):
        yield f"| {error.exit_code} | {error.__name__} | {(error.__doc__ or '').strip().splitlines()[0]} |"
    yield "| 70 | | a fault of fusefs |"
    yield f"| {INTERRUPTED} | | interrupted with Ctrl-C |"
    yield f"| {BROKEN_PIPE} | | whoever read the output went away |"
