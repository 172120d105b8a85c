"""Streams of one request and one answer: asking, and being asked within bounds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID

from fusion_node.types import PeerId
from p2p.control import Answer
from p2p.libp2p_adapter.messages import closing, read_message, translated, write_message
from p2p.libp2p_adapter.slots import Slots
from p2p.seam import Gate

REQUEST_TIMEOUT_S = 10.0
MAX_REQUESTS_AT_ONCE = 32
MAX_REQUESTS_PER_PEER = 4
"""Of the slots: eight peers that ask slowly fill them, and not one alone."""

MAX_ASKED_AT_ONCE = 2
"""Requests of ours to one peer; more wait. Half of what it grants, because its slots are freed after its answer."""

READ_REQUEST_TIMEOUT_S = 3.0
"""For 65 KiB at most, and usually 1: two round trips and a margin. A stream without a request keeps a slot so long."""

log = logging.getLogger(__name__)


class Requests:
    """All protocols together share the slots.

    Args:
        protocols: ids of those that are answered here, with the largest request of each in bytes.
        on_request, gate: those of HostHooks.
    """

    def __init__(
        self,
        host: Any,
        protocols: Mapping[str, int],
        on_request: Callable[[str, PeerId, bytes, Answer], None],
        gate: Gate,
    ) -> None:
        self._gate = gate
        self._host = host
        self._on_request = on_request
        self._token = trio.lowlevel.current_trio_token()
        self._slots = Slots(gate, at_once=MAX_REQUESTS_AT_ONCE, per_peer=MAX_REQUESTS_PER_PEER)
        self._asking: WeakValueDictionary[ID, trio.CapacityLimiter] = WeakValueDictionary()
        for protocol, limit_bytes in protocols.items():
            host.set_stream_handler(TProtocol(protocol), partial(self._serve_request, protocol, limit_bytes))

    async def request(self, peer: PeerId, protocol: str, request: bytes, *, limit_bytes: int) -> bytes:
        """See ControlNode.request."""
        their_id = ID.from_base58(peer)
        asking = self._asking.setdefault(their_id, trio.CapacityLimiter(MAX_ASKED_AT_ONCE))
        with translated(peer), trio.fail_after(REQUEST_TIMEOUT_S):
            async with asking:
                stream = await self._host.new_stream(their_id, [TProtocol(protocol)])
                async with closing(stream):
                    await write_message(stream, request)
                    return await read_message(stream, limit_bytes)

    async def _serve_request(self, protocol: str, limit_bytes: int, stream: Any) -> None:
        """Handler of the request streams: hands the request to the owner and writes its answer."""
        try:
            with self._slots.slot_for(stream.muxed_conn.peer_id) as is_granted, trio.move_on_after(REQUEST_TIMEOUT_S):
                if is_granted:
                    await self._answer_request(protocol, limit_bytes, stream)
                else:
                    await stream.reset()
        except Exception as error:  # noqa: BLE001  # one stream's end must not be the host's
            log.debug("a request stream failed: %r", error)

    async def _answer_request(self, protocol: str, limit_bytes: int, stream: Any) -> None:
        async with closing(stream):
            with trio.fail_after(READ_REQUEST_TIMEOUT_S):
                request = await read_message(stream, limit_bytes)
            peer = PeerId(stream.muxed_conn.peer_id.to_base58())
            is_refused = self._gate.refuse_request(peer, len(request)) is not None
            answer = None if is_refused else await self._ask_owner(protocol, peer, request)
            if answer is not None:
                await write_message(stream, answer)

    async def _ask_owner(self, protocol: str, peer: PeerId, request: bytes) -> bytes | None:
        answered = trio.Event()
        answers: list[bytes | None] = []

        def take() -> None:
            answered.set()

        def answer(value: bytes | None) -> None:
            answers.append(value)
            try:
                self._token.run_sync_soon(take)
            except trio.RunFinishedError:
                return

        self._on_request(protocol, peer, request, answer)
        await answered.wait()
        return answers[0]
