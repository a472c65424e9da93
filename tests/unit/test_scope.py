"""The scope fails closed: missing or malformed parts are errors, never defaults (HF-15)."""

from __future__ import annotations

import dataclasses
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.rules.errors import BadScope
from fusefs.rules.scope import Principal, Scope, new_session, valid_session

TENANT, AGENT = "11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-aaaaaaaaaaaa"


def make(**changes: object) -> Scope:
    values: dict[str, object] = {
        "tenant_id": TENANT,
        "agent_id": AGENT,
        "session": "s1",
        "principal": Principal.AGENT,
        **changes,
    }
    return Scope(**values)  # type: ignore[arg-type]


def test_a_scope_is_frozen_and_compares_by_value() -> None:
    assert make() == make(tenant_id=TENANT.upper().replace("-", ""))
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().session = "s2"  # type: ignore[misc]


def test_nothing_has_a_default() -> None:
    for field in ("tenant_id", "agent_id", "session", "principal"):
        values = {"tenant_id": TENANT, "agent_id": AGENT, "session": "s1", "principal": Principal.AGENT}
        del values[field]
        with pytest.raises(TypeError, match=field):
            Scope(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["tenant_id", "agent_id"])
@pytest.mark.parametrize("value", ["", " ", None, 0, b"x", "default", TENANT[:-1], TENANT + "0", "*", "' or 1=1"])
def test_an_id_that_is_no_uuid_is_refused(field: str, value: object) -> None:
    with pytest.raises(BadScope, match="id is not a UUID"):
        make(**{field: value})


@pytest.mark.parametrize(
    "session",
    ["", None, 7, b"s1", ".", "..", ".hidden", "-x", "_x", "a/b", "a b", "a\n", "s1\n", "é", "s1.md", "a" * 65, "a\0"],
)
def test_a_malformed_session_is_refused(session: object) -> None:
    with pytest.raises(BadScope, match="session id must match"):
        make(session=session)


@pytest.mark.parametrize("session", ["a", "0", "A-b_c.d", "a" * 64, "s1.md.x", "s..1", "md", "a.MD"])
def test_a_valid_session(session: str) -> None:
    assert make(session=session).session == session


@pytest.mark.parametrize("principal", [None, "agent", "root", 0])
def test_a_principal_is_one_of_the_five(principal: object) -> None:
    with pytest.raises(BadScope, match="principal"):
        make(principal=principal)


def test_only_administrators_see_every_session() -> None:
    for principal in Principal:
        if principal in (Principal.AGENT, Principal.MEMBER):
            with pytest.raises(BadScope, match="only an administrator"):
                make(principal=principal, all_sessions=True)
        else:
            assert make(principal=principal, all_sessions=True).all_sessions
        assert not make(principal=principal).all_sessions


def test_a_new_session_is_valid_and_new() -> None:
    made = {new_session() for _ in range(100)}
    assert len(made) == 100
    assert all(valid_session(session) for session in made)


@given(st.text(max_size=70))
def test_a_valid_session_is_a_safe_file_name(text: str) -> None:
    if valid_session(text):
        assert text.isascii()
        assert text[0].isalnum()
        assert not set(text) & set("/\\\0\n ")
        assert not text.endswith(".md")
        assert len(text) <= 64


def test_the_fields_of_a_log_line() -> None:
    agent = str(uuid.uuid4())
    assert make(agent_id=agent).log_context() == {
        "hango.tenant.id": TENANT,
        "hango.agent.id": agent,
        "session": "s1",
        "principal": "agent",
    }
