"""Invites and peer addresses: what is read back, and what is refused and how."""

from __future__ import annotations

import socket

import base58
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_node.errors import AddressInUse, ConfigError
from fusion_node.types import PeerId, UnixS
from p2p.addresses import PeerAddress, check_bindable, dialable_hosts, parse_listen
from p2p.identity import Identity
from p2p.invite import (
    MAX_ADDRESSES_PER_PEER,
    MAX_INVITE_CHARACTERS,
    PREFIX,
    SECRET_PREFIX,
    Invite,
    _checksum,
    parse_bootstrap,
    swarm_key_of,
)
from p2p.swarm_key import SwarmKey

NOW = UnixS(1_800_000_000.0)
PEER = Identity.from_seed(b"a" * 32).peer_id
EVERYWHERE = "0.0.0.0"  # noqa: S104  # nothing is bound to it here
OTHER = Identity.from_seed(b"b" * 32).peer_id
RELAY = Identity.from_seed(b"c" * 32).peer_id
KEY = SwarmKey(bytes(range(32)))


def address(host: str = "203.0.113.7", port: int = 4600, peer: PeerId = PEER) -> PeerAddress:
    return PeerAddress.of(host, port, peer)


def crafted(body: object) -> str:
    raw = msgspec.msgpack.encode(body)
    return PREFIX + base58.b58encode(raw + _checksum(raw)).decode()


def test_invite_with_one_address_is_short_and_read_back() -> None:
    text = Invite((address(),)).encode()
    assert len(text) < 90
    assert Invite.parse(text, now=NOW) == Invite((address(),))


def test_invite_with_a_key_looks_like_a_secret_and_shows_it_nowhere_else() -> None:
    invite = Invite((address(),), UnixS(NOW + 10), KEY)
    text = invite.encode()
    assert text.startswith(SECRET_PREFIX)
    assert len(text) < 150
    assert Invite.parse(text, now=NOW) == invite
    assert Invite((address(),)).encode().startswith(PREFIX)
    assert repr(KEY.secret) not in repr(invite)
    assert KEY.secret.hex() not in repr(invite)


hosts = st.one_of(
    st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.sampled_from(["node.example.org", "localhost"])
)


@given(
    st.lists(
        st.builds(
            PeerAddress.of,
            hosts,
            st.integers(1, 65535),
            st.sampled_from([PEER, OTHER]),
            via=st.sampled_from([None, RELAY]),
        ),
        min_size=1,
        max_size=MAX_ADDRESSES_PER_PEER,
        unique=True,
    ),
    st.one_of(st.none(), st.integers(int(NOW) + 1, 2**40)),
    st.sampled_from([None, KEY]),
)
def test_invite_roundtrips(addresses: list[PeerAddress], expires_at: int | None, key: SwarmKey | None) -> None:
    invite = Invite(tuple(addresses), None if expires_at is None else UnixS(float(expires_at)), key)
    parsed = Invite.parse(f"  {invite.encode()}\n", now=NOW)
    assert set(parsed.addresses) == set(addresses)
    assert parsed.expires_at == invite.expires_at
    assert parsed.swarm_key == key


def test_invite_to_more_than_there_is_room_for_keeps_the_first() -> None:
    peers = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(20)]
    addresses = tuple(
        PeerAddress.of(f"host{number}.{'a' * 50}.example.org", 1, peer, via=RELAY)
        for peer in peers
        for number in range(6)
    )
    text = Invite(addresses, None, KEY).encode()
    parsed = Invite.parse(text, now=NOW)
    assert MAX_INVITE_CHARACTERS - 300 < len(text) <= MAX_INVITE_CHARACTERS
    assert parsed.addresses == tuple(a for a in addresses if a in parsed.addresses)
    assert parsed.addresses[:4] == addresses[:4]


def test_invite_with_one_wrong_character_is_refused() -> None:
    text = Invite((address(),)).encode()
    for position in range(len(PREFIX), len(text)):
        wrong = "2" if text[position] != "2" else "3"
        with pytest.raises(ConfigError, match="mistyped or cut off"):
            Invite.parse(text[:position] + wrong + text[position + 1 :], now=NOW)


@given(st.text(max_size=200))
def test_invite_of_arbitrary_text_is_refused_as_configuration_error(text: str) -> None:
    with pytest.raises(ConfigError):
        Invite.parse(PREFIX + text, now=NOW)


def test_invite_that_is_too_long_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ConfigError, match="not an invite"):
        Invite.parse(PREFIX + "1" * MAX_INVITE_CHARACTERS, now=NOW)


def test_invite_past_its_expiry_is_refused() -> None:
    text = Invite((address(),), UnixS(NOW + 10)).encode()
    Invite.parse(text, now=NOW)
    with pytest.raises(ConfigError, match="expired"):
        Invite.parse(text, now=UnixS(NOW + 10))


