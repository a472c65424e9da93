"""Attributes that are held: what who waits for them waits for. The rest is in tests/mount/test_held.py."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
import trio.testing

from fusefs.core.held import Held
from fusefs.core.tree import Node
from fusefs.db.pool import Database
from fusefs.rules.errors import Unavailable
from fusefs.rules.model import Attrs, Kind, NodeRow
from fusefs.rules.scope import Principal, Scope
from fusefs.store import files

SCOPE = Scope(files.new_id(), files.new_id(), "daemon", Principal.SYSTEM)


class Rows:
    """A database with one row, which somebody else may have locked; `meanwhile` happens during each statement."""

    def __init__(self, *, locked: bool = False) -> None:
        self.locked = locked
        self.sent: list[Any] = []
        self.held: Held
        self.node = Node("id", Kind.FILE, 5000, "f", None)
        self.sets_again = False

    async def run(self, _tenant: str, _query: object, *params: Any) -> list[tuple[Any, ...]]:
        self.sent.append(params[3])
        await trio.lowlevel.checkpoint()
        if self.sets_again:
            self.held.add(self.node, Attrs(mode=0o611))
        return [("id", "/f", "file", 5000, 1, 0, params[3][0], None, None, 1, 2, "s1", self.locked)]


def holding(rows: Rows) -> tuple[Held, list[NodeRow | None]]:
    stored: list[NodeRow | None] = []
    rows.held = Held(cast(Database, rows), SCOPE, lambda _node, row: stored.append(row), lambda: None)
    rows.held.add(rows.node, Attrs(mode=0o600))
    return rows.held, stored


async def test_who_waits_does_not_wait_for_what_is_set_meanwhile() -> None:
    rows = Rows()
    held, stored = holding(rows)
    rows.sets_again = True
    await held.store()
    assert rows.sent == [[0o600]]
    assert len(stored) == 1
    assert rows.node.held == Attrs(mode=0o611)


async def test_who_waits_for_a_locked_row_is_told(autojump_clock: trio.testing.MockClock) -> None:
    rows = Rows(locked=True)
    held, stored = holding(rows)
    with pytest.raises(Unavailable, match="locked"):
        await held.store(rows.node)
    assert stored == []
    assert rows.node.held == Attrs(mode=0o600)
    rows.locked = False
    await held.store(rows.node)
    assert rows.node.held is None
    assert not held
