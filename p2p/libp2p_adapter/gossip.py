"""GossipSub for records, among the nodes that have it switched on: one topic, one message per node and half minute.

Off unless HostConfig.gossip says so: see docs/protocol-network.md, "Gossip", for what was measured. The library's
defaults are for other uses: a heartbeat every two minutes instead of one second, meshes that wait for three different
IP addresses, topics that anybody may open, and messages of a megabyte.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service

from fusion_node.types import PeerId
from p2p.limits_core import Rate

PROTOCOL = TProtocol("/meshsub/1.1.0")
"""The router tells its peers' abilities by this name, so it is not an own one."""

TOPIC = "fusion/records/1"
MAX_MESSAGE_BYTES = 64 * 1024
"""Of one RPC: a record has at most 16 KiB, an RPC may carry several."""

DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 10
HEARTBEAT_S = 1
FORWARDER_RATE = Rate(per_s=4.0, burst=32.0)
"""Of messages that one peer may forward to us: a swarm of 94 nodes, the largest that gossips, sends two per second."""

log = logging.getLogger(__name__)


class Gossip:
    """The topic.

    Args:
        on_gossip: HostHooks.on_gossip: who has forwarded a record, and the record; whether it may be passed on.
    """

    def __init__(self, pubsub: Any, on_gossip: Callable[[PeerId, bytes], bool]) -> None:
        self._pubsub = pubsub
        self._on_gossip = on_gossip
        self._tokens: OrderedDict[ID, tuple[float, float]] = OrderedDict()
        pubsub.set_topic_validator(TOPIC, self._judge, False)

    async def publish(self, record: bytes) -> None:
        await self._pubsub.publish(TOPIC, record)

    def _judge(self, forwarder: ID, message: Any) -> bool:
        if message.from_id == self._pubsub.my_id.to_bytes():
            return True
        return self._has_token(forwarder) and self._on_gossip(PeerId(forwarder.to_base58()), bytes(message.data))

    def _has_token(self, forwarder: ID) -> bool:
        now = trio.current_time()
        tokens, at = self._tokens.pop(forwarder, (FORWARDER_RATE.burst, now))
        tokens = min(FORWARDER_RATE.burst, tokens + (now - at) * FORWARDER_RATE.per_s)
        self._tokens[forwarder] = (max(0.0, tokens - 1.0), now)
        if len(self._tokens) > 1024:
            self._tokens.popitem(last=False)
        return tokens >= 1.0


@asynccontextmanager
async def running_gossip(host: Any, on_gossip: Callable[[PeerId, bytes], bool]) -> AsyncIterator[Gossip]:
    """Subscribed while the context lasts."""
    router = GossipSub(
        protocols=[PROTOCOL],
        degree=DEGREE,
        degree_low=DEGREE_LOW,
        degree_high=DEGREE_HIGH,
        heartbeat_interval=HEARTBEAT_S,
        heartbeat_initial_delay=0.2,
        eclipse_protection_enabled=False,
    )
    pubsub = Pubsub(host, router, strict_signing=True, allowed_topics={TOPIC}, max_inbound_rpc_size=MAX_MESSAGE_BYTES)
    gossip = Gossip(pubsub, on_gossip)
    async with background_trio_service(pubsub), background_trio_service(router):
        await pubsub.wait_until_ready()
        subscription = await pubsub.subscribe(TOPIC)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drain, subscription)
            try:
                yield gossip
            finally:
                nursery.cancel_scope.cancel()


async def _drain(subscription: Any) -> None:
    """What arrives has been taken by the validator; a subscription that nobody reads fills up."""
    async for message in subscription:
        log.debug("gossip from %r", message.from_id)
