"""Connection strings: reading them, and showing them without their secrets.

Decided here and only here: what of a DSN may be logged or printed, and how a failed connection is
put into one sentence. Threading: plain functions, safe anywhere.
"""

from __future__ import annotations

import os
import re

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fusefs.rules.errors import BadConfig

_SECRET = ("password", "sslpassword", "oauth_client_secret")
_SEVERITY = re.compile(r"^(FATAL|ERROR):\s+")


def parse(dsn: str) -> dict[str, str]:
    """The parameters of a DSN (URI or `key=value` form), without libpq's defaults.

    Raises BadConfig. The text of libpq's own message is dropped: it quotes the DSN, password included. Refused too is
    a URL that libpq would read in another way than it was meant: with a bare @ or / in a password, the rest of it
    becomes the host, the port or the database, which are shown.
    """
    if _is_ambiguous(dsn):
        raise BadConfig(
            "the DSN has an @ or a / that may belong to its password",
            hint="In a URL write %40 for @ and %2F for /, or use the form host=… user=… password='…'.",
        )
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.Error:
        raise BadConfig(
            "the DSN is not valid", hint="Use the form postgresql://user:password@host:port/database."
        ) from None
    return {key: str(value) for key, value in found.items() if value is not None}


def _is_ambiguous(dsn: str) -> bool:
    if not dsn.startswith(("postgresql://", "postgres://")):
        return False
    before, at, _ = dsn.partition("://")[2].partition("?")[0].rpartition("@")
    return bool(at) and ("/" in before or "@" in before)


def redact(dsn: str) -> str:
    """The DSN in `key=value` form without its secrets, for status and logs; never raises."""
    try:
        found = parse(dsn)
    except BadConfig:
        return "(not a valid DSN)"
    return make_conninfo("", **{key: value for key, value in found.items() if key not in _SECRET})


def _hosts(found: dict[str, str]) -> list[str]:
    return (found.get("host") or found.get("hostaddr") or os.environ.get("PGHOST") or "the local socket").split(",")


def hosts(dsn: str) -> int:
    """How many servers a DSN names. A name that stands for several addresses counts once."""
    return len(_hosts(parse(dsn)))


def place(dsn: str) -> str:
    """Where the server is, for a sentence: `host:port` (each of several), or the socket's directory."""
    found = parse(dsn)
    names = _hosts(found)
    ports = (found.get("port") or os.environ.get("PGPORT") or "5432").split(",")
    if len(ports) < len(names):
        ports = ports[:1] * len(names)
    return ", ".join(
        host if host.startswith("/") or " " in host else f"{host}:{port}"
        for host, port in zip(names, ports, strict=False)
    )


def failure_hint(exc: psycopg.Error) -> str:
    """What a person can do about it; '' where nothing better is known than what `NotConnected` says.

    A record of a mount keeps the DSN without its password, so a command inside that mount has none.
    """
    if exc.pgconn is not None and exc.pgconn.needs_password:
        return "Set HANGO_FS_DSN to a DSN with the password, or put the password into ~/.pgpass."
    return ""


def failure_sentence(dsn: str, exc: BaseException) -> str:
    """Why a connection could not be made, in one sentence without secrets.

    libpq's text is `connection failed: connection to server at ... failed: REASON`, with more lines about
    where it looked.
    """
    first = str(exc).strip().partition("\n")[0]
    reason = _SEVERITY.sub("", first.rpartition("failed: ")[2].strip())
    if isinstance(exc, psycopg.errors.ConnectionTimeout) or not reason:
        reason = "no answer in time"
    return f"Postgres does not answer at {place(dsn)}: {reason}"
