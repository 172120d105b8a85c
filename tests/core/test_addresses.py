import pytest

from fusion_node.errors import ConfigError
from p2p.addresses import PeerAddress
from p2p.identity import Identity

PEER = Identity.from_seed(bytes(32)).peer_id
RELAY = Identity.from_seed(bytes([1]) * 32).peer_id


@pytest.mark.parametrize(
    ("text", "kind", "host", "via"),
    [
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{PEER}", "ip4", "192.0.2.7", None),
        (f"/ip6/2001:db8::7/tcp/4600/p2p/{PEER}", "ip6", "2001:db8::7", None),
        (f"/dns4/node.example.org/tcp/4600/p2p/{PEER}", "dns4", "node.example.org", None),
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "ip4", "192.0.2.7", RELAY),
        (f"/ip6/2001:db8::7/tcp/4600/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "ip6", "2001:db8::7", RELAY),
    ],
)
def test_an_address_is_read_and_written_as_it_was(text: str, kind: str, host: str, via: str | None) -> None:
    address = PeerAddress.parse(text)
    assert (address.kind, address.host, address.port, address.peer, address.via) == (kind, host, 4600, PEER, via)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{RELAY}/p2p-circuit", "not a peer address"),
        (f"/ip4/192.0.2.7/tcp/4600/p2p-circuit/p2p/{PEER}", "not a peer address"),
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{RELAY}/p2p-circuit/{PEER}", "not a peer address"),
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{RELAY}/p2p-circuit/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "not a peer address"),
        (f"/ip4/192.0.2.7/udp/4600/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "not a peer address"),
        (f"/ip4/192.0.2.7/tcp/4600/p2p/nobody/p2p-circuit/p2p/{PEER}", "'nobody'"),
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{RELAY}/p2p-circuit/p2p/nobody", "'nobody'"),
        (f"/ip4/192.0.2.7/tcp/4600/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "its own relay"),
        (f"/ip4/192.0.2.7/tcp/0/p2p/{RELAY}/p2p-circuit/p2p/{PEER}", "not a port"),
        (f"/dns/{'a.' * 100}org/tcp/1/p2p/{PEER}", "not a peer address"),
    ],
)
def test_an_address_of_another_shape_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PeerAddress.parse(text)


def test_addresses_have_an_order_with_the_direct_ones_first() -> None:
    direct, relayed = PeerAddress.of("192.0.2.7", 4600, PEER), PeerAddress.of("192.0.2.7", 4600, PEER, via=RELAY)
    assert sorted({relayed, direct}) == [direct, relayed]
    assert min(PeerAddress.of("192.0.2.6", 4600, PEER, via=RELAY), direct) == direct
