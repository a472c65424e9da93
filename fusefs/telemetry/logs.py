"""Logs: one JSON object a line, the event's name first.

Decided here and only here: the form of a line, and what may never be in one. Paths are recorded,
contents and passwords are not (HF-18): keys that could hold them are dropped, bytes are replaced by
their length, and the password of anything that looks like a connection string is cut out.

A change of a file is logged by `Log.change`, once for each commit: as JSON it goes past structlog's processors straight
into one line of the same form, which takes a quarter of the time (measured: 5 us, not 20).

Threading: any thread; a line is written in one call.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol, TextIO

from fusefs.rules.scope import Scope
from fusefs.telemetry.counters import counters
from fusefs.telemetry.lean import FilteringBoundLogger, structlog

DROPPED_KEYS = frozenset(
    ("content", "content_bytes", "data", "dsn", "password", "payload", "token", "old_string", "new_string")
)
# Up to the last @: one in the password may not have been written as %40.
_PASSWORD_IN_URL = re.compile(r"(://[^\s:/@]*):\S*@")
# libpq takes a backslash before a blank as part of a bare value.
_PASSWORD_IN_PAIRS = re.compile(
    r"((?:password|client_secret)\s*[=:]\s*)('(?:[^'\\]|\\.)*'|(?:\\.|[^\s\\])+)", re.IGNORECASE
)
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
_SAFE_TYPES = (int, float, bool, type(None))
# ASCII only: a name with a stray surrogate must not make the stream raise.
_encode = json.JSONEncoder().encode
_SCOPES_MAX = 1024
"""Scopes whose part of a line is kept: half a MB at most, more than the sessions of a host."""


class Log(FilteringBoundLogger, Protocol):
    """What `get_logger` gives."""

    def bind(self, **new_values: Any) -> Log: ...

    def change(
        self, event: str, scope: Scope, path: str | None, source: str | None, size: int | None, delta: int | None
    ) -> None:
        """Log at info that an operation changed files.

        Args:
            source: the old path of a rename; `from` in the line.
            size: bytes of content, `bytes` in the line; delta: by how many the file grew. None: not in the line.
        """


def setup_logging(*, json_lines: bool = True, level: str = "info", stream: TextIO | None = None) -> None:
    """Send this process's log to `stream`; call it once, before the first line.

    Args:
        json_lines: one JSON object a line; otherwise `event key=value …` for a person.
        level: the lowest level that is written: debug, info, warning, error or critical.
        stream: None means what sys.stderr is at the moment of each line.

    Raises KeyError for an unknown level.
    """
    structlog.configure(
        processors=[structlog.processors.format_exc_info, _as_json if json_lines else _as_text],
        wrapper_class=_logger_class(_LEVELS[level], json_lines),
        logger_factory=lambda *_: _Sink(stream),
        cache_logger_on_first_use=True,
    )


def _logger_class(level: int, json_lines: bool) -> type[Log]:
    base: Any = structlog.make_filtering_bound_logger(level)

    class Piped(base):  # type: ignore[misc, no-any-unimported]  # structlog makes it at run time
        def change(
            self, event: str, scope: Scope, path: str | None, source: str | None, size: int | None, delta: int | None
        ) -> None:
            optional = {"from": source, "bytes": size, "delta": delta}
            given = {key: value for key, value in optional.items() if value is not None}
            self.info(event, **scope.log_context(), path=path, **given)

    class Direct(base):  # type: ignore[misc, no-any-unimported]
        def change(
            self, event: str, scope: Scope, path: str | None, source: str | None, size: int | None, delta: int | None
        ) -> None:
            seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
            at = f"{_second(seconds)}.{milliseconds:03}+00:00"
            line = f"{_head(event)}{at}{_scope_part(scope)}{'null' if path is None else _encode(scrub(path))}"
            if source is not None:
                line += f', "from": {_encode(scrub(source))}'
            if size is not None:
                line += f', "bytes": {size}'
            if delta is not None:
                line += f', "delta": {delta}'
            self._logger.msg(line + "}")

    return Direct if json_lines and level <= logging.INFO else Piped


@lru_cache(8)
def _second(seconds: int) -> str:
    """The time of day up to the second: making it takes 2 us, and hundreds of lines have the same."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


@lru_cache
def _head(event: str) -> str:
    return f'{{"event": {_encode(scrub(event))}, "level": "info", "at": "'


@lru_cache(_SCOPES_MAX)
def _scope_part(scope: Scope) -> str:
    fields = "".join(f"{_encode(key)}: {_encode(scrub(value))}, " for key, value in scope.log_context().items())
    return f'", {fields}"path": '


def get_logger() -> Log:
    """A logger for a module. Without `setup_logging`, warnings and worse go to stderr.

    Call it as `log.info("event.name", field=value)`; the fields of a caller come from
    `scope.log_context()`.
    """
    if not structlog.is_configured():
        setup_logging(level="warning")
    logger: Log = structlog.get_logger()
    return logger


class _Sink:
    """Where finished lines go. A line that cannot be written is counted, never raised."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        stream = self._stream or sys.stderr
        data = line.encode() + b"\n"
        try:
            # Past the stream's buffer: that would keep what a full disk refused, and raise again at exit.
            descriptor = stream.fileno()
        except (OSError, ValueError):  # a stream in memory, or a closed one
            descriptor = -1
        try:
            if descriptor < 0:
                stream.write(line + "\n")
            while descriptor >= 0 and data:
                data = data[os.write(descriptor, data) :]
        except (OSError, ValueError):
            counters.log_errors += 1

    debug = info = warning = error = critical = exception = msg


def _fields(method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """The line's fields in their order, cleaned."""
    line: dict[str, Any] = {
        "event": scrub(str(event.pop("event", ""))),
        "level": "error" if method == "exception" else method,
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    for key, value in event.items():
        if key.lower() not in DROPPED_KEYS:
            line[key] = _clean(value)
    return line


def _as_json(_logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    return _encode(_fields(method, event))


def _as_text(_logger: object, method: str, event: MutableMapping[str, Any]) -> str:
    line = _fields(method, event)
    head = f"{line.pop('at')} {line.pop('level')} {line.pop('event')}"
    trace = line.pop("exception", "")
    pairs = "".join(f" {key}={json.dumps(value, ensure_ascii=False)}" for key, value in line.items())
    return f"{head}{pairs}\n{trace}".rstrip("\n").encode(errors="backslashreplace").decode()


def scrub(text: str) -> str:
    """Cut passwords out of connection strings."""
    if "://" in text:
        text = _PASSWORD_IN_URL.sub(r"\1:***@", text)
    if "password" in text.lower() or "client_secret" in text.lower():
        text = _PASSWORD_IN_PAIRS.sub(r"\1***", text)
    return text


def _clean(value: object) -> object:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, _SAFE_TYPES):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items() if str(k).lower() not in DROPPED_KEYS}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_clean(item) for item in value]
    return scrub(str(value))
