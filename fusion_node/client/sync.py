"""SwarmClient for scripts that are not asynchronous: the same calls, blocking, over an event loop in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from fusion_node.client.sampling import SamplingParams
from fusion_node.client.swarm import Generation, GenerationStats, SwarmClient
from fusion_node.client.tokenizer import ChatMessage
from fusion_node.types import PeerId

T = TypeVar("T")

CANCEL_TIMEOUT_S = 5.0
"""For work that had not even begun when it was cancelled, and so never tells that it ended."""


class SyncGeneration:
    """An answer on its way: iterate for its text. ``stats`` fills while you do."""

    def __init__(self, generation: Generation, loop: asyncio.AbstractEventLoop) -> None:
        self._generation = generation
        self._loop = loop
        self._running: asyncio.Task[str | None] | None = None
        self.stats: GenerationStats = generation.stats

    def __iter__(self) -> Iterator[str]:
        try:
            while (piece := _wait(self._following(), self._loop)) is not None:
                yield piece
        finally:
            # Also when the caller leaves early or is interrupted: the session on the nodes is freed at once. A client
            # that was closed has done so.
            if not self._loop.is_closed():
                _wait(self._close(), self._loop)

    async def _following(self) -> str | None:
        self._running = asyncio.current_task()
        async for piece in self._generation:
            return piece
        return None

    async def _close(self) -> None:
        # An interrupt can strike at any point of the caller's thread, so what it waited for may still be running here.
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait((self._running,))
        await self._generation.aclose()

    def text(self) -> str:
        """The whole answer."""
        return "".join(self)


def _wait(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Runs on the loop's thread. When the wait is interrupted, as by Ctrl-C, the work is ended before that goes on."""
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(watched(), loop)
    try:
        return future.result()
    except BaseException:
        # The future here is cancelled at once, the work on the loop a few turns later.
        if future.cancel():
            ended.wait(CANCEL_TIMEOUT_S)
        raise


async def _done(work: Callable[[PeerId], None], peer: PeerId) -> None:
    work(peer)


class SyncSwarmClient:
    """A user of one model in a swarm, for plain scripts.

    Example::

        with SyncSwarmClient("smollm2-135m", peers=["/ip4/…"]) as swarm:
            print(swarm.generate("What is a peer-to-peer network?").text())

    Takes the arguments of SwarmClient and raises what it raises.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._model = model
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm-client", daemon=True)
        self._swarm: SwarmClient | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._swarm = self._call(self._enter())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._swarm is not None:
                self._call(self._swarm.aclose())
        finally:
            self._stop_loop()

    def generate(self, prompt: str, params: SamplingParams | None = None, *, raw: bool = False) -> SyncGeneration:
        """See SwarmClient.generate."""
        return SyncGeneration(self._client.generate(prompt, params, raw=raw), self._loop)

    def chat(self, messages: Sequence[ChatMessage], params: SamplingParams | None = None) -> SyncGeneration:
        """See SwarmClient.chat."""
        return SyncGeneration(self._client.chat(messages, params), self._loop)

    def revoke(self, peer: PeerId) -> None:
        """See SwarmClient.revoke. May be called from another thread than the one that reads an answer."""
        self._call(_done(self._client.revoke, peer))

    def allow_again(self, peer: PeerId) -> None:
        """See SwarmClient.allow_again."""
        self._call(_done(self._client.allow_again, peer))

    @property
    def _client(self) -> SwarmClient:
        if self._swarm is None:
            raise RuntimeError("use SyncSwarmClient with `with`")
        return self._swarm

    async def _enter(self) -> SwarmClient:
        # Made inside the loop: what it holds belongs to it.
        return await SwarmClient(self._model, **self._settings).__aenter__()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return _wait(work, self._loop)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
