"""A change that arrives twice is applied once, whatever was written in between: the database sees to it."""

from __future__ import annotations

import re
import uuid

import psycopg
import pytest

from fusefs.db.queries import query
from tests import harness


def run(conn: psycopg.Connection[object], name: str, *params: object) -> int:
    text = re.sub(r"\$(\d+)", lambda found: f"%(p{found[1]})s", query(name).text)
    values = {f"p{number}": value for number, value in enumerate(params, 1)}
    return conn.execute(text.encode(), values).rowcount


@pytest.mark.parametrize("between", [False, True], ids=["at once", "after another's write"])
@pytest.mark.parametrize("statement", ["commit_append", "commit_write"])
def test_a_change_is_applied_once(pg: str, statement: str, between: bool) -> None:
    namespace = harness.make_namespace(pg)
    scope = (namespace.tenant_id, namespace.agent_id)
    namespace.execute(
        "insert into agent_files (tenant_id, agent_id, path, content) values (%s, %s, '/f', 'old')", scope
    )
    ((node,),) = namespace.execute("select id from agent_files where path = '/f'")
    with psycopg.connect(pg, autocommit=True) as conn:
        conn.execute("select set_config('fusefs.origin', 'me', false)")

        def change(write_id: uuid.UUID, version: int, text: str) -> int:
            by = (1, None, None, None, "agent", "s1", write_id)
            if statement == "commit_append":
                return run(conn, statement, *scope, node, text.encode(), text, 1000, *by, 7)
            return run(conn, statement, *scope, node, version, text, None, *by, "write", 7, None)

        first = uuid.uuid4()
        assert change(first, 1, "new") == 1
        if between:
            assert change(uuid.uuid4(), 2, "theirs") == 1
        with pytest.raises(psycopg.errors.UniqueViolation):
            change(first, 3 if between else 2, "new again")
    assert namespace.execute("select version from agent_files where path = '/f'") == [(3 if between else 2,)]
