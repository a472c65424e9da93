"""The portal: trio's files for threads that are not on trio."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from fusefs.adapters.portal import Portal
from fusefs.rules.errors import BadScope, FsError, NotFound, Unavailable, UnknownScope
from fusefs.services.backend import Backend, Unseen
from tests.adapters.conftest import OpenPortal
from tests.harness import Namespace

BOUND_S = 20.0


def test_many_threads_at_once(portal: Portal) -> None:
    def write(number: int) -> int:
        return portal.call(portal.backend.write, f"/{number}", f"{number}\n", Unseen.ABSENT).size

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(write, range(40))) == [len(f"{number}\n") for number in range(40)]
    assert {entry.node.path for entry in portal.call(portal.backend.ls, "/")} >= {f"/{number}" for number in range(40)}


def test_from_asyncio(portal: Portal) -> None:
    async def read() -> bytes:
        content = await asyncio.to_thread(portal.call, portal.backend.read_bytes, "/a")
        return content.data

    portal.call(portal.backend.write, "/a", "x", Unseen.ABSENT)
    assert asyncio.run(read()) == b"x"


async def test_trio_is_told_to_use_the_backend(portal: Portal) -> None:
    with pytest.raises(RuntimeError, match="blocking"):
        portal.call(portal.backend.ls, "/")


def test_errors_arrive_as_they_are(portal: Portal) -> None:
    with pytest.raises(NotFound) as caught:
        portal.call(portal.backend.read_bytes, "/none")
    assert caught.value.path == "/none"


def test_after_the_end(open_portal: OpenPortal) -> None:
    portal = open_portal()
    before = {thread.name for thread in threading.enumerate()}
    portal.close()
    portal.close()
    assert "fusefs-portal" in before
    assert "fusefs-portal" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(Unavailable, match="closed"):
        portal.call(portal.backend.ls, "/")


def test_a_call_that_is_running_at_the_end(open_portal: OpenPortal) -> None:
    portal = open_portal()
    running = threading.Event()

    async def hang() -> None:
        running.set()
        await trio.sleep_forever()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(portal.call, hang)
        assert running.wait(BOUND_S)
        portal.close()
        assert isinstance(answer.exception(BOUND_S), Unavailable)


def test_in_a_forked_process(portal: Portal, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(Unavailable, match="parent process"):
            portal.call(portal.backend.ls, "/")
    portal.call(portal.backend.ls, "/")


FORGETFUL = """
import sys
from fusefs.adapters.portal import Portal
from fusefs.services.backend import Unseen

portal = Portal(sys.argv[1], tenant=sys.argv[2], agent=sys.argv[3], session="s1")
portal.call(portal.backend.write, "/kept", "x", Unseen.ABSENT)
"""


def test_a_program_that_forgets_to_close_ends(agent: Namespace, portal: Portal) -> None:
    command = [sys.executable, "-W", "error", "-c", FORGETFUL, agent.dsn, agent.tenant, agent.agent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert portal.call(portal.backend.read_bytes, "/kept").data == b"x"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"agent": "nobody"}, UnknownScope),
        ({"tenant": "nobody"}, UnknownScope),
        ({"session": ""}, BadScope),
        ({"session": "../x"}, BadScope),
        ({"principal": "system"}, BadScope),
        ({"principal": "root"}, BadScope),
        ({"dsn": "postgresql://127.0.0.1:1/none?password=SECRET"}, FsError),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_opened(agent: Namespace, change: dict[str, str], error: type[FsError]) -> None:
    """It fails closed (HF-15), and leaves no thread behind."""
    given = {"dsn": agent.dsn, "tenant": agent.tenant, "agent": agent.agent, "session": "s1", **change}
    with pytest.raises(error) as caught:
        Portal(**given)
    assert "SECRET" not in str(caught.value)
    for thread in threading.enumerate():
        if thread.name == "fusefs-portal":
            thread.join(BOUND_S)
            assert not thread.is_alive()


def test_an_unbound_method_takes_the_backend(portal: Portal) -> None:
    assert portal.call(Backend.stat, portal.backend, "/").path == "/"
