"""The process between a harness and one command: it holds every process that the command starts, and ends them all.

Decided here and only here: how a tree of processes is found and ended. The supervisor is the subreaper of its
descendants (prctl(2), PR_SET_CHILD_SUBREAPER): whatever is orphaned below it, in whichever group or session, becomes
its child, so that "no child is left" is a fact of the kernel. A harness cannot be that itself: it has other children.
A command of the same user can kill its supervisor; whoever must hold a hostile command needs a container.

Run as a script, `python -I -S supervisor.py …`, with nothing but the standard library: it starts in about 15 ms. It
leads a session of its own, and so does the command: a terminal's signals reach neither.

CONTROL is a stream socket. From the harness come signal numbers, one byte each: the tree gets that signal, and SIGKILL
after the grace. Its end, also by kill -9 of the harness, counts as SIGTERM. To the harness goes one line of JSON:
`{"failed", "errno"}` with what could not be done, or at last `{"code", "timed_out", "leftovers", "unkillable"}`; a
negative code is a signal.

Threading: one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import NoReturn

PR_SET_CHILD_SUBREAPER = 36

TERM_AGAIN_S = 0.2
"""How often SIGTERM is repeated once the command itself has ended."""

KILL_AGAIN_S = 0.02
"""How often SIGKILL is repeated while something forks faster than it is found."""

KILLED_S = 3.0
"""When to give up on what SIGKILL does not end: another user's process, or one that waits for a frozen device."""

ASKED_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """One command, from its start to the end of its last process."""

    def __init__(self, control: int, grace_s: float, linger_s: float) -> None:
        self._control: int | None = control
        self._grace_s = grace_s
        self._linger_s = linger_s
        self._main = 0
        self._code: int | None = None
        self._leftovers = 0
        self._wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGCHLD, *ASKED_TO_STOP):
            signal.signal(number, lambda *_: None)

    def tell(self, **message: object) -> None:
        """Say something to the harness, if it is still there."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                os.write(self._control, json.dumps(message).encode() + b"\n")

    def start(self, command: list[str]) -> None:
        """Start the command. Raises OSError where it does not exist or may not be run."""
        # Python ignores SIGPIPE, and a parent may have ignored more: a command must end by what is meant to end it.
        defaults = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
        self._main = os.posix_spawnp(command[0], command, os.environ, setsid=True, setsigmask=(), setsigdef=defaults)

    def run(self, timeout_s: float) -> None:
        """Wait until nothing of the tree is left, and report."""
        asked = self._wait(timeout_s, for_main=True)
        timed_out = asked is None and self._code is None
        if self._code is not None:
            # What it left in the background may be the end of a pipe that is about to finish.
            asked = self._wait(self._linger_s)
            if asked is None and self._any_left():
                self._leftovers = len(descendants())
        self._ask(asked or signal.SIGTERM)
        unkillable = self._kill()
        code = -signal.SIGKILL if self._code is None else self._code
        self.tell(code=code, timed_out=timed_out, leftovers=self._leftovers, unkillable=unkillable)

    def _ask(self, number: signal.Signals) -> None:
        """Send a signal to the tree and give it the grace to end.

        While the command itself lives, that is its own affair, and what it starts to clean up is left alone. Then the
        rest gets SIGTERM too, whatever the signal was: the background jobs of a shell ignore SIGINT. It is repeated,
        since a process that was being forked meanwhile is seen by no search.
        """
        deadline = time.monotonic() + self._grace_s
        while self._any_left() and (left_s := deadline - time.monotonic()) > 0:
            self._signal_all(number)
            # A stopped process takes no signal but this and SIGKILL.
            self._signal_all(signal.SIGCONT)
            if self._code is None:
                number = self._wait(left_s, for_main=True) or signal.SIGTERM
            else:
                number = self._wait(min(left_s, TERM_AGAIN_S)) or signal.SIGTERM

    def _kill(self) -> int:
        """SIGKILL until nothing is left. Returns how many processes it does not end."""
        deadline = time.monotonic() + KILLED_S
        while self._any_left():
            self._signal_all(signal.SIGKILL)
            if time.monotonic() > deadline:
                return len(descendants())
            self._wait(KILL_AGAIN_S)
        return 0

    def _wait(self, timeout_s: float, for_main: bool = False) -> signal.Signals | None:
        """Wait for the end of the tree, or only of the command itself. Returns the signal that the tree is to get,
        None at that end and when the time is over."""
        deadline = time.monotonic() + timeout_s
        while self._any_left() and not (for_main and self._code is not None):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            poll = select.poll()
            poll.register(self._wakeup, select.POLLIN)
            if self._control is not None:
                poll.register(self._control, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(left_s * 1000 + 1)]
            asked = None
            if self._wakeup in ready:
                for number in os.read(self._wakeup, 4096):
                    asked = signal.Signals(number) if number in ASKED_TO_STOP else asked
            if self._control is not None and self._control in ready:
                asked = self._read_control()
            if asked is not None:
                return asked
        return None

    def _read_control(self) -> signal.Signals:
        assert self._control is not None
        try:
            received = os.read(self._control, 1)
        except ConnectionError:
            received = b""
        if not received:
            os.close(self._control)
            self._control = None
            return signal.SIGTERM
        return signal.Signals(received[0])

    def _any_left(self) -> bool:
        """Reap what has ended; whether a child is left. Orphans are children of ours, so none means that all ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._main:
                self._code = os.waitstatus_to_exitcode(status)

    def _signal_all(self, number: signal.Signals) -> None:
        # The group at once, which no fork escapes, then whatever has left it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._main, number)
        for pid, group in descendants().items():
            if group != self._main:
                # It ended just now, or runs as another user: then `unkillable` counts it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)


def descendants() -> dict[int, int]:
    """The processes below this one that have not ended, with their groups, as /proc tells."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    # The name, in parentheses, may hold blanks and parentheses itself.
                    state, parent, group = file.read().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in "ZX":
                children.setdefault(int(parent), []).append((int(name), int(group)))
    found: dict[int, int] = {}
    parents = [os.getpid()]
    while parents:
        below = children.get(parents.pop(), [])
        found.update(below)
        parents += [pid for pid, _ in below]
    return found


def main(arguments: list[str]) -> NoReturn:
    """CONTROL TIMEOUT GRACE LINGER DIRECTORY COMMAND…; times in seconds."""
    control, timeout_s, grace_s, linger_s, directory, *command = arguments
    os.set_inheritable(int(control), False)
    libc = ctypes.CDLL(None, use_errno=True)
    supervisor = Supervisor(int(control), float(grace_s), float(linger_s))
    doing = "supervisor"
    try:
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        doing = "directory"
        os.chdir(directory)
        doing = "command"
        supervisor.start(command)
    except OSError as exc:
        supervisor.tell(failed=doing, errno=exc.errno)
        sys.exit(1)
    # The command's pipes must end with the command, and its directory may be unmounted.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.chdir("/")
    supervisor.run(float(timeout_s))
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
