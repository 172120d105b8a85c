"""A supervised thread for a world that is not asyncio, and calls into it.

Guarantees: a call returns, raises what the other side raised, or raises ControlPlaneDown when the thread has died; it
never waits for a dead thread. Cancelling a call cancels it on the other side. A thread that dies is started again,
after FIRST_DELAY_S at first, then twice as long each time up to MAX_DELAY_S; a life longer than that resets the delay.

Assumes: every method of Bridge is called in the event loop in which ``start`` was called.

Plain threading and asyncio: what runs in the thread is a Runner, which knows its own event loop. An empty call costs
0.1 ms.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from p2p.control import ControlPlaneDown

FIRST_DELAY_S = 0.25
MAX_DELAY_S = 30.0
STOP_TIMEOUT_S = 3.0
"""A clean stop takes some milliseconds; after this the daemon thread is left behind."""

N_co = TypeVar("N_co", covariant=True)
N = TypeVar("N")
T = TypeVar("T")

log = logging.getLogger(__name__)


class Runner(Protocol[N_co]):
    """What runs in the thread."""

    @property
    def node(self) -> N_co:
        """What calls are made to. Valid from ``on_ready`` until ``run`` returns."""
        ...

    def run(self, on_ready: Callable[[], None]) -> None:
        """Runs until ``stop``; calls ``on_ready`` once, from inside, when calls may be submitted."""
        ...

    def submit(
        self, call: Callable[[], Awaitable[Any]], on_done: Callable[[Any, BaseException | None], None]
    ) -> Callable[[], None]:
        """Starts a call, from any thread, and returns what cancels it. ``on_done`` is called once, unless it dies."""
        ...

    def stop(self) -> None:
        """Makes ``run`` return. From any thread; safe at any time."""
        ...


class Bridge(Generic[N]):
    """Owns the thread. ``make_runner`` is called in it, so that slow imports happen there.

    ``on_down`` is called when the thread has ended, after everything that it posted and before anything that its
    successor posts; ``on_restart`` when that one is ready, and may have posted already.
    """

    def __init__(
        self,
        make_runner: Callable[[], Runner[N]],
        *,
        on_down: Callable[[], None] = lambda: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._make_runner = make_runner
        self._on_down = on_down
        self._on_restart = on_restart
        self._runner: Runner[N] | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._ended: asyncio.Future[BaseException | None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False
        self.num_restarts = 0

    @property
    def is_up(self) -> bool:
        return self._runner is not None

    async def start(self) -> None:
        """Returns when the runner is ready; raises what kept it from becoming so."""
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(), name="bridge-supervisor")

    async def call(self, command: Callable[[N], Awaitable[T]]) -> T:
        """Runs ``command(node)`` in the thread.

        Raises:
            ControlPlaneDown: the thread is not running, or died before the answer.
        """
        runner = self._runner
        if runner is None:
            raise ControlPlaneDown("the libp2p thread is not running; it is being started again")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._pending.add(future)

        def settle(result: T, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            elif isinstance(error, Exception):
                future.set_exception(error)
            else:  # the other side was cancelled, not the caller
                future.set_exception(ControlPlaneDown("the libp2p thread stopped during the call"))

        node = runner.node
        try:
            cancel = runner.submit(lambda: command(node), lambda result, error: _post(loop, settle, result, error))
        except RuntimeError as error:  # it died a moment ago
            self._pending.discard(future)
            raise ControlPlaneDown("the libp2p thread has stopped; it is being started again") from error
        try:
            return await future
        except asyncio.CancelledError:
            cancel()
            raise
        finally:
            self._pending.discard(future)

    async def aclose(self) -> None:
        """Stops the thread and fails what is pending. Safe to call twice."""
        self._stopping = True
        if self._runner is not None:
            self._runner.stop()
        if self._supervisor is not None:
            _, late = await asyncio.wait({self._supervisor}, timeout=STOP_TIMEOUT_S)
            for task in late:
                task.cancel()
                log.warning("the libp2p thread does not end; it is left behind")
        self._fail_pending()

    async def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._ended = ended = loop.create_future()

        def came_up(runner: Runner[N]) -> None:
            if self._stopping:
                runner.stop()
            else:
                self._runner = runner
            if not ready.done():
                ready.set_result(None)

        def went_down(failure: BaseException | None) -> None:
            self._runner = None
            self._on_down()
            ended.set_result(failure)
            if not ready.done():
                ready.set_exception(failure or ControlPlaneDown("the libp2p thread ended before it was ready"))

        def body() -> None:
            failure: BaseException | None = None
            try:
                runner = self._make_runner()
                runner.run(lambda: _post(loop, came_up, runner))
            except BaseException as error:  # noqa: BLE001  # a thread's death must become a value, whatever it is
                failure = _leaf(error)
            _post(loop, went_down, failure)

        threading.Thread(target=body, name="libp2p", daemon=True).start()
        await ready

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s = FIRST_DELAY_S
        began = loop.time()
        while True:
            assert self._ended is not None  # noqa: S101  # set by _launch, which ran before
            failure = await self._ended
            self._fail_pending()
            if self._stopping:
                return
            if loop.time() - began > MAX_DELAY_S:
                delay_s = FIRST_DELAY_S
            log.error("the libp2p thread ended (%r); starting it again in %.2f s", failure, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            # The dead event loop's sockets are closed by the collector; until then the port stays taken.
            failure = None
            gc.collect()
            began = loop.time()
            self.num_restarts += 1
            try:
                await self._launch()
            except Exception as error:  # noqa: BLE001  # whatever it is, it is tried again
                log.debug("the libp2p thread did not start: %r", error)
            else:
                self._on_restart()

    def _fail_pending(self) -> None:
        for future in self._pending:
            if not future.done():
                future.set_exception(ControlPlaneDown("the libp2p thread stopped during the call"))


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # The loop is closed: the process is about to end and nobody waits for the answer.
        log.debug("nobody waits for the libp2p thread any more")


def _leaf(error: BaseException) -> BaseException:
    """The one error in nested groups of one: nurseries wrap what passes through them."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