@pytest.mark.parametrize(
    "body",
    [
        [],
        [None, [[b"k" * 32, [[b"1234", 1]]]]],
        [None, None, []],
        [None, None, [[b"k" * 31, [[b"1234", 1]]]]],
        [None, None, [[b"k" * 32, []]]],
        [None, None, [[b"k" * 32, [[b"1234", 0]]]]],
        [None, None, [[b"k" * 32, [[None, 1, "not a host"]]]]],
        [None, None, [[b"k" * 32, [[b"12345", 1]]]]],
        [None, None, [[b"k" * 32, [[b"123", 1]]]]],
        [None, None, [[b"k" * 32, [[None, 1]]]]],
        [None, None, [[b"k" * 32, [[b"1234", 1, "a.io"]]]]],
        [None, None, [[b"k" * 32, [[b"1234", 1, None, b"r" * 31]]]]],
        [None, None, [[b"k" * 32, [[b"1234", 1, None, b"k" * 32]]]]],  # its own relay
        [None, None, [[b"k" * 32, [[b"1234", 1, None, b"r" * 32, "more"]]]]],
        [None, None, [[b"k" * 32, [[b"1234", 1]] * 5]]],
        [None, None, [[b"k" * 32, [[b"1234", 1]]]] * 9],
        [None, None, [[b"k" * 32, [[b"1234", 1]]]], "more"],
        [None, b"k" * 31, [[b"k" * 32, [[b"1234", 1]]]]],
        [-1, None, [[b"k" * 32, [[b"1234", 1]]]]],
    ],
)
def test_invite_with_a_valid_checksum_over_nonsense_is_refused(body: object) -> None:
    with pytest.raises(ConfigError, match="ask for a new one"):
        Invite.parse(crafted(body), now=NOW)


def test_invite_without_addresses_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="--listen"):
        Invite(()).encode()


def test_bootstrap_takes_multiaddrs_and_invites_without_duplicates() -> None:
    invite = Invite((address(), address(peer=OTHER))).encode()
    assert parse_bootstrap([str(address()), invite], now=NOW) == (address(), address(peer=OTHER))


def test_key_is_taken_from_an_invite_unless_it_contradicts_another() -> None:
    public, private = Invite((address(),)).encode(), Invite((address(),), None, KEY).encode()
    other = Invite((address(),), None, SwarmKey(bytes(32))).encode()
    assert swarm_key_of([public, str(address())], None, now=NOW) is None
    assert swarm_key_of([public, private, private], None, now=NOW) == KEY
    assert swarm_key_of([str(address())], KEY, now=NOW) == KEY
    assert swarm_key_of([private], KEY, now=NOW) == KEY
    for texts, key in (([private, other], None), ([other], KEY)):
        with pytest.raises(ConfigError, match="different private swarms") as raised:
            swarm_key_of(texts, key, now=NOW)
        assert KEY.secret.hex() not in str(raised.value)
    with pytest.raises(ConfigError, match="mistyped"):
        swarm_key_of([private[:-1]], None, now=NOW)


def test_what_is_almost_an_invite_is_not_quoted() -> None:
    """One character short at the beginning, as when a line is copied carelessly: it still holds the key."""
    text = Invite((address(),), None, KEY).encode()
    for wrong in (text[1:], f"peer={text}", text + "0", text[:-1]):
        with pytest.raises(ConfigError) as raised:
            parse_bootstrap([wrong], now=NOW)
        assert text[30:40] not in str(raised.value)


@pytest.mark.parametrize("text", ["", "127.0.0.1:4600", "http://example.org", PEER, "fusion2abc"])
def test_bootstrap_that_is_neither_names_both_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a peer address .* nor an invite"):
        parse_bootstrap([text], now=NOW)


@pytest.mark.parametrize("kind_and_host", ["ip4/203.0.113.7", "ip6/2001:db8::1", "dns/node.example.org", "dns4/a.io"])
def test_multiaddr_roundtrips(kind_and_host: str) -> None:
    text = f"/{kind_and_host}/tcp/4600/p2p/{PEER}"
    assert str(PeerAddress.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.7/tcp/4600/p2p/{PEER}/p2p-circuit",
        "/ip4/203.0.113.7/tcp/4600",
        f"/ip4/203.0.113.7/udp/4600/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/65536/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/٤٦/p2p/{PEER}",
        f"/ip4/2001:db8::1/tcp/4600/p2p/{PEER}",
        f"/ip6/203.0.113.7/tcp/4600/p2p/{PEER}",
        f"/ip4/example.org/tcp/4600/p2p/{PEER}",
        f"/dns/203.0.113.7/tcp/4600/p2p/{PEER}",
        f"/dns/under score/tcp/4600/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/4600/p2p/{PEER[:-1]}",
        f"/ip4/203.0.113.7/tcp/4600/p2p/{PEER[:-1]}0",
        "/" + "a" * 10_000,
    ],
)
def test_multiaddr_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        PeerAddress.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:4600", (EVERYWHERE, 4600)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("127.0.0.1", 1)),
    ],
)
def test_listen_address_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    "text", ["", "4600", ":4600", "example.org:1", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1"]
)
def test_listen_address_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_listen(text)


def test_taken_port_is_found_even_when_its_owner_would_share_it() -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        with pytest.raises(AddressInUse):
            check_bindable("127.0.0.1", owner.getsockname()[1])


def test_listener_on_all_addresses_is_never_advertised_as_such() -> None:
    assert EVERYWHERE not in dialable_hosts(EVERYWHERE)
    assert dialable_hosts(EVERYWHERE)
    assert dialable_hosts("127.0.0.1") == ["127.0.0.1"]
