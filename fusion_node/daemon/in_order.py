"""Work for one receiver, finished in the order in which it came: little work at once, much work on a thread.

An event loop that decompresses 4 MiB stands still for ten milliseconds, and with it every other session. On a thread it
does not, but what comes behind must not overtake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class InOrder:
    """Use on an event loop.

    Args:
        executor: for much work.
        watch: called with each piece of work that goes there.
    """

    def __init__(self, executor: Executor, *, watch: Callable[[asyncio.Future[Any]], None]) -> None:
        self._executor = executor
        self._watch = watch
        self._waiting: deque[tuple[Callable[[], Any], Callable[[Callable[[], Any]], None]]] = deque()
        self._is_busy = False

    def submit(self, work: Callable[[], T], then: Callable[[Callable[[], T]], None], *, is_large: bool) -> None:
        """Does ``work``, then calls ``then`` on the event loop with a function that gives its result or its error.

        Before this returns, unless the work is large or something before it is not finished.
        """
        if is_large or self._is_busy:
            self._waiting.append((work, then))
            if not self._is_busy:
                self._begin()
        else:
            then(work)

    def clear(self) -> None:
        """Forgets what has not begun. What has begun is finished, and ``then`` called."""
        self._waiting.clear()

    def _begin(self) -> None:
        work, then = self._waiting.popleft()
        self._is_busy = True
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._watch(future)
        future.add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[Callable[[], Any]], None], future: asyncio.Future[Any]) -> None:
        self._is_busy = False
        if future.cancelled():  # the executor was shut down, and so is whoever waits
            self._waiting.clear()
            return
        future.exception()  # looked at, also where nobody wants the result any more
        if self._waiting:
            self._begin()
        then(future.result)


__all__ = ["InOrder"]
