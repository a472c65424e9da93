"""The table of cases of every door, through a mount and ordinary system calls."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from tests import harness
from tests.services.cases import Case, Doors, Refused, cases_for, run

T = TypeVar("T")


class MountDoor:
    """Python's own file functions and grep on a mounted directory. Editing and globbing are a program's own matter
    there, and the kernel resolves `..`."""

    lacks = frozenset({"edit", "glob", "paths"})

    def __init__(self, mount: harness.Mount) -> None:
        self._top = mount.path

    def _real(self, path: str) -> Path:
        return self._top / path.lstrip("/")

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(call)
        except OSError as error:
            raise Refused.from_errno(error) from error

    async def write(self, path: str, text: str) -> None:
        real = self._real(path)

        def put() -> None:
            with real.open("wb") as file:
                file.write(text.encode())
                # What is made and not written to is stored by the kernel's release, a moment after the close.
                os.fsync(file.fileno())

        def write() -> None:
            try:
                put()
            except FileNotFoundError:
                real.parent.mkdir(parents=True)
                put()

        await self._run(write)

    async def read(self, path: str) -> str:
        return await self._run(lambda: self._real(path).read_bytes().decode())

    async def edit(self, path: str, old: str, new: str, *, replace_all: bool = False) -> None:
        raise NotImplementedError

    async def ls(self, path: str) -> list[str]:
        def names() -> list[str]:
            found = list(self._real(path).iterdir())
            return sorted(f"/{each.relative_to(self._top)}{'/' if each.is_dir() else ''}" for each in found)

        return await self._run(names)

    async def glob(self, pattern: str, path: str) -> list[str]:
        raise NotImplementedError

    async def grep(self, text: str, path: str) -> list[tuple[str, int]]:
        def lines() -> list[tuple[str, int]]:
            command = ["grep", "-rnF", "--null", "--", text, self._real(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            assert done.returncode in (0, 1), done.stderr
            found = []
            for line in done.stdout.split("\n")[:-1]:
                name, _, rest = line.partition("\0")
                found.append((f"/{Path(name).relative_to(self._top)}", int(rest.split(":")[0])))
            return sorted(found)

        return await self._run(lines)

    async def delete(self, path: str) -> None:
        await self._run(self._real(path).unlink)


@pytest.fixture(scope="module")
def doors(module_mount: harness.MountFactory) -> Doors:
    # One session reads what the other wrote a moment ago.
    own, other = (module_mount("--consistency", "strict", session=session) for session in ("own", "other"))
    for mount in (own, other):
        mount.expect_log(r"stale|refused|denied")
    return Doors(MountDoor(own), MountDoor(other), module_mount.namespace, "own", "other")


@pytest.mark.parametrize("case", cases_for(MountDoor))
async def test_case(doors: Doors, case: Case) -> None:
    await run(case, doors)
