"""The blocking form of an answer: left early, interrupted, or read after the client was closed."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from fusion_node.client.swarm import Generation, GenerationStats
from fusion_node.client.sync import SyncGeneration


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def answer(loop: asyncio.AbstractEventLoop, ended: threading.Event, waiting: threading.Event) -> SyncGeneration:
    """One piece, then silence; ``ended`` is set when the session would be freed."""

    async def pieces() -> AsyncGenerator[str, None]:
        try:
            yield "one"
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    return SyncGeneration(Generation(pieces(), GenerationStats()), loop)


def test_leaving_early_ends_the_answer(loop: asyncio.AbstractEventLoop) -> None:
    ended = threading.Event()
    for piece in answer(loop, ended, threading.Event()):
        assert piece == "one"
        break
    assert ended.wait(5)


def test_interrupt_while_waiting_is_passed_on_and_ends_the_answer(loop: asyncio.AbstractEventLoop) -> None:
    ended, waiting = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    # A real signal: only that wakes the main thread up from waiting for a lock.
    interrupter = threading.Thread(target=lambda: (waiting.wait(5), signal.pthread_kill(main, signal.SIGINT)))
    # A shell starts what it runs in the background with SIGINT ignored, and Python then leaves it at that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            answer(loop, ended, waiting).text()
        interrupter.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.wait(5)


def test_iterator_that_outlives_its_client_ends_quietly(loop: asyncio.AbstractEventLoop) -> None:
    ended = threading.Event()
    pieces = iter(answer(loop, ended, threading.Event()))
    assert next(pieces) == "one"
    loop.call_soon_threadsafe(loop.stop)
    while loop.is_running():
        pass
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    pieces.close()  # type: ignore[attr-defined]
    assert ended.is_set()
