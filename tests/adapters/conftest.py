"""Fixtures of the adapters' tests: an agent of the test's own, and portals to its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from fusefs.adapters.portal import Portal
from tests.harness import Namespace, make_namespace

OpenPortal = Callable[..., Portal]


@pytest.fixture
def agent(module_pg: str) -> Namespace:
    return make_namespace(module_pg)


@pytest.fixture
def open_portal(agent: Namespace) -> Iterator[OpenPortal]:
    """`open_portal(session="s1", principal="agent")`; all are closed after the test."""
    with ExitStack() as opened:

        def start(session: str = "s1", principal: str = "agent") -> Portal:
            portal = Portal(agent.dsn, tenant=agent.tenant, agent=agent.agent, session=session, principal=principal)
            return opened.enter_context(portal)

        yield start


@pytest.fixture
def portal(open_portal: OpenPortal) -> Portal:
    return open_portal()
