"""The TOML file with options: where it is, which keys it may have, and of which type they are.

Decided here and only here: top-level keys are option names with underscores and hold for every command
that has the option; a table named like a command (`[mount]`, `[gc]`) holds for that command alone and wins.
The command line wins over the environment, the environment over the file. Hooks (`[[hooks]]`) are in the file only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fusefs.rules.errors import BadConfig

if TYPE_CHECKING:
    from fusefs.rules.events import HookRule

HOOKS = "hooks"
_HOOK_KEYS = ("command", "events", "include", "exclude", "timeout")


def option_key(option: click.Parameter) -> str:
    """The key of an option in the file: its long name, with underscores."""
    longest = max(option.opts, key=len)
    return longest.lstrip("-").replace("-", "_")


def in_file(option: click.Parameter) -> bool:
    """Whether the file may have the option: not what names the file, nor what is for the command line alone."""
    return bool(option.envvar) and option_key(option) != "config"


def default_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base, "fusefs", "config.toml")


def defaults_for(ctx: click.Context, path: str | None) -> dict[str, Any]:
    """The values of the file for the context's command, keyed by parameter name as click wants them.

    Args:
        path: the file that was asked for; None means the default one, which may be missing.

    Raises BadConfig for a file that cannot be read, an unknown key, or a value of the wrong type.
    """
    file, table = _load(path)
    if not table:
        return {}
    _hooks(file, table.pop(HOOKS, []))
    _check(file, table, ctx.find_root().command)
    chosen = {key: value for key, value in table.items() if not isinstance(value, dict)}
    words = ctx.command_path.split()[1:]
    if words and isinstance(table.get(words[0]), dict):
        chosen.update(table[words[0]])
    return {
        option.name: chosen[option_key(option)]
        for option in ctx.command.params
        if isinstance(option, click.Option)
        and option.name is not None
        and in_file(option)
        and option_key(option) in chosen
    }


def hooks_of(path: str | None) -> tuple[HookRule, ...]:
    """The hooks of the file; see `defaults_for`.

    Raises BadConfig also where others than its owner and root may write the file: they would choose what runs here.
    """
    file, table = _load(path)
    return _hooks(file, table.get(HOOKS, []))


def _hooks(file: Path, given: Any) -> tuple[HookRule, ...]:
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise BadConfig(f"{file}: hooks must be tables, [[hooks]]")
    if given and not _is_guarded(file):
        raise BadConfig(
            f"{file}: others may write it, so its hooks are not followed",
            hint="It must belong to you or to root, and be writable by its owner only.",
        )
    return tuple(_hook(f"{file}: hook {number}", one) for number, one in enumerate(given, 1))


def _load(path: str | None) -> tuple[Path, dict[str, Any]]:
    file = Path(path) if path is not None else default_path()
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        if path is None:
            return file, {}
        raise BadConfig(f"the configuration file {file} does not exist") from exc
    except OSError as exc:
        raise BadConfig(f"the configuration file {file} cannot be read ({exc.strerror})") from exc
    except UnicodeDecodeError as exc:
        raise BadConfig(f"the configuration file {file} is not valid TOML: {exc}") from exc
    import tomllib

    try:
        return file, tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise BadConfig(f"the configuration file {file} is not valid TOML: {exc}") from exc


def _is_guarded(file: Path) -> bool:
    found = file.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _hook(where: str, given: dict[str, Any]) -> HookRule:
    from fusefs.rules.events import HOOK_TIMEOUT_S, EventKind, HookRule, pattern

    unknown = given.keys() - _HOOK_KEYS
    if unknown:
        raise BadConfig(f"{where}: unknown key {min(unknown)}", hint=f"The keys are {', '.join(_HOOK_KEYS)}.")
    lists = {key: given.get(key, []) for key in ("command", "events", "include", "exclude")}
    for key, words in lists.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadConfig(f"{where}: {key} must be a list of strings")
    timeout = given.get("timeout", HOOK_TIMEOUT_S)
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise BadConfig(f"{where}: timeout must be a number")
    kinds = [kind.value for kind in EventKind]
    for event in lists["events"]:
        if event not in kinds:
            raise BadConfig(f"{where}: there is no event {event}", hint=f"The events are {', '.join(kinds)}.")
    try:
        return HookRule(
            tuple(lists["command"]),
            frozenset(EventKind(event) for event in lists["events"]),
            tuple(pattern(text) for text in lists["include"]),
            tuple(pattern(text) for text in lists["exclude"]),
            timeout,
        )
    except BadConfig as exc:
        raise BadConfig(f"{where}: {exc.message}") from exc


def _check(file: Path, table: dict[str, Any], program: click.Command) -> None:
    """Check the whole file, whichever command reads it: a mistake must not wait for its command."""
    by_command = {name: list(_options(command)) for name, command in _commands(program)}
    everything = {option_key(option): option for options in by_command.values() for option in options}
    for key, value in table.items():
        if not isinstance(value, dict):
            _check_value(file, key, value, everything, "")
        elif key not in by_command:
            raise BadConfig(
                f"{file}: there is no table [{key}]", hint=f"The tables are {', '.join(sorted(by_command))}."
            )
        else:
            known = {option_key(option): option for option in by_command[key]}
            for inner, inner_value in value.items():
                _check_value(file, inner, inner_value, known, f"{key}.")


def _check_value(file: Path, key: str, value: Any, known: dict[str, click.Option], prefix: str) -> None:
    option = known.get(key)
    if option is None:
        raise BadConfig(f"{file}: unknown key {prefix}{key}", hint=f"The keys are {', '.join(sorted(known))}.")
    wanted, fits = _wanted_type(option, value)
    if not fits:
        raise BadConfig(f"{file}: {prefix}{key} must be {wanted}")


def _wanted_type(option: click.Option, value: Any) -> tuple[str, bool]:
    is_number = not isinstance(value, bool)
    if option.is_flag:
        return "true or false", isinstance(value, bool)
    if isinstance(option.type, click.Choice):
        choices = [str(choice) for choice in option.type.choices]
        return f"one of {', '.join(choices)}", value in choices
    if isinstance(option.type, (click.types.IntParamType, click.IntRange)):
        return "a whole number", isinstance(value, int) and is_number
    if isinstance(option.type, (click.types.FloatParamType, click.FloatRange)):
        return "a number", isinstance(value, (int, float)) and is_number
    return "a string", isinstance(value, str)


def _commands(program: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(program, click.Group):
        return
    with click.Context(program) as ctx:
        for name in program.list_commands(ctx):
            command = program.get_command(ctx, name)
            if command is not None:
                yield name, command


def _options(command: click.Command) -> Iterator[click.Option]:
    inner = command.commands.values() if isinstance(command, click.Group) else [command]
    for one in inner:
        for param in one.params:
            if isinstance(param, click.Option) and in_file(param):
                yield param
