from p2p.addresses import PeerAddress
from p2p.identity import Identity
from p2p.mdns import MAX_ADDRESSES, PrivateWords, PublicWords
from p2p.swarm_key import SwarmKey

PEER = Identity.from_seed(bytes(32)).peer_id
KEY = SwarmKey(bytes(range(32)))
ADDRESSES = [PeerAddress.of(host, 4600, PEER) for host in ("192.0.2.7", "2001:db8:1111:2222:3333:4444:5555:6666")]


def on_the_wire(properties: dict[str, str | bytes]) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() if isinstance(value, str) else value for key, value in properties.items()}


def test_what_is_advertised_is_read_back() -> None:
    for words in (PublicWords(), PrivateWords(KEY)):
        written = on_the_wire(words.write(ADDRESSES))
        assert words.read(written) == ADDRESSES
        assert all(len(key) + 1 + len(value or b"") <= 255 for key, value in written.items())


def test_a_private_swarm_cannot_be_told_from_other_services_nor_read() -> None:
    words = PrivateWords(KEY)
    first, again = words.write(ADDRESSES), words.write(ADDRESSES)
    shown = repr((words.service_type, first)).lower()
    assert not any(word in shown for word in ("fusion", "p2p", PEER.lower(), "192.0.2.7"))
    assert first != again
    name = words.service_type.partition(".")[0].removeprefix("_")
    assert len(name) <= 15  # RFC 6335 §5.1
    assert name.isalnum()
    assert any(c.isalpha() for c in name)


def test_swarms_do_not_see_one_another() -> None:
    other = PrivateWords(SwarmKey(bytes(32)))
    assert len({words.service_type for words in (other, PrivateWords(KEY), PublicWords())}) == 3
    sealed = on_the_wire(PrivateWords(KEY).write(ADDRESSES))
    assert other.read(sealed) == []
    assert PublicWords().read(sealed) == []


def test_whatever_else_stands_there_is_left_out() -> None:
    words = PrivateWords(KEY)
    sealed = on_the_wire(words.write(ADDRESSES[:1]))
    junk: dict[bytes, bytes | None] = {b"a5": None, b"a6": b"", b"a7": b"x" * 40, b"b": b"y"}
    assert words.read(junk | sealed) == ADDRESSES[:1]
    assert PublicWords().read({b"dnsaddr": b"\xff\xfe", b"dnsaddr1": b"/ip4/nowhere", b"dnsaddr2": None}) == []
    many: dict[bytes, bytes | None] = {b"dnsaddr%d" % n: str(ADDRESSES[0]).encode() for n in range(100)}
    assert len(PublicWords().read(many)) == 2 * MAX_ADDRESSES
