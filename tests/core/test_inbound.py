"""Connections that come in to a libp2p host: what they hold is given back, whatever happens to them."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import multiaddr
import trio
from libp2p.io.trio import TrioTCPStream

from p2p.libp2p_adapter.inbound import Inbound
from p2p.seam import OpenGate


def test_host_that_ends_during_a_handshake_closes_the_socket() -> None:
    """Cancelled, the library would first say goodbye on the connection, and not come to the socket any more."""

    async def hang(*_: Any) -> None:
        await trio.sleep_forever()

    async def ended() -> int:
        swarm = SimpleNamespace(upgrade_inbound_raw_conn=hang)
        inbound = Inbound(SimpleNamespace(get_network=lambda: swarm), OpenGate(), max_connections=1)
        listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
        with socket.create_connection(listener[0].socket.getsockname()):
            accepted = await listener[0].accept()
            await listener[0].aclose()
            with trio.move_on_after(0.01):
                await inbound._handle(TrioTCPStream(accepted), multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/1"))
        return int(accepted.socket.fileno())

    assert trio.run(ended) == -1
