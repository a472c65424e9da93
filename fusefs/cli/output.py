"""What the commands print: tables, JSON, sizes and progress bars.

Decided here and only here: that text from the database cannot steer a terminal, and that bars appear on a
terminal only.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol

import click

from fusefs.rules.text import escaped

_UNPRINTABLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Control, format (they change directions, or are invisible), stray surrogates, ends of lines and paragraphs."""


def printable(text: str) -> str:
    """Text as one line, control characters written out: agents choose the names of their files. An escape sequence in
    one must not reach a person's terminal, nor a line end make a line of its own, such as a hint."""
    return "".join(char if unicodedata.category(char) not in _UNPRINTABLE else escaped(char) for char in text)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=True, default=str))


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns aligned by width; the same on a terminal and in a pipe."""
    cells = [[_cell(value) for value in row] for row in rows]
    table = [list(headers), *cells]
    widths = [max(_width(row[column]) for row in table) for column in range(len(headers))]
    for row in table:
        line = "  ".join(_pad(text, width) for text, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return printable(str(value))


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def human_bytes(count: int | None) -> str:
    """1536 as `1.5 KiB`."""
    if count is None:
        return "-"
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`, `2 entries`."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


class Progress(Protocol):
    """What a long command tells of its progress."""

    def advance(self, amount: int = 1) -> None: ...


class _Silent:
    def advance(self, amount: int = 1) -> None:
        pass


@contextmanager
def progress(label: str, total: int | None, unit_bytes: bool = False) -> Iterator[Progress]:
    """A bar on stderr when stderr is a terminal, else nothing.

    Args:
        total: what `advance` will add up to; None when unknown.
        unit_bytes: the amounts are bytes.
    """
    if not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    amount = DownloadColumn() if unit_bytes else MofNCompleteColumn()
    console = Console(stderr=True)
    # No markup: a tenant's or an agent's name may come from another program.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(printable(label), total=total)

        class _Bar:
            def advance(self, amount: int = 1) -> None:
                bar.advance(task, amount)

        yield _Bar()


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere --yes must have been given.

    Ends the command with exit code 1 on no. Raises click.UsageError where nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question.rstrip('?')}: pass --yes to do it without being asked")
    if not click.confirm(printable(question), err=True):
        click.echo("nothing was changed", err=True)
        raise click.exceptions.Exit(1)
