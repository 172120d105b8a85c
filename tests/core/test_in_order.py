"""Little work at once, much work on a thread, and nothing overtakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fusion_node.daemon.in_order import InOrder


class Caller:
    """Submits, and keeps what comes back in order."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.results: list[Any] = []
        self.watched: list[asyncio.Future[Any]] = []
        self.order = InOrder(executor, watch=self.watched.append)
        self.came = asyncio.Event()

    def submit(self, work: Callable[[], Any], *, is_large: bool = False) -> None:
        self.order.submit(work, self.take, is_large=is_large)

    def take(self, get: Callable[[], Any]) -> None:
        try:
            self.results.append(get())
        except ValueError as error:
            self.results.append(error)
        self.came.set()

    async def until(self, num_results: int) -> list[Any]:
        async with asyncio.timeout(10):
            while len(self.results) < num_results:
                self.came.clear()
                await self.came.wait()
        return self.results


@pytest.fixture
def executor() -> Any:
    with ThreadPoolExecutor(2) as executor:
        yield executor


async def test_little_work_is_done_on_the_spot(executor: ThreadPoolExecutor) -> None:
    caller, here = Caller(executor), threading.current_thread()
    caller.submit(threading.current_thread)
    assert caller.results == [here]
    assert not caller.watched


async def test_what_comes_behind_large_work_does_not_overtake_it(executor: ThreadPoolExecutor) -> None:
    caller, gate = Caller(executor), threading.Event()
    caller.submit(lambda: "before")
    caller.submit(lambda: gate.wait(10) and "large", is_large=True)
    caller.submit(lambda: "little")
    caller.submit(lambda: "large again", is_large=True)
    assert caller.results == ["before"]
    gate.set()
    assert await caller.until(4) == ["before", "large", "little", "large again"]
    caller.submit(lambda: "after")
    assert caller.results[4:] == ["after"]


async def test_an_error_is_told_in_its_place_and_stops_nobody(executor: ThreadPoolExecutor) -> None:
    caller, error = Caller(executor), ValueError("bad")

    def fail() -> None:
        raise error

    caller.submit(fail)
    caller.submit(fail, is_large=True)
    caller.submit(lambda: "next")
    assert await caller.until(3) == [error, error, "next"]


async def test_cleared_work_is_not_begun_but_what_has_begun_is_told(executor: ThreadPoolExecutor) -> None:
    caller, gate = Caller(executor), threading.Event()
    caller.submit(lambda: gate.wait(10) and "begun", is_large=True)
    caller.submit(lambda: "cleared")
    caller.order.clear()
    gate.set()
    assert await caller.until(1) == ["begun"]
    caller.submit(lambda: "anew")
    assert caller.results == ["begun", "anew"]


async def test_a_shut_down_executor_ends_what_waits() -> None:
    executor, gate = ThreadPoolExecutor(1), threading.Event()
    busy = executor.submit(gate.wait, 10)
    caller = Caller(executor)
    caller.submit(lambda: "never", is_large=True)
    caller.submit(lambda: "nor this")
    executor.shutdown(wait=False, cancel_futures=True)
    gate.set()
    await asyncio.wait(caller.watched)
    await asyncio.sleep(0)
    assert busy.result()
    assert caller.results == []
