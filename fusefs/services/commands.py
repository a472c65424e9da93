"""A shell command for a model: run within its time, and what the model is told of it.

Decided here and only here (DE-04 to DE-06): how much of the output is kept, when it is stored instead of shown, and
the text. How a command is ended is in `processes`, what is binary in `rules.binary`, where long output goes in
`offload`.

Threading: trio; any number may run at once. Whatever a command prints, it costs 110 MB of memory at most (measured,
while 32 MiB are stored), 1 MB where there is nowhere to store it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from signal import Signals

from fusefs.rules.binary import is_binary
from fusefs.rules.config import MIB
from fusefs.rules.preview import count, cut_in_place, encode
from fusefs.rules.results import Held, whole_characters
from fusefs.rules.text import binary_notice
from fusefs.rules.tokens import BYTES_PER_TOKEN
from fusefs.services.offload import Offload
from fusefs.services.processes import Ended, Patience, run_tree, without_database

STDOUT_BYTES = 200 * 1024
STDERR_BYTES = 56 * 1024
"""What is kept of each stream for the result (DE-06); 256 KB in all, the first 80 % and the last 20 %."""

INLINE_CHARS = 30_000
"""A longer text is stored, or cut where it cannot be stored (DE-06)."""

INLINE_TOKENS = INLINE_CHARS // BYTES_PER_TOKEN
"""For the `Offload` of commands: the limit to which it cuts what it cannot store."""

_WHOLE_STDERR = (6 * MIB, 2 * MIB)
"""What is kept of stderr to be stored, start and end; of stdout it is what `Held` keeps by itself."""

_STDERR = "[stderr]\n"
"""The line above what came from there."""

_UNATTENDED = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "false",
    "EDITOR": "false",
    "VISUAL": "false",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "TERM": "dumb",
}
"""Nobody sits at a terminal: what would wait for a person fails at once, pagers do not page, nothing is drawn."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What a command printed on one of its two streams.

    Attributes:
        text: start and end, with a mark between them where something is left out; or a sentence that it is binary.
        size: bytes that were printed.
        left_out: bytes that are not in `text`.
    """

    text: str
    size: int
    left_out: int
    binary: bool


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended and what it printed.

    Attributes:
        text: what a model is told.
        path: where the output is stored, in the namespace; None where it is in `text`, whole or cut.
    """

    text: str
    path: str | None
    stdout: Stream
    stderr: Stream
    ended: Ended


