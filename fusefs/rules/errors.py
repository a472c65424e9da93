"""Every error that the project raises on purpose, and its form at each door.

Decided here and only here: which errno, HTTP status and exit code an error has, and which hint a
person gets. `outcome` is the one function that turns any exception into those forms.

Threading: plain values, safe anywhere.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import ClassVar


class FsError(Exception):
    """Something that the file system refuses or cannot do.

    A subclass's docstring is its default message; `hint` says what a person can do about it.
    Messages name paths, sizes and versions, never contents or secrets. `told` is set once a session has
    been told of it.
    """

    errno: ClassVar[int] = errno.EIO
    http: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    hint: ClassVar[str] = ""

    def __init__(self, message: str = "", *, path: str | None = None, hint: str = "") -> None:
        self.path = path
        self.message = message or _default_message(type(self))
        self.given_hint = hint or type(self).hint
        self.told = False
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path is not None else self.message


def _default_message(kind: type[FsError]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")


class NotFound(FsError):
    """No such file or directory."""

    errno = errno.ENOENT
    http = 404
    exit_code = 3


class UnknownScope(NotFound):
    """No such tenant or agent."""

    hint = "List them with `fusefs tenant list` and `fusefs agent list`, or pass --create."


class Exists(FsError):
    """The name exists already."""

    errno = errno.EEXIST
    http = 409
    exit_code = 4


class NotADirectory(FsError):
    """Not a directory."""

    errno = errno.ENOTDIR
    http = 400
    exit_code = 5


class IsADirectory(FsError):
    """Is a directory."""

    errno = errno.EISDIR
    http = 400
    exit_code = 5


class NotEmpty(FsError):
    """The directory is not empty."""

    errno = errno.ENOTEMPTY
    http = 409
    exit_code = 5


class StaleVersion(FsError):
    """Changed since you read it; read it again and retry."""

    errno = errno.ESTALE
    http = 409
    exit_code = 6
    hint = "Read the file again, then repeat the change."

    def __init__(
        self, message: str = "", *, path: str | None = None, expected: int | None = None, actual: int | None = None
    ) -> None:
        self.expected, self.actual = expected, actual
        if not message:
            message = (
                "changed since you read it; read it again and retry "
                f"(you had {_version_text(expected)}, {'there is' if actual is None else 'it is at'} "
                f"{_version_text(actual)} now)"
            )
        super().__init__(message, path=path)

    @classmethod
    def of_another(cls, path: str, actual: int) -> StaleVersion:
        """For a file that has taken the place of the one that was seen; `actual` is its version."""
        text = f"another file is at this name since you read it; read it again and retry (it is at version {actual})"
        return cls(text, path=path, actual=actual)


def _version_text(version: int | None) -> str:
    return "no file" if version is None else f"version {version}"


class AlreadyChanged(FsError):
    """Changed by another call of this batch, so this change was not made."""

    errno = errno.ESTALE
    http = 409
    exit_code = 6
    hint = "Look at the file, then make the change in the next batch of calls."


class Denied(FsError):
    """Not allowed."""

    errno = errno.EACCES
    http = 403
    exit_code = 7


class ReadOnly(FsError):
    """This mount is read-only."""

    errno = errno.EROFS
    http = 403
    exit_code = 7
    hint = "Mount with --rw to change files."


class NotPermitted(FsError):
    """Operation not permitted."""

    errno = errno.EPERM
    http = 403
    exit_code = 7


class TooLarge(FsError):
    """The file would be larger than the limit."""

    errno = errno.EFBIG
    http = 413
    exit_code = 8
    hint = "Raise HANGO_FS_MAX_FILE_BYTES, or split the file."


class OverQuota(FsError):
    """The namespace would be larger than its quota."""

    errno = errno.EDQUOT
    http = 507
    exit_code = 8
    hint = "Delete files, or raise the agent's quota."


class PathTooLong(FsError):
    """The path is too long or too deep."""

    errno = errno.ENAMETOOLONG
    http = 400
    exit_code = 9


class BadName(FsError):
    """The name is not valid UTF-8."""

    errno = errno.EILSEQ
    http = 400
    exit_code = 9


class BadPath(FsError):
    """The path is not valid."""

    errno = errno.EINVAL
    http = 400
    exit_code = 9


class BadPattern(FsError):
    """The pattern is not valid."""

    errno = errno.EINVAL
    http = 400
    exit_code = 9


class BadText(FsError):
    """The text holds half of a surrogate pair, which is no character."""

    errno = errno.EILSEQ
    http = 400
    exit_code = 9


class TooExpensive(FsError):
    """The search took too long and was ended."""

    errno = errno.ETIMEDOUT
    http = 400
    exit_code = 17
    hint = "Search in a smaller directory, name the files by a pattern, or use a simpler regular expression."


class NoMatch(FsError):
    """The text to replace is not in the file.

    `excerpt`: lines of the file that help to find the right text; for the caller, never for a log.
    """

    errno = errno.EINVAL
    http = 409
    exit_code = 18

    def __init__(self, message: str = "", *, path: str | None = None, excerpt: str = "") -> None:
        self.excerpt = excerpt
        super().__init__(message, path=path)


class NotUnique(FsError):
    """The text to replace is in the file more than once."""

    errno = errno.EINVAL
    http = 409
    exit_code = 18
    hint = "Add lines around it until it is unique, or replace all."


class NotSupported(FsError):
    """This file system does not support the operation."""

    errno = errno.EOPNOTSUPP
    http = 400
    exit_code = 9


class CrossDevice(FsError):
    """The two paths are in different namespaces."""

    errno = errno.EXDEV
    http = 400
    exit_code = 9


class BadScope(FsError):
    """The scope is missing or malformed."""

    errno = errno.EACCES
    http = 400
    exit_code = 10
    hint = "Name a tenant, an agent and a session."


class Unavailable(FsError):
    """Postgres does not answer."""

    errno = errno.EIO
    http = 503
    exit_code = 11
    hint = "Check that the server runs and that --dsn is right."


class Corrupt(FsError):
    """An invariant of the stored files does not hold."""

    errno = errno.EIO
    http = 500
    exit_code = 12
    hint = "Run `fusefs check`."


class RescueFailed(FsError):
    """The bytes could not be kept on the local disk."""

    errno = errno.EIO
    http = 500
    exit_code = 15
    hint = "Choose a --rescue-dir that can be written and is yours alone."


class SchemaMismatch(FsError):
    """The database's schema does not fit this version of fusefs."""

    errno = errno.EIO
    http = 503
    exit_code = 13
    hint = "Run `fusefs migrate status`, then `fusefs migrate up`."


