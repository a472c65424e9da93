"""The form of the query files, and that every query in them is valid SQL."""

from __future__ import annotations

import re

import psycopg
import pytest

from fusefs.db.queries import QUERIES, Query, parse, query

GOOD = """-- A header.

-- name: find_it
-- What it does,
-- in two lines.
select 1
from x;

-- name: drop_it_2
-- Drops.
delete from x where a = $1; -- no more
"""


def test_blocks() -> None:
    assert parse(GOOD.replace(" -- no more", ""), "f.sql") == [
        Query("find_it", "select 1\nfrom x"),
        Query("drop_it_2", "delete from x where a = $1"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-- name: find_it\nselect 1", "description"),
        ("-- name: find_it\n-- Only words.\n", "description and a statement"),
        ("-- name: findit\n-- x\nselect 1", "verb_noun"),
        ("-- name: \n-- x\nselect 1", "verb_noun"),
        ("-- name: Find_It\n-- x\nselect 1", "verb_noun"),
    ],
)
def test_blocks_that_break_the_form(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text, "f.sql")


def test_a_wrong_name_is_found_at_once() -> None:
    with pytest.raises(KeyError, match="no_such"):
        query("no_such")


def test_every_query_can_be_prepared(module_pg: str) -> None:
    """Against the migrated schema, with its placeholders numbered without gaps."""
    assert "load_directory" in QUERIES
    with psycopg.connect(module_pg, autocommit=True) as conn:
        for found in QUERIES.values():
            result = conn.pgconn.prepare(found.name.encode(), found.text.encode())
            assert result.status == psycopg.pq.ExecStatus.COMMAND_OK, (found.name, result.get_error_message())
            numbers = {int(number) for number in re.findall(r"\$(\d+)", found.text)}
            assert numbers == set(range(1, len(numbers) + 1)), found.name
