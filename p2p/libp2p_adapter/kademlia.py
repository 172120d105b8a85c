"""The DHT: records under their owners' keys, and provider records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libp2p.kad_dht.kad_dht as kad_dht
from libp2p.peer.id import ID
from libp2p.records.validator import NamespacedValidator, Validator

from fusion_node.types import PeerId
from p2p.addresses import PeerAddress
from p2p.control import FoundPeer
from p2p.libp2p_adapter.hardening import MAX_PROVIDERS_PER_KEY, bound_providers
from p2p.libp2p_adapter.messages import translated
from p2p.libp2p_adapter.multiaddrs import peer_addresses

NAMESPACE = "fusion"


def make_dht(host: Any, sequence_of: Callable[[str, bytes], int], *, serve: bool) -> Any:
    """The library's service, with our validator and our bounds."""
    validator = NamespacedValidator({NAMESPACE: _RecordValidator(sequence_of)}, strict_validation=True)
    dht = kad_dht.KadDHT(
        host,
        kad_dht.DHTMode.SERVER if serve else kad_dht.DHTMode.CLIENT,
        validator=validator,
        validator_changed=True,
        strict_validation=True,
    )
    bound_providers(dht.provider_store)
    return dht


class Dht:
    """Calls to the running service; see ControlNode."""

    def __init__(self, host: Any, dht: Any, sequence_of: Callable[[str, bytes], int]) -> None:
        self._host = host
        self._dht = dht
        self._sequence_of = sequence_of

    async def join(self, peer: PeerId) -> None:
        with translated(peer):
            await self._dht.add_peer(ID.from_base58(peer))
            await self._dht.peer_routing.find_closest_peers_network(self._host.get_id().to_bytes())

    async def put_value(self, key: str, value: bytes) -> None:
        with translated("DHT"):
            # The library refuses to replace the copy of one's own earlier value when that has expired since.
            self._dht.value_store.remove(key.encode())
            await self._dht.put_value(key, value)

    async def get_value(self, key: str) -> bytes | None:
        store = self._dht.value_store
        held = store.store.pop(key.encode(), None)  # trap 8: it would be the answer, unchecked and however old
        value: bytes | None = None
        try:
            with translated("DHT"):
                value = await self._dht.get_value(key)
        finally:
            # What others have stored here stays stored, unless the look-up has brought a newer one.
            if held is not None and not self._is_newer(key, value, held[0].value):
                store.store[key.encode()] = held
        return value

    async def provide(self, key: bytes) -> None:
        with translated("DHT"):
            await self._dht.provider_store.provide(key)

    async def find_providers(self, key: bytes) -> list[FoundPeer]:
        store = self._dht.provider_store
        held = store.providers.pop(key, {})  # trap 8, as in get_value
        try:
            with translated("DHT"):
                # Its count is of answers with all their repetitions: ask for many.
                found = await store.find_providers(key, count=10 * MAX_PROVIDERS_PER_KEY)
        finally:
            new = store.providers.pop(key, {})
            store.providers[key] = dict(list({**held, **new}.items())[:MAX_PROVIDERS_PER_KEY])
        infos = [*found, *(record.provider_info for record in held.values())]
        peers: dict[str, set[PeerAddress]] = {}
        for info in infos:
            peers.setdefault(info.peer_id.to_base58(), set()).update(peer_addresses(info.peer_id, info.addrs))
        return [FoundPeer(PeerId(peer), tuple(sorted(addresses))) for peer, addresses in peers.items() if addresses]

    def _is_newer(self, key: str, value: bytes | None, than: bytes) -> bool:
        if value is None:
            return False
        try:
            return self._sequence_of(key, value) >= self._sequence_of(key, than)
        except ValueError:  # the one that was held has expired
            return True


class _RecordValidator(Validator):  # type: ignore[misc]
    """Storers and readers of the DHT both check: the value is a signed record, of the peer that the key names."""

    def __init__(self, sequence_of: Callable[[str, bytes], int]) -> None:
        self._sequence_of = sequence_of

    def validate(self, key: str, value: bytes) -> None:
        self._sequence_of(key, value)

    def select(self, key: str, values: list[bytes]) -> int:
        def rank(value: bytes) -> int:
            try:
                return self._sequence_of(key, value)
            except ValueError:
                return -1

        # The first of equals, which the library lets stand for "keep the old one".
        return max(range(len(values)), key=lambda index: (rank(values[index]), -index))
