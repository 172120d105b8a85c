"""The conformance suite of p2p.conformance over both transports."""

from __future__ import annotations

import socket

import pytest

from p2p.conformance import CHECKS, Check
from p2p.identity import Identity
from p2p.link_emulation import EmulatedLine
from p2p.memory import MemoryNetwork, MemoryWorld
from p2p.records import PROTOCOL_VERSION
from p2p.seam import Network
from p2p.websocket import WebSocketNetwork


class MemoryBench:
    """In memory."""

    def __init__(self) -> None:
        self.world = MemoryWorld()
        self.hosts: dict[int, str] = {}

    def network(self, identity: Identity, *, version: int = PROTOCOL_VERSION) -> Network:
        host = f"host{len(self.hosts)}"
        network = MemoryNetwork(self.world, identity, host, version=version, line=self.line())
        self.hosts[id(network)] = host
        return network

    def line(self) -> EmulatedLine | None:
        """That a network's messages go over."""
        return None

    def listen_address(self, network: Network) -> str:
        return f"{self.hosts[id(network)]}:0"

    def dead_address(self) -> str:
        return "nobody:1"


class WebSocketBench:
    """Over sockets, in real time."""

    def network(self, identity: Identity, *, version: int = PROTOCOL_VERSION) -> Network:
        return WebSocketNetwork(identity, version=version, line=self.line())

    def line(self) -> EmulatedLine | None:
        """That a network's messages go over."""
        return None

    def listen_address(self, network: Network) -> str:
        return "127.0.0.1:0"

    def dead_address(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("bench", [MemoryBench, WebSocketBench])
async def test_network_conforms(bench: type[MemoryBench | WebSocketBench], check: Check) -> None:
    await check(bench())
