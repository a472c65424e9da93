"""A daemon in the background: started by the command, which waits until it is ready or has failed.

Decided here and only here: how the two talk. The command starts `fusefs <command> --foreground` in a session
of its own, with its output going to the log and a pipe named by FUSEFS_READY_FD. One JSON line comes back:
{"event": "ready", …} or {"event": "failed", "message", "hint", "exit_code"}. A DSN goes by environment, since
everybody may read a command line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fusefs.rules.errors import MountFailed

READY_FD = "FUSEFS_READY_FD"
READY_TIMEOUT_S = 120.0
"""The first start makes the embedded Postgres's cluster, about 5 s on a slow disk; connecting has its own bound."""

END_TIMEOUT_S = 10.0
LOG_LIMIT_BYTES = 16 * 1024 * 1024


class DaemonFailed(click.ClickException):
    """The daemon's own error, as the command that started it passes it on."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message)
        self.hint = hint
        vars(self)["exit_code"] = exit_code


def take_ready_fd() -> int | None:
    """The pipe to the command that started this process, if one did. Children of ours do not inherit it."""
    text = os.environ.pop(READY_FD, None)
    if text is None or not text.isdigit():
        return None
    os.set_inheritable(int(text), False)
    return int(text)


def report_ready(fd: int | None, ready: Mapping[str, Any]) -> None:
    """Say that the mount serves: to the command that started this process, else on stdout."""
    line = json.dumps({"event": "ready", **ready}) + "\n"
    if fd is None:
        sys.stdout.write(line)
        sys.stdout.flush()
    else:
        _send(fd, line)


def report_failure(fd: int, message: str, hint: str, exit_code: int) -> None:
    """Say why there will be no mount. After `report_ready` nobody listens, and this does nothing."""
    _send(fd, json.dumps({"event": "failed", "message": message, "hint": hint, "exit_code": exit_code}) + "\n")


def _send(fd: int, line: str) -> None:
    try:
        os.write(fd, line.encode())
        os.close(fd)
    except OSError:
        # The command that waited was interrupted, or has heard from us before: there is nobody to tell.
        return


def open_log(path: Path) -> int:
    """Open a log for appending, 0600; one that has grown over 16 MiB becomes `<name>.1` first.

    Raises MountFailed when it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size > LOG_LIMIT_BYTES:
            path.replace(path.with_name(path.name + ".1"))
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise MountFailed(
            f"the log {path} cannot be written ({exc.strerror})", hint="Choose another --log-file."
        ) from exc


def start(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> dict[str, Any]:
    """Start `fusefs ARGUMENTS` as a daemon and wait until it is ready.

    Returns its ready line. Raises DaemonFailed with the daemon's own message and exit code. An interrupt
    while waiting ends the daemon too.
    """
    reader, writer = os.pipe()
    log_fd = open_log(log)
    try:
        daemon = subprocess.Popen(
            # -P: no module is imported from the working directory, which may be an agent's.
            [sys.executable, "-P", "-m", "fusefs.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=[writer],
            env={**os.environ, **environment, READY_FD: str(writer)},
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(log_fd)
        os.close(writer)
    try:
        line = _read_line(reader)
    except BaseException:
        _end(daemon)
        raise
    finally:
        os.close(reader)
    return _understand(line, daemon, log)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _read_line(reader: int) -> bytes:
    deadline = time.monotonic() + READY_TIMEOUT_S
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise MountFailed(f"the daemon was not ready after {READY_TIMEOUT_S:.0f} s")
        part = os.read(reader, 65536)
        if not part:
            break
        line += part
    return line


def _understand(line: bytes, daemon: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    if message.pop("event", "") == "ready":
        # The daemon outlives this process: it is not waited for.
        daemon.returncode = 0
        return message
    code = daemon.wait(timeout=END_TIMEOUT_S)
    if not message:
        raise DaemonFailed(f"the daemon ended before it was ready (exit code {code})", f"The log is {log}.", 14)
    raise DaemonFailed(message["message"], message["hint"], message["exit_code"])
