"""Measures the nodes that a serving node may hand rows to: the shell around SurveyorCore."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from fusion_node.client.topology import coordinate_of
from fusion_node.daemon.surveyor_core import MAX_ANNOUNCED, Seen, SurveyorCore, is_neighbour
from fusion_node.errors import FusionError, PeerUnreachable
from fusion_node.types import LayerRange, ModelId, PeerId, UnixS
from p2p.bandwidth import BandwidthMeter
from p2p.identity import short
from p2p.links import LinkPool
from p2p.records import CoordinateRecord, NodeRecord, RecordTable, RoundTrip, dialled_at, digest_key_of
from p2p.seam import PathKind

CONNECT_TIMEOUT_S = 5.0

NUM_PINGS = 3
"""Of which the fastest counts."""

MAX_RATE = 2**53
"""What a record can hold."""

log = structlog.get_logger(__name__)


class Surveyor:
    """Measures one peer after the other while the node serves, and says what its record is to tell of that.

    A connection that was made for a measurement ends with it, unless a session has come to need it: an idle one costs a
    ping every two seconds on both sides.

    Args:
        table: whose records say who there is.
        own: layers that are served now; None while there are none, and then nobody is dialled.
        is_member: this node holds a slice of them, so that others who hold slices of them may be in its group.
        is_idle: whether nobody would miss the line.
        is_needed: whether a session depends on the connection with a peer.
        clock, unix_clock: monotonic and Unix seconds.
    """

    def __init__(
        self,
        peer: PeerId,
        pool: LinkPool,
        meter: BandwidthMeter,
        table: RecordTable,
        *,
        model_id: ModelId,
        own: Callable[[], LayerRange | None],
        is_member: bool = False,
        is_idle: Callable[[], bool],
        is_needed: Callable[[PeerId], bool],
        core: SurveyorCore | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._peer = peer
        self._pool = pool
        self._meter = meter
        self._table = table
        self._model_id = model_id
        self._own = own
        self._is_member = is_member
        self._is_idle = is_idle
        self._is_needed = is_needed
        self._clock = clock
        self._unix_clock = unix_clock
        self.core = core or SurveyorCore(secrets.SystemRandom(), now=clock())
        self._made_for_it: set[PeerId] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(max(0.1, self.core.get_timer() - self._clock()))
            await self.step()

    async def step(self) -> None:
        """What is due now: one round trip, or now and then one measurement of bandwidth."""
        now = self._clock()
        if now < self.core.get_timer():
            return
        records = self._look_around(now)
        for link in self._pool.links():
            if link.round_trip_s is not None and link.peer in records:
                self.core.measured(link.peer, link.round_trip_s, now=now)
        peer = self.core.handle_timer(now=now)
        if self._own() is None:
            return  # nobody hands rows to it now: that is not worth anybody's connection
        if peer is not None and peer in records and not self._pool.is_connected(peer):
            await self._measure(records[peer])
        peer = self.core.to_probe(now=self._clock(), is_idle=self._is_idle())
        if peer is not None:
            await self._probe(peer, records.get(peer))

    def round_trips(self) -> tuple[RoundTrip, ...]:
        """For the record."""
        return tuple(
            RoundTrip(digest_key_of(peer).to_bytes(8, "little"), round(seconds, 6))
            for peer, seconds in self.core.announced(now=self._clock())[:MAX_ANNOUNCED]
        )

    def coordinate(self) -> CoordinateRecord:
        """For the record."""
        own = self.core.coordinate
        vector = tuple(round(component, 6) for component in own.vector)
        return CoordinateRecord(vector, round(own.height, 6), round(own.error, 3))

    def rates_Bps(self, max_upload_Bps: float | None) -> tuple[int, int]:
        """How fast the line sends and receives, for the record; 0 where that was not measured."""
        up_Bps, down_Bps = self.core.up_Bps or 0.0, self.core.down_Bps or 0.0
        if max_upload_Bps is not None:
            up_Bps = min(up_Bps, max_upload_Bps) or max_upload_Bps
        return min(int(up_Bps), MAX_RATE), min(int(down_Bps), MAX_RATE)

    def _look_around(self, now: float) -> dict[PeerId, NodeRecord]:
        own = self._own()
        records = {
            PeerId(held.record.peer): held.record
            for held in self._table.held(now=UnixS(self._unix_clock()))
            if held.record.shards and held.record.peer != self._peer
        }
        self.core.saw(
            [
                Seen(peer, self._may_hand_over(own, record), coordinate_of(record), _hosts(record))
                for peer, record in records.items()
            ],
            now=now,
        )
        return records

    def _may_hand_over(self, own: LayerRange | None, record: NodeRecord) -> bool:
        """Rows to the next stage, or partial sums to another member of a group."""
        return own is not None and any(
            shard.model_id == self._model_id
            and (
                is_neighbour(own, LayerRange(shard.start, shard.stop))
                or (self._is_member and shard.slice != "" and shard.start < own.stop and own.start < shard.stop)
            )
            for shard in record.shards
        )

    async def _measure(self, record: NodeRecord) -> None:
        peer = PeerId(record.peer)
        try:
            await self._connect(record)
            round_trips_s = [await self._pool.round_trip(peer) for _ in range(NUM_PINGS)]
        except FusionError as error:
            log.debug("round trip not measured", peer=short(peer), reason=str(error))
            self.core.unreachable(peer, now=self._clock())
        else:
            self.core.measured(peer, min(round_trips_s), now=self._clock())
        self._end_connections()

    async def _probe(self, peer: PeerId, record: NodeRecord | None) -> None:
        try:
            if record is not None:
                await self._connect(record)
            if self._pool.path(peer) is PathKind.RELAYED:
                raise PeerUnreachable(peer, "only through a relay, whose line would be filled and measured instead")
            found = await self._meter.measure(peer)
        except FusionError as error:
            log.debug("bandwidth not measured", peer=short(peer), reason=str(error))
            self.core.probe_failed(now=self._clock())
        else:
            log.info("bandwidth", peer=short(peer), up_Bps=round(found.up_Bps), down_Bps=round(found.down_Bps))
            self.core.probed(peer, found.up_Bps, found.down_Bps, now=self._clock())
        self._end_connections()

    async def _connect(self, record: NodeRecord) -> None:
        peer = PeerId(record.peer)
        if not self._pool.is_connected(peer):
            await self._pool.connect(peer, dialled_at(record), timeout_s=CONNECT_TIMEOUT_S)
            self._made_for_it.add(peer)

    def _end_connections(self) -> None:
        for peer in self._made_for_it:
            if not self._is_needed(peer):
                self._pool.drop(peer, "it was measured")
        self._made_for_it.clear()


def _hosts(record: NodeRecord) -> frozenset[str]:
    """Where the record says that its node can be dialled; for a circuit, the relay."""
    multiaddrs = [address.split("/") for address in record.libp2p_addresses]
    return frozenset(
        [address.rpartition(":")[0] for address in record.data_addresses]
        + [parts[2] for parts in multiaddrs if len(parts) > 2]
    )