class MountFailed(FsError):
    """The directory cannot be mounted."""

    errno = errno.EIO
    http = 500
    exit_code = 14


class ModelFailed(FsError):
    """The model's API gave no reply."""

    errno = errno.EIO
    http = 502
    exit_code = 16
    hint = "Check ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, or try again later."


class BadConfig(FsError):
    """The configuration is not valid."""

    errno = errno.EINVAL
    http = 400
    exit_code = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One error in the form of every door."""

    errno: int
    http: int
    exit_code: int
    text: str
    hint: str
    error_type: str
    told: str
    """The text for a model. Of a database that fails it says no more than how: the text names hosts and paths."""

    @property
    def sentence(self) -> str:
        """The text and what can be done about it, for a reader who is shown nothing else."""
        return f"{self.text}. {self.hint}".strip()

    @property
    def sentence_for_model(self) -> str:
        """The same for a model."""
        return f"{self.told}. {'Try again later.' if self.http == 503 else self.hint}".strip()


def outcome(exc: BaseException) -> Outcome:
    """Translate any exception. What is not an `FsError` is a fault of ours: EIO, 500, 70, and no detail."""
    if isinstance(exc, FsError):
        told = _default_message(type(exc)) if exc.http == 503 else str(exc)
        return Outcome(exc.errno, exc.http, exc.exit_code, str(exc), exc.given_hint, type(exc).__name__, told)
    text = f"internal error ({type(exc).__name__})"
    return Outcome(errno.EIO, 500, 70, text, "See the log.", type(exc).__name__, text)


def all_errors() -> list[type[FsError]]:
    """Every error class, the base first, for tests and for the reference page."""
    found: list[type[FsError]] = [FsError]
    for cls in found:
        found.extend(c for c in cls.__subclasses__() if c not in found)
    return found
