"""Makes ``private_swarm.json``: known answers of private swarms and invites, for this and for other implementations.

    python tests/vectors/make_private_swarm.py

Everything that is drawn by chance in use is fixed here. Bytes are hexadecimal. A change locks the private swarms that
exist out of themselves.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from fusion_node.types import UnixS
from p2p.addresses import PeerAddress
from p2p.identity import Identity
from p2p.invite import Invite
from p2p.libp2p_adapter.private_network import hello_and_cipher
from p2p.mdns import PrivateWords
from p2p.noise_core import Handshake
from p2p.swarm_key import SwarmKey
from p2p.websocket import path_for

PATH = Path(__file__).with_name("private_swarm.json")

KEY = SwarmKey(bytes(range(32)))
INITIATOR, RESPONDER, RELAY = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
VERSION = 2
"""Of the handshake; all versions of the protocol have the same one."""

EXPIRES_AT = UnixS(1_800_000_000.0)


def handshake() -> tuple[Handshake, Handshake, list[bytes]]:
    """Both sides after a handshake with fixed keys, and its three messages."""

    def side(identity: Identity, number: int, *, initiator: bool) -> Handshake:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library warns of ephemeral keys that are not its own
            return Handshake(
                identity,
                initiator=initiator,
                static_private=bytes([number]) * 32,
                ephemeral_private=bytes([number + 1]) * 32,
                psk=KEY.noise_psk,
                version=VERSION,
            )

    ours, theirs = side(INITIATOR, 10, initiator=True), side(RESPONDER, 20, initiator=False)
    messages = [ours.start()]
    messages.append(theirs.receive(messages[-1]))
    messages.append(ours.receive(messages[-1]))
    theirs.receive(messages[-1])
    return ours, theirs, messages


def invites() -> list[dict[str, Any]]:
    addresses = [
        PeerAddress.of("203.0.113.7", 4600, RESPONDER.peer_id),
        PeerAddress.of("2001:db8::7", 4600, RESPONDER.peer_id),
        PeerAddress.of("node.example.org", 4600, RESPONDER.peer_id),
        PeerAddress.of("203.0.113.9", 4600, INITIATOR.peer_id, via=RELAY.peer_id),
    ]
    made = [
        Invite(tuple(addresses[:1])),
        Invite(tuple(addresses), EXPIRES_AT),
        Invite(tuple(addresses[:1]), EXPIRES_AT, KEY),
    ]
    return [
        {
            "addresses": [str(address) for address in invite.addresses],
            "expires_at": None if invite.expires_at is None else int(invite.expires_at),
            "key": None if invite.swarm_key is None else invite.swarm_key.secret.hex(),
            "text": invite.encode(),
        }
        for invite in made
    ]


def vectors() -> dict[str, Any]:
    ours, _, messages = handshake()
    assert ours.keys is not None  # the handshake is over
    hello, cipher = hello_and_cipher(KEY.pnet_psk, bytes(range(32)))
    words = PrivateWords(KEY)
    return {
        "key": KEY.secret.hex(),
        "key_file": KEY.to_text(),
        "derived": {
            "tag": KEY.tag,
            "noise-psk": KEY.noise_psk.hex(),
            "libp2p-pnet": KEY.pnet_psk.hex(),
            "mdns-service": KEY.lan_name,
            "mdns-text": KEY.lan_key.hex(),
        },
        "websocket_path": path_for(KEY.noise_psk),
        "handshake": {
            "version": VERSION,
            "messages": [message.hex() for message in messages],
            "initiator_sending_key": ours.keys.sending_key.hex(),
            "initiator_receiving_key": ours.keys.receiving_key.hex(),
        },
        "private_network": {
            "nonce": bytes(range(32)).hex(),
            "hello": hello.hex(),
            "plain": b"\x13/multistream/1.0.0\n".hex(),
            "enciphered": cipher.update(b"\x13/multistream/1.0.0\n").hex(),
        },
        "mdns": {
            "service_type": words.service_type,
            "address": "/ip4/192.0.2.7/tcp/4600/p2p/" + RESPONDER.peer_id,
            "attribute": words.seal(("/ip4/192.0.2.7/tcp/4600/p2p/" + RESPONDER.peer_id).encode(), bytes(12)).hex(),
        },
        "invites": invites(),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
