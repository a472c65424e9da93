"""Postgres out of reach behind a relay, and what is in Postgres and in the rescue directory afterwards.

The fixtures `line`, `rescue_dir` and `mounted` are in conftest.py.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psycopg

from tests import harness

TIMEOUT = ("--write-timeout", "0.5")
LOGGED = r"fs\.write_rescued|unavailable|Unavailable|LostInFlight|Unsettled|NotConnected"


def stored(namespace: harness.Namespace, path: str) -> bytes | None:
    """The content of a path in Postgres; None where there is no row."""
    with psycopg.connect(namespace.dsn) as conn:
        row = conn.execute(
            "select coalesce(content_bytes, convert_to(content, 'UTF8')) from agent_files"
            " where agent_id = %s and path = %s",
            (namespace.agent_id, path),
        ).fetchone()
    return None if row is None else bytes(row[0])


def rescue(rescue_dir: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [harness.FUSEFS, "rescue", *args, "--rescue-dir", str(rescue_dir)], capture_output=True, text=True, check=False
    )


def kept(rescue_dir: Path) -> list[dict[str, object]]:
    listed = rescue(rescue_dir, "list", "--json")
    assert listed.returncode == 0, listed.stderr
    found: list[dict[str, object]] = json.loads(listed.stdout)
    return found


def put_all(rescue_dir: Path, namespace: harness.Namespace) -> str:
    done = rescue(rescue_dir, "put", "--all", "--dsn", namespace.dsn)
    assert done.returncode == 0, done.stderr
    return done.stdout
