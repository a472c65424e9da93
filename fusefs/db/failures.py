"""What a failed statement means: from SQLSTATE to one of our errors.

Decided here and only here: which failures may be repeated, and what of the server's text may be shown.
The server's DETAIL is never read: it quotes rows. Of classes 22, 23 and P0 (bad data, violated
constraints, `raise`) not even the primary message is: it may quote a value.
Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

from psycopg import errors as pg_errors
from psycopg import pq

from fusefs.rules.errors import (
    BadPath,
    BadPattern,
    Exists,
    FsError,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    OverQuota,
    PathTooLong,
    SchemaMismatch,
    StaleVersion,
    Unavailable,
)


class NotConnected(Unavailable):
    """Postgres does not answer; nothing was sent."""


class LostInFlight(Unavailable):
    """The connection was lost after the statement was sent; whether it was applied is not known."""

    hint = "The server may have been restarted. Repeat the operation."


class TimedOut(Unavailable):
    """The statement took too long and was ended."""


class Retryable(Unavailable):
    """The server rolled the statement back because of others; it can be repeated as it is."""


_OURS: dict[str, type[FsError]] = {
    "FS001": NotFound,
    "FS002": Exists,
    "FS003": NotADirectory,
    "FS004": IsADirectory,
    "FS005": NotEmpty,
    "FS006": StaleVersion,
    "FS009": OverQuota,
    "FS010": BadPath,
    "FS012": PathTooLong,
}
"""The states that our own SQL raises; their message is ours too and is passed on."""

_RETRYABLE = {
    "40001": "serialization failure",
    "40P01": "deadlock",
    # After a failover a pooled connection may still reach the old primary.
    "25006": "the server is read-only",
}
_UNAVAILABLE = {
    "53100": "the disk of the Postgres server is full",
    "53200": "the Postgres server is out of memory",
    "53300": "the Postgres server has too many connections",
    "55P03": "a lock was not available in time",
    "57P01": "the Postgres server ended the connection",
    "57P02": "the Postgres server crashed",
    "57P03": "the Postgres server is starting or stopping",
    "57P04": "the database was dropped",
}
_SCHEMA = {"42P01", "42703", "42883", "3F000", "42704", "0A000"}
_SILENT_CLASSES = ("22", "23", "P0")
_MESSAGE_MAX = 200


def from_state(state: str, message: str) -> FsError:
    """The error for a SQLSTATE and the server's primary message."""
    if (ours := _OURS.get(state)) is not None:
        return ours(message)
    if (text := _RETRYABLE.get(state)) is not None:
        return Retryable(f"Postgres could not finish the statement: {text}")
    if state == "57014":
        return TimedOut()
    if (text := _UNAVAILABLE.get(state)) is not None or state[:2] in ("08", "53", "57", "58"):
        return Unavailable(text or f"the Postgres server failed ({state})")
    if state == "23505":
        return Exists()
    first = message.splitlines()[0][:_MESSAGE_MAX] if message else ""
    if state == "2201B":
        # Its message is one of the regular expression library's own and does not quote the expression.
        return BadPattern(first)
    if state in _SCHEMA:
        return SchemaMismatch(f"the database's schema does not fit: {first} ({state})")
    if state[:2] in _SILENT_CLASSES or not first:
        try:
            first = pg_errors.lookup(state).__name__
        except KeyError:
            first = "no known reason"
    return FsError(f"Postgres refused the statement: {first} ({state})")


def from_result(result: pq.abc.PGresult) -> FsError:
    """The error for a failed result."""
    state = result.error_field(pq.DiagnosticField.SQLSTATE) or b"XX000"
    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
    return from_state(state.decode("ascii", "replace"), message.decode("utf-8", "replace"))
