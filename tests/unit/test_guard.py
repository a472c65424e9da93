"""The lock of an inode: one holder, in the order in which they came, also where some give up."""

from __future__ import annotations

import trio
import trio.testing

from fusefs.core.filesystem import Guard


async def test_one_at_a_time_in_order() -> None:
    guard, held, order = Guard(), 0, []

    async def work(number: int) -> None:
        nonlocal held
        async with guard:
            held += 1
            assert held == 1
            order.append(number)
            await trio.testing.wait_all_tasks_blocked()
            held -= 1

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(work, number)
            await trio.testing.wait_all_tasks_blocked(0.001)
    assert order == [0, 1, 2, 3, 4]


async def test_whoever_gives_up_is_passed_over() -> None:
    guard, order = Guard(), []
    scopes = [trio.CancelScope() for _ in range(3)]

    async def work(number: int) -> None:
        with scopes[number]:
            async with guard:
                order.append(number)

    async with trio.open_nursery() as nursery:
        async with guard:
            for number in range(3):
                nursery.start_soon(work, number)
                await trio.testing.wait_all_tasks_blocked()
            scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
    assert order == [0, 2]
    async with guard:
        pass


async def test_it_is_free_after_an_error() -> None:
    guard = Guard()
    for _ in range(2):
        try:
            async with guard:
                raise ValueError
        except ValueError:
            pass
