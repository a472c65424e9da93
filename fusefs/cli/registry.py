"""The mounts of this machine that fusefs made: one small JSON file each.

Decided here and only here: where the files are, what they hold, and when a record counts as alive. A record
is written when the mount is ready and removed when its daemon ends in good order; one that is left over
tells the next command which FUSE connection to abort.

Threading: plain blocking calls; a record is replaced atomically.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fusefs.cli import processes
from fusefs.rules.errors import MountFailed

LOCK_TIMEOUT_S = 10.0
"""How long a daemon that has unmounted may take to end: it commits what is buffered, each write at most 5 s."""


@dataclass(frozen=True, slots=True)
class Record:
    """One mount. `dsn` has no password; `process_start` is in clock ticks since boot; `connection` is the
    number below /sys/fs/fuse/connections; `metrics` is where Prometheus asks."""

    mountpoint: str
    pid: int
    process_start: int
    connection: int
    layout: str
    tenant: str | None
    agent: str | None
    tenant_id: str | None
    agent_id: str | None
    session: str | None
    dsn: str
    started_at: str
    log: str
    metrics: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the daemon that wrote the record still runs."""
        return processes.start_time(self.pid) == self.process_start


def directory() -> Path:
    """Where this user's records are: HANGO_FS_RUNTIME_DIR, or /run/fusefs for root, or
    $XDG_RUNTIME_DIR/fusefs, or ~/.local/state/fusefs.

    Root never uses XDG_RUNTIME_DIR, which a login has and a systemd unit has not: both must see the same.
    Nor does root read other users' records, since it would act on the pids and connections in them.
    """
    chosen = os.environ.get("HANGO_FS_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/run/fusefs")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "fusefs")
    return state_directory()


def state_directory() -> Path:
    """Where logs are kept: $XDG_STATE_HOME/fusefs, else /var/log/fusefs for root and ~/.local/state/fusefs."""
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base, "fusefs")
    if os.geteuid() == 0:
        return Path("/var/log/fusefs")
    return Path(os.path.expanduser("~"), ".local", "state", "fusefs")


def rescue_directory() -> Path:
    """Where writes are kept that Postgres did not take, when no directory is named: /var/spool/fusefs for root."""
    if os.geteuid() == 0 and not os.environ.get("XDG_STATE_HOME"):
        return Path("/var/spool/fusefs")
    return state_directory() / "rescue"


def log_path(mountpoint: str) -> Path:
    """The log of a mount in the background, when none is named."""
    return state_directory() / f"{_key(mountpoint)}.log"


def _key(mountpoint: str) -> str:
    name = "".join(char if char.isalnum() and char.isascii() else "-" for char in mountpoint).strip("-")
    return f"{name[-40:]}-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:12]}"


def _file(mountpoint: str) -> Path:
    return directory() / f"{_key(mountpoint)}.json"


def lock(mountpoint: str) -> int:
    """Take a mount point for this process, for as long as the returned descriptor is open.

    Two mounts on one directory would stack, and the first one's files vanish. A daemon that is ending there is
    waited for. Raises MountFailed when another process keeps it, or the directory cannot be used.
    """
    try:
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(_file(mountpoint).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(handle):
            if time.monotonic() >= deadline or _is_served(mountpoint):
                os.close(handle)
                hint = "Look at `fusefs status`, then try again."
                raise MountFailed(f"another fusefs uses {mountpoint}", hint=hint)
            time.sleep(0.05)
    except OSError as exc:
        raise _unusable(exc) from exc
    return handle


def _is_served(mountpoint: str) -> bool:
    record = find(mountpoint)
    return record is not None and record.alive and processes.mount_at(mountpoint) is not None


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unusable(exc: OSError) -> MountFailed:
    return MountFailed(
        f"cannot note the mount in {directory()} ({exc.strerror})",
        hint="Set HANGO_FS_RUNTIME_DIR to a writable folder.",
    )


def write(record: Record) -> None:
    """Write or replace the record of a mount. Raises MountFailed when the directory cannot be used."""
    folder = directory()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        os.replace(temporary, _file(record.mountpoint))
    except OSError as exc:
        raise _unusable(exc) from exc


def find(mountpoint: str) -> Record | None:
    """The record of a mount point, dead or alive."""
    return _read(_file(mountpoint))


def remove(record: Record) -> None:
    """Remove a record, unless another daemon has taken the mount point since."""
    if find(record.mountpoint) == record:
        _file(record.mountpoint).unlink(missing_ok=True)


def all_records() -> list[Record]:
    """Every record of this user, by mount point."""
    try:
        names = sorted(directory().glob("*.json"))
    except OSError:
        return []
    records = [record for record in map(_read, names) if record is not None]
    return sorted(records, key=lambda record: record.mountpoint)


def _read(path: Path) -> Record | None:
    """A record, or None for a file that is missing, broken or not ours: pids in it get signals."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(handle, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            return Record(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def containing(path: str) -> tuple[Record, str] | None:
    """The mount that a path lies in, with the path inside it (`/` for the mount point itself)."""
    for record in sorted(all_records(), key=lambda one: len(one.mountpoint), reverse=True):
        if path == record.mountpoint:
            return record, "/"
        if path.startswith(record.mountpoint.rstrip("/") + "/"):
            return record, path[len(record.mountpoint.rstrip("/")) :]
    return None
