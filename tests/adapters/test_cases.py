"""The table of cases of every door, through the adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from fusefs.adapters.portal import Portal
from tests.adapters.doors import DeepagentsDoor, FsspecDoor, MemoryDoor
from tests.harness import Namespace
from tests.services.cases import Case, Door, Doors, cases_for, run

NOT_OF_FSSPEC = {"directories_and_files_are_told_apart": "the listing of a file is the file"}
NOT_OF_A_MEMORY = {
    "reserved_places_are_refused": "it is one itself",
    "reserved_places_are_not_edited": "it is one itself",
    "another_sessions_results_do_not_exist": "there are none in it",
    "another_sessions_history_does_not_exist": "there is none in it",
    "results_are_not_changed_by_an_agent": "there are none in it",
    "directories_and_files_are_told_apart": "a view takes both",
    "a_listing_has_files_and_directories": "hidden names are not shown",
    "every_place_is_edited_where_that_is_asked": "it replaces one place only",
}


def cases_but(door: type[Door], left_out: Mapping[str, str]) -> list[Any]:
    """The cases of a door without those that its library means otherwise, each with the reason."""
    cases = cases_for(door)
    assert left_out.keys() <= {case.id for case in cases}
    return [case for case in cases if case.id not in left_out]


class MemoryDoors(Doors):
    def stored(self, path: str) -> str | None:
        return super().stored(f"/memories{path}")


@pytest.fixture(scope="module")
def portals(module_namespace: Namespace) -> Iterator[dict[str, Portal]]:
    """By session; `admin` is one's principal, too."""
    with ExitStack() as opened:
        yield {
            session: opened.enter_context(
                Portal(
                    module_namespace.dsn,
                    tenant=module_namespace.tenant,
                    agent=module_namespace.agent,
                    session=session,
                    principal=principal,
                )
            )
            for session, principal in (("own", "agent"), ("other", "agent"), ("own-admin", "admin"), ("admin", "admin"))
        }


@pytest.fixture(scope="module")
def file_systems(module_namespace: Namespace) -> Iterator[list[FsspecDoor]]:
    doors = [FsspecDoor(module_namespace, session) for session in ("own-fsspec", "other-fsspec")]
    yield doors
    for door in doors:
        door.files.close()


@pytest.mark.parametrize("case", cases_for(DeepagentsDoor))
async def test_case_of_deepagents(module_namespace: Namespace, portals: dict[str, Portal], case: Case) -> None:
    own, other = DeepagentsDoor(portals["own"]), DeepagentsDoor(portals["other"])
    await run(case, Doors(own, other, module_namespace, "own", "other"))


@pytest.mark.parametrize("case", cases_but(FsspecDoor, NOT_OF_FSSPEC))
async def test_case_of_fsspec(module_namespace: Namespace, file_systems: list[FsspecDoor], case: Case) -> None:
    await run(case, Doors(*file_systems, module_namespace, "own-fsspec", "other-fsspec"))


@pytest.mark.parametrize("case", cases_but(MemoryDoor, NOT_OF_A_MEMORY))
async def test_case_of_the_memory_tool(module_namespace: Namespace, portals: dict[str, Portal], case: Case) -> None:
    own, other = MemoryDoor(portals["own-admin"]), MemoryDoor(portals["admin"])
    await run(case, MemoryDoors(own, other, module_namespace, "own-admin", "admin"))
