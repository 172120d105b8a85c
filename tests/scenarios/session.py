"""A session alone, without what repairs it: the first stage that cannot go on ends it.

A shell around SessionCore for tests of nodes: its messages go to the links, its timer to the event loop, its events to
who awaits.
"""

from __future__ import annotations

import asyncio
from collections import deque

from fusion_node.client.connection import SwarmConnection
from fusion_node.client.session_core import CannotResume, Fault, Opened, RowsWanted, SessionCore, StepDone
from fusion_node.errors import FusionError, LocalProtocolError, PeerError
from fusion_node.types import MonotonicS, PeerId
from p2p.compression import Packed, Packing
from p2p.messages import AnyMessage, StepResult, TensorMeta


class Session:
    """One open session. Use ``async with``; leaving it frees the session on every stage.

    Attributes:
        retain: set before leaving: the stages are to keep the KV for a later session with the same beginning.
    """

    def __init__(self, connection: SwarmConnection, core: SessionCore) -> None:
        self._connection = connection
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Opened | StepDone | FusionError] = asyncio.Queue()
        self._payloads: dict[int, tuple[TensorMeta, memoryview]] = {}
        self._rows: deque[tuple[TensorMeta, memoryview]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: FusionError | None = None
        self._num_outstanding = 0
        self.retain = False

    async def __aenter__(self) -> Session:
        self._connection.register(self._core.plan.session, self._on_message, self._on_lost)
        try:
            self._core.start(now=self._now())
            self._pump()
            event = await self._next_event()
        except BaseException:
            self._end()
            raise
        if not isinstance(event, Opened):
            raise AssertionError("a session's first event is Opened")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    @property
    def key(self) -> bytes:
        """The session's id."""
        return self._core.plan.session

    @property
    def reused_positions(self) -> int:
        """With which it began; the first rows to send are those behind them."""
        return self._core.reused_positions

    @property
    def _first_peer(self) -> PeerId:
        return PeerId(self._core.plan.stages[0].peer)

    @property
    def num_computed(self) -> int:
        """Positions that every stage has computed, reused ones included."""
        return self._core.num_computed

    @property
    def num_outstanding(self) -> int:
        """Steps sent whose answer has not been taken with next_done, arrived or not."""
        return self._num_outstanding

    def packing(self, tensor: TensorMeta, payload: memoryview) -> Packing | None:
        """How to compress the rows of the next positions; None to send them as they are."""
        return self._connection.compressor.choose(self._first_peer, tensor, payload)

    def send(self, tensor: TensorMeta, payload: memoryview, *, want_last: bool) -> None:
        """Sends the rows of the next positions as they are. Returns at once.

        Raises:
            FusionError: what ended the session, or the first stage is gone.
        """
        if self._failure is not None:
            raise self._failure
        self._num_outstanding += 1
        self._core.append(tensor.num_rows, want_last=want_last, now=self._now())
        self._rows.append((tensor, payload))
        self._pump()

    def send_packed(self, packed: Packed, *, want_last: bool) -> None:
        """Sends rows that were compressed as ``packing`` said; see ``send``."""
        self._connection.compressor.note(packed)
        self.send(packed.tensor, memoryview(packed.payload), want_last=want_last)

    async def next_done(self) -> tuple[StepDone, TensorMeta, memoryview]:
        """The answer to the oldest unanswered step, whose rows may be compressed.

        Raises:
            FusionError: what ended the session.
        """
        event = await self._next_event()
        if not isinstance(event, StepDone):
            raise AssertionError("an open session's events are StepDone or Failed")
        self._num_outstanding -= 1
        tensor, payload = self._payloads.pop(event.sequence)
        return event, tensor, payload

    async def _next_event(self) -> Opened | StepDone:
        event = await self._events.get()
        if isinstance(event, FusionError):
            raise event
        return event

    def _on_message(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        self._core.receive(message, source=peer, now=self._now())
        self._pump((message.tensor, payload) if isinstance(message, StepResult) else None)

    def _on_lost(self, peer: PeerId | None, error: FusionError) -> None:
        """``peer`` None: all of them, because the connection itself is closed."""
        if peer is not None and isinstance(error, PeerError):
            self._core.link_closed(peer, error, now=self._now())
            self._pump()
        else:
            self._fail(error)

    def _on_timer(self) -> None:
        self._core.handle_timer(now=self._now())
        self._pump()

    def _pump(self, incoming: tuple[TensorMeta, memoryview] | None = None) -> None:
        while True:
            while (event := self._core.next_event()) is not None:
                match event:
                    case Opened():
                        self._events.put_nowait(event)
                    case StepDone():
                        assert incoming is not None
                        self._payloads[event.sequence] = incoming
                        self._events.put_nowait(event)
                    case RowsWanted():
                        self._send(event)
                    case Fault(error=error):
                        self._fail(error)
                    case CannotResume():
                        self._fail(LocalProtocolError("a session that is never resumed"))
            messages = self._core.messages_to_send()
            for peer, message in messages:
                try:
                    self._connection.links.send(peer, message)
                except PeerError as error:
                    self._core.link_closed(peer, error, now=self._now())
            if not messages:
                break
        due = self._core.get_timer()
        if self._timer is not None:
            self._timer.cancel()
        # The event loop's clock is the monotonic one that the core is handed.
        self._timer = None if due is None else self._loop.call_at(due, self._on_timer)

    def _send(self, wanted: RowsWanted) -> None:
        tensor, payload = self._rows.popleft()
        step = self._core.rows_ready(wanted, tensor, now=self._now())
        if step is not None:
            self._connection.links.send(*step, payload)

    def _fail(self, error: FusionError) -> None:
        if self._failure is None:
            self._failure = error
            self._core.close()
            self._events.put_nowait(error)

    def _end(self) -> None:
        self._core.close(retain=self.retain)
        self._pump()
        self._connection.unregister(self._core.plan.session)

    def _now(self) -> MonotonicS:
        return MonotonicS(self._loop.time())
