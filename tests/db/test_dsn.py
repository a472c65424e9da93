"""Connection strings: what may be shown of them."""

from __future__ import annotations

import psycopg
import pytest

from fusefs.db import dsn
from fusefs.rules.errors import BadConfig


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://u:s3cret@h:5433/d?sslmode=require", "user=u dbname=d host=h port=5433 sslmode=require"),
        ("host=/run/x user=u password='s3 cret' dbname=d", "user=u dbname=d host=/run/x"),
        ("host=h sslpassword=s3cret", "host=h"),
        ("", ""),
        ("postgresql://u:s3cret@[h", "(not a valid DSN)"),
    ],
)
def test_redact(given: str, shown: str) -> None:
    assert dsn.redact(given) == shown


def test_parse() -> None:
    assert dsn.parse("postgresql://u:p@h/d") == {"user": "u", "password": "p", "host": "h", "dbname": "d"}
    with pytest.raises(BadConfig) as caught:
        dsn.parse("user=u nonsense=s3cret")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("postgresql://h/d", "h:5432"),
        ("host=a,b port=1,2", "a:1, b:2"),
        ("host=a,b port=7", "a:7, b:7"),
        ("host=/run/pg", "/run/pg"),
        ("hostaddr=127.0.0.1", "127.0.0.1:5432"),
        ("", "the local socket"),
    ],
)
def test_place(given: str, where: str) -> None:
    assert dsn.place(given) == where


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            'connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused\n\tIs the',
            "Connection refused",
        ),
        (
            'connection failed: connection to server on socket "/s" failed: FATAL:  database "x" does not exist',
            'database "x" does not exist',
        ),
        ("failed to resolve host 'nowhere': [Errno -2] Name or service not known", None),
        ("", "no answer in time"),
    ],
)
def test_failure_sentence(text: str, reason: str | None) -> None:
    found = dsn.failure_sentence("host=h", psycopg.OperationalError(text))
    assert found == f"Postgres does not answer at h:5432: {reason or text}"
