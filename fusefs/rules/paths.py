"""Paths: their form, their limits, and who may do what where.

Decided here and only here (HF-03, HF-11, HF-12): what a valid path is, which prefixes are reserved
or belong to one session, and the policy as a function of scope, operation and path. `store/` calls
it, so that every door inherits it.

Paths are absolute, `/`-separated, normalised text; `/` is the root. Comparison is by code point: a
name that only looks like a reserved one is simply another name.
"""

from __future__ import annotations

from enum import Enum

from fusefs.rules.config import Limits
from fusefs.rules.errors import BadName, BadPath, Denied, NotFound, PathTooLong
from fusefs.rules.scope import Principal, Scope

MEMORIES = "/memories"
SKILLS = "/skills"
RESERVED = (MEMORIES, SKILLS)
LARGE_RESULTS = "/large_tool_results"
HISTORY = "/conversation_history"
MACHINE_WRITTEN = (LARGE_RESULTS, HISTORY)
CONTROL_NAME = ".fusefs"
"""The hidden control directory of a mounted root; no row may have this name there."""
_RULED = (*RESERVED, *MACHINE_WRITTEN, f"/{CONTROL_NAME}")
"""What every path begins with of which a rule speaks."""


class Op(Enum):
    """What is about to be done to a path."""

    READ = "read"
    CREATE = "create"
    WRITE = "write"
    MKDIR = "mkdir"
    DELETE = "delete"
    RENAME = "rename"
    SETATTR = "setattr"


def check_name(name: str, limits: Limits) -> None:
    """Refuse a name that no entry of a directory may have.

    Raises PathTooLong, BadName (lone surrogates: bytes that are not UTF-8) or BadPath.
    """
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise BadName("the name is not valid UTF-8") from None
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise BadPath("not a valid name", path=name.replace("\0", "\\0"))
    if len(encoded) > limits.max_name_bytes:
        raise PathTooLong(f"the name has {len(encoded)} bytes, the limit is {limits.max_name_bytes}", path=name)


def normalise(path: str, limits: Limits) -> str:
    """The one form of an absolute path: no empty or `.` part, no trailing slash.

    Raises BadPath for a relative path, a `..` part or NUL; PathTooLong over a limit; BadName for
    text that is not valid UTF-8.
    """
    if not isinstance(path, str) or not path.startswith("/"):
        raise BadPath("the path must be absolute", path=str(path))
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadPath("the path must not contain `..`", path=path)
    for part in parts:
        check_name(part, limits)
    whole = "/" + "/".join(parts)
    check_path(whole, limits)
    return whole


def check_path(path: str, limits: Limits) -> None:
    """Refuse a normalised path that is too long or too deep. Raises PathTooLong."""
    length = len(path.encode())
    if length > limits.max_path_bytes:
        raise PathTooLong(f"the path has {length} bytes, the limit is {limits.max_path_bytes}", path=path)
    depth = path.count("/")
    if depth > limits.max_path_depth:
        raise PathTooLong(f"the path has {depth} levels, the limit is {limits.max_path_depth}", path=path)


def join(parent: str, name: str) -> str:
    return f"/{name}" if parent == "/" else f"{parent}/{name}"


def split(path: str) -> tuple[str, str]:
    """Parent and name of a path other than the root."""
    parent, _, name = path.rpartition("/")
    return parent or "/", name


def is_within(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or lies below it."""
    return path == prefix or path.startswith(prefix if prefix == "/" else prefix + "/")


def is_reserved(path: str) -> bool:
    return any(is_within(path, prefix) for prefix in RESERVED)


def is_machine_written(path: str) -> bool:
    return any(is_within(path, prefix) for prefix in MACHINE_WRITTEN)


def session_owner(path: str) -> str | None:
    """The session that a machine-written path belongs to; None for any other path and for the two roots."""
    for prefix in MACHINE_WRITTEN:
        if path.startswith(prefix + "/"):
            first = path[len(prefix) + 1 :].split("/", 1)[0]
            return first.removesuffix(".md") if prefix == HISTORY else first
    return None


def search_names(scope: Scope) -> tuple[list[str], list[str]]:
    """For a coarse filter in SQL: the names of the machine-written roots, and the names below them that the scope may
    know of. `visible` decides."""
    if scope.all_sessions:
        return [], []
    return [prefix[1:] for prefix in MACHINE_WRITTEN], ["", scope.session, f"{scope.session}.md"]


def own_result(scope: Scope, path: str) -> str:
    """Where a caller means to read. `/large_tool_results/ID` and what lies below it, deepagents' form without a
    session, is of the caller's own session; any other path is itself. So another session's path leads nowhere."""
    if scope.all_sessions or not path.startswith(f"{LARGE_RESULTS}/"):
        return path
    if is_within(path, f"{LARGE_RESULTS}/{scope.session}"):
        return path
    return f"{LARGE_RESULTS}/{scope.session}{path[len(LARGE_RESULTS) :]}"


def visible(scope: Scope, path: str) -> bool:
    """Whether the scope may know that the path exists (HF-11)."""
    owner = session_owner(path)
    return owner is None or owner == scope.session or scope.all_sessions


def check(scope: Scope, op: Op, path: str) -> None:
    """Apply the policy for one operation on one normalised path.

    Raises NotFound where another session owns the path, Denied where the principal may not.
    """
    if not path.startswith(_RULED):
        return
    if not visible(scope, path):
        raise NotFound(path=path)
    if op is Op.READ:
        return
    if is_within(path, f"/{CONTROL_NAME}"):
        raise Denied("/.fusefs belongs to the file system", path=path)
    if scope.principal is Principal.SYSTEM:
        return
    if is_reserved(path) and not scope.principal.administers:
        raise Denied(
            f"{'/'.join(path.split('/')[:2])} is reserved: its files go into later prompts",
            path=path,
            hint="An owner or admin can write there, as by a mount with --as admin --rw.",
        )
    if is_machine_written(path):
        _check_machine_written(scope, op, path)


def _check_machine_written(scope: Scope, op: Op, path: str) -> None:
    """Only the harness writes here; an agent's own harness may run inside the container, so it may
    make its session's folder and create a file there once."""
    if op is Op.DELETE and scope.principal.administers:
        return
    own = is_within(path, f"{LARGE_RESULTS}/{scope.session}")
    if op is Op.MKDIR and (path == LARGE_RESULTS or own):
        return
    if op is Op.CREATE and own and path != f"{LARGE_RESULTS}/{scope.session}":
        return
    raise harness_only(path)


def harness_only(path: str) -> Denied:
    """The refusal of a change of a machine-written path."""
    return Denied(
        f"files under {'/'.join(path.split('/')[:2])} are written by the harness only",
        path=path,
        hint="Copy the file elsewhere to change it.",
    )
