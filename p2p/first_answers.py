"""Waiting for many at once, as long as those take who answer, and not as those do who never will."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

GRACE_S = 2.0
"""What the others have at least, once one has answered, be it a stranger next door that answers at once with nothing.
Five round trips around the world, of 0.3 s and more: so many a link takes that has to be made first (TCP, the upgrade,
the handshake, Hello, and a ping), and about as many a request with a long answer over a connection that was idle."""

GRACE_TIMES = 4.0
"""Of what the first answer took, if that is more: on a busy machine all of them are slow."""

F = TypeVar("F", bound="asyncio.Future[Any]")


async def first_answers(
    waiting: Iterable[F],
    *,
    timeout_s: float,
    is_answer: Callable[[F], bool] = lambda future: True,
    grace_s: float = GRACE_S,
) -> set[F]:
    """Waits until all of these are done, or until those that are not have had their time.

    Args:
        timeout_s: for all of them, as long as none has answered.
        is_answer: whether one that is done has answered: a failure says nothing of how long an answer takes.
        grace_s: see GRACE_S.

    Returns:
        Those that are not done, which go on.
    """
    loop = asyncio.get_running_loop()
    began, pending = loop.time(), set(waiting)
    deadline, has_answer = began + timeout_s, False
    while pending and (left_s := deadline - loop.time()) > 0.0:
        until = asyncio.ALL_COMPLETED if has_answer else asyncio.FIRST_COMPLETED
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=until)
        if not has_answer and any(is_answer(each) for each in done):
            has_answer, now = True, loop.time()
            deadline = min(deadline, now + max(grace_s, GRACE_TIMES * (now - began)))
    return pending