def command_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: without the way to the database, and without a person."""
    return without_database(environment) | _UNATTENDED


async def run(
    command: Sequence[str],
    *,
    directory: str,
    patience: Patience | None = None,
    environment: Mapping[str, str] | None = None,
    offload: Offload | None = None,
    call_id: str = "exec",
    signals: AsyncIterable[int] | None = None,
) -> CommandResult:
    """Run a command and say what came of it. Nothing of it is left when this returns or raises.

    Args:
        command: program and arguments, not read by a shell; `["bash", "-c", text]` for one.
        directory: where it runs, usually in a mounted directory.
        environment: instead of this process's; see `command_environment`.
        offload: stores output that is too long to be shown, made with `INLINE_TOKENS`; None: it is cut.
        call_id: the tool call whose result it is; it names the file.
        signals: numbers that arrive here reach every process of the command, which then has `patience.grace_s`.

    Nothing is raised for what the command does, nor where it cannot be run: that is in the result.
    """
    patience = patience or Patience()
    stores = offload is not None
    out = _Output(STDOUT_BYTES, Held() if stores else None)
    err = _Output(STDERR_BYTES, Held(*_WHOLE_STDERR) if stores else None)
    ended = await run_tree(
        command,
        directory=directory,
        environment=command_environment(os.environ if environment is None else environment),
        patience=patience,
        on_stdout=out.feed,
        on_stderr=err.feed,
        signals=signals,
    )
    cut_off = ended.timed_out or ended.signal is not None or ended.leftovers > 0
    stdout, stderr = out.finish(cut_off=cut_off), err.finish(cut_off=cut_off)
    body, path = _joined(stdout.text, stderr.text), None
    if len(body) > INLINE_CHARS or stdout.left_out or stderr.left_out:
        held = _all_of(out, stdout, err, stderr)
        if offload is None:
            edges = held.edges(INLINE_CHARS * 4 // 5, INLINE_CHARS // 5)
            body = cut_in_place(held.digest, edges, "there is nowhere to store it")
        else:
            stored = await offload.store(call_id, "exec", held)
            body, path = stored.text, stored.path
    return CommandResult(_with_notes(body, ended, patience), path, stdout, stderr, ended)


class _Output:
    """One stream of a running command.

    Args:
        shown_bytes: how much of it the result has.
        held: as much of it as may be stored; None where nothing is.
    """

    def __init__(self, shown_bytes: int, held: Held | None) -> None:
        self._head_bytes = shown_bytes * 4 // 5
        self._tail_bytes = shown_bytes - self._head_bytes
        self.held = held or Held(self._head_bytes, self._tail_bytes)
        self._half = b""

    def feed(self, data: bytes) -> None:
        """Take what was printed, but for half a character at its end: the rest may come."""
        data = self._half + data
        end = whole_characters(data)
        self._half = data[end:]
        self.held.feed(data[:end])

    def finish(self, *, cut_off: bool) -> Stream:
        """What there is to show.

        Args:
            cut_off: the command was ended in the middle of it. Then half a character is no sign of binary output.
        """
        if not cut_off:
            self.held.feed(self._half)
        size = self.held.size
        head, tail = self.held.edges(self._head_bytes, self._tail_bytes)
        if is_binary(self.held.digest, head):
            return Stream(binary_notice(size), size, 0, binary=True)
        left_out = size - len(head) - len(tail)
        text = head.decode()
        if left_out:
            text = f"{text}\n{_left_out(left_out)}\n{tail.decode()}"
        return Stream(text, size, left_out, binary=False)


def _all_of(out: _Output, stdout: Stream, err: _Output, stderr: Stream) -> Held:
    """Everything that was printed, in the form of `_joined`, as it is stored."""
    held = Held.of(encode(stdout.text)) if stdout.binary else out.held
    if not stderr.size:
        return held
    unended = held.digest.lines > held.digest.newlines
    held.feed(encode(("\n" if unended else "") + _STDERR))
    if stderr.binary:
        held.feed(encode(stderr.text))
        return held
    head, tail = err.held.edges(*_WHOLE_STDERR)
    missing = err.held.size - len(head) - len(tail)
    held.feed(head)
    if missing:
        held.feed(encode(f"\n{_left_out(missing)}\n"))
        held.feed(tail)
    return held


def _left_out(count_bytes: int) -> str:
    return f"[… {count(count_bytes, 'byte')} left out …]"


def _joined(stdout: str, stderr: str) -> str:
    if not stderr:
        return stdout
    unended = stdout and not stdout.endswith("\n")
    return stdout + ("\n" if unended else "") + _STDERR + stderr


def _with_notes(body: str, ended: Ended, patience: Patience) -> str:
    """The body and, a line each, what there is to say about the end of the command."""
    notes = []
    if ended.timed_out:
        notes.append(f"command timed out after {patience.timeout_s:g}s")
    elif ended.failure:
        notes.append(f"{ended.failure}; exit code {ended.exit_code}")
    elif ended.signal is not None:
        notes.append(f"ended by {_signal_name(ended.signal)}; exit code {ended.exit_code}")
    elif ended.exit_code:
        notes.append(f"exit code {ended.exit_code}")
    if ended.leftovers:
        notes.append(f"background processes ended with it: {ended.leftovers}")
    if ended.unkillable:
        notes.append(f"processes that cannot be ended: {ended.unkillable}")
    if not body and not notes:
        notes.append("no output")
    lines = [body.removesuffix("\n")] if body else []
    return "\n".join([*lines, *(f"[{note}]" for note in notes)])


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
