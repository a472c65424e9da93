"""Groups and commands of the command line: loaded on demand, each with the options that all share.

Decided here and only here: how a command's module is found, and that every command has --config and --debug.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from fusefs.cli import configfile

CONFIG_META = "fusefs.config"
"""Where a context keeps the path given with --config, for a daemon that must read the same file."""


def _load_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if not ctx.resilient_parsing:
        ctx.meta[CONFIG_META] = value
        ctx.default_map = configfile.defaults_for(ctx, value)


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if ctx.obj is not None:
        ctx.obj.debug = value


class FsCommand(click.Command):
    """A command with --config (read before every other option) and --debug."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--config"],
                metavar="PATH",
                envvar="HANGO_FS_CONFIG",
                show_envvar=True,
                is_eager=True,
                expose_value=False,
                callback=_load_config,
                help="TOML file with options; ~/.config/fusefs/config.toml if it is there.",
            )
        )
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                envvar="HANGO_FS_DEBUG",
                show_envvar=True,
                expose_value=False,
                callback=_set_debug,
                help="Show the traceback of an error.",
            )
        )


class OrderedGroup(click.Group):
    """A group that lists its commands in the order in which they were written."""

    command_class = FsCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class LazyGroup(click.Group):
    """A group that imports a command's module when that command is asked for.

    Args:
        commands_by_name: name to `module:attribute` and the line that the group's help has for it.
    """

    def __init__(self, *args: Any, commands_by_name: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_name = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._by_name:
            return None
        module, _, attribute = self._by_name[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._by_name.items()])
