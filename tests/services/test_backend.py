"""The backend by itself: no mount, no door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fusefs.db.pool import open_database
from fusefs.rules.errors import Exists, StaleVersion
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend, Seen, Unseen
from tests import harness


@asynccontextmanager
async def opened(namespace: harness.Namespace, session: str = "s-1") -> AsyncIterator[Backend]:
    async with open_database(namespace.dsn, origin="test", size=2) as db:
        yield Backend(db, Scope(namespace.tenant_id, namespace.agent_id, session, Principal.AGENT))


async def test_a_write_says_what_it_expects(namespace: harness.Namespace) -> None:
    async with opened(namespace) as backend:
        first = await backend.write("/a/b.txt", "one\n", Unseen.ABSENT)
        assert (first.created, first.seen.version, first.size) == (True, 1, 4)
        with pytest.raises(Exists):
            await backend.write("/a/b.txt", "two\n", Unseen.ABSENT)
        second = await backend.write("/a/b.txt", "two\n", first.seen)
        assert (second.created, second.seen) == (False, Seen(first.seen.id, 2))
        with pytest.raises(StaleVersion) as caught:
            await backend.write("/a/b.txt", "lost\n", first.seen)
        assert (caught.value.expected, caught.value.actual) == (1, 2)
        assert (await backend.write("/a/b.txt", "any\n", Unseen.ANY)).seen.version == 3
        assert (await backend.read_bytes("/a/b.txt")).data == b"any\n"
        with pytest.raises(StaleVersion, match="there is no file now"):
            await backend.write("/gone", "x", Seen(first.seen.id, 3))
    rows = namespace.execute("select path, convert_from(content, 'UTF8'), expected_version from agent_file_conflicts")
    assert ("/a/b.txt", "lost\n", 1) in rows
