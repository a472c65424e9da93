"""The table of cases through the backend and through the six tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fusefs.db.pool import open_database
from fusefs.rules.scope import Principal, Scope
from fusefs.services.backend import Backend
from fusefs.services.toolset import Toolset
from tests import harness
from tests.services.cases import Case, Doors, cases_for, run
from tests.services.doors import BackendDoor, ToolsDoor

AnyDoor = type[BackendDoor] | type[ToolsDoor]


@asynccontextmanager
async def opened(door: AnyDoor, namespace: harness.Namespace) -> AsyncIterator[Doors]:
    async with open_database(namespace.dsn, origin="test", size=2) as db:

        def of_session(session: str) -> BackendDoor | ToolsDoor:
            backend = Backend(db, Scope(namespace.tenant_id, namespace.agent_id, session, Principal.AGENT))
            return BackendDoor(backend) if door is BackendDoor else ToolsDoor(Toolset(backend))

        names = f"own-{door.__name__}", f"other-{door.__name__}"
        yield Doors(of_session(names[0]), of_session(names[1]), namespace, *names)


@pytest.mark.parametrize("case", cases_for(BackendDoor))
async def test_case_of_the_backend(module_namespace: harness.Namespace, case: Case) -> None:
    async with opened(BackendDoor, module_namespace) as doors:
        await run(case, doors)


@pytest.mark.parametrize("case", cases_for(ToolsDoor))
async def test_case_of_the_tools(module_namespace: harness.Namespace, case: Case) -> None:
    async with opened(ToolsDoor, module_namespace) as doors:
        await run(case, doors)
