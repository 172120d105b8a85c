"""Slots for streams: a share of them for each peer, and the gate has a say."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from fusion_node.types import PeerId
from p2p.bans import Ban
from p2p.control import IncomingStream
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.libp2p_adapter.slots import Slots
from p2p.libp2p_network import Libp2pNetwork
from p2p.limits_core import Limits, Shares
from p2p.seam import PathKind
from p2p.stream_pipe import StreamPipe


def peer_id(number: int) -> ID:
    return ID.from_pubkey(create_new_key_pair(number.to_bytes(32, "big")).public_key)


def test_no_peer_has_more_than_its_share_and_all_together_no_more_than_there_are() -> None:
    slots = Slots(PeerGate(), at_once=5, per_peer=2)
    with ExitStack() as stack:
        granted = {
            number: [stack.enter_context(slots.slot_for(peer_id(number))) for _ in range(3)] for number in (1, 2)
        }
        assert granted == {1: [True, True, False], 2: [True, True, False]}
        assert [stack.enter_context(slots.slot_for(peer_id(3))) for _ in range(2)] == [True, False]
    with slots.slot_for(peer_id(1)) as is_granted:
        assert is_granted


async def test_whom_the_gate_refuses_gets_none_and_what_it_counts_is_given_back() -> None:
    gate = PeerGate(limits=Limits(Shares(streams_per_peer=1)))
    slots, others = Slots(gate, at_once=5, per_peer=5), Slots(gate, at_once=5, per_peer=5)
    peer = peer_id(1)
    for _ in range(3):
        with slots.slot_for(peer) as first, others.slot_for(peer) as second:
            assert (first, second) == (True, False)
    await gate.change(ban=[Ban(PeerId(peer.to_base58()), 0.0, None)])
    with slots.slot_for(peer) as is_granted:
        assert not is_granted


async def test_listener_for_links_asks_the_gate_before_it_shakes_hands() -> None:
    async def nothing(command: Any) -> None: ...

    gate = PeerGate(limits=Limits(Shares(streams_per_peer=1)))
    host: Any = SimpleNamespace(on_down=[], on_stream=None, addresses=["/here"], call=nothing)
    network = Libp2pNetwork(Identity.generate(), host, gate=gate)
    listener = await network.listen("/here", nothing)
    peer = Identity.generate().peer_id
    pipes = [StreamPipe() for _ in range(2)]
    for pipe in pipes:
        host.on_stream(IncomingStream(peer, PathKind.STREAM, "9.9.9.9:4600", pipe))
    async with asyncio.timeout(5.0):
        while not network.refused:  # noqa: ASYNC110  # of tasks that set no event
            await asyncio.sleep(0)
    assert [pipe.aborting for pipe in pipes] == [False, True]
    await listener.aclose()
    assert gate.refuse_stream(peer) is None  # the first one has given its slot back
