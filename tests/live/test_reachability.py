"""Reachability over real sockets: several libp2p hosts and data-plane listeners on loopback, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from fusion_node.client.connection import SwarmConnection
from fusion_node.store import StoredModel
from fusion_node.types import PeerId
from p2p.addresses import PeerAddress, is_loopback
from p2p.dial_back import PROTOCOL_ID, VERSION, DialBackAnswer, DialBackRequest
from p2p.discovery import Discovery, DiscoveryConfig, RequestProtocol
from p2p.identity import Identity
from p2p.interfaces import dialable_hosts
from p2p.reachability_verdict import AddressState, NatClass, Outcome, Overall, Plane
from p2p.seam import Link
from p2p.swarm_key import SwarmKey
from p2p.websocket import WebSocketNetwork, split_address
from tests.live.swarm_process import node_processes

pytestmark = pytest.mark.live

LIMIT_S = 20.0
HERE = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104


class Peer:
    """A discovery, and for a node the listener of its data plane."""

    def __init__(self, discovery: Discovery, identity: Identity) -> None:
        self.discovery = discovery
        self.reachability = discovery.reachability
        self.id = identity.peer_id
        self.data_port = 0

    def announced(self) -> dict[Plane, list[str]]:
        return {plane: [host for host, _ in self.reachability.announced(plane)] for plane in Plane}

    def states(self) -> dict[tuple[str, str], AddressState]:
        return {(each.plane.value, each.host): each.state for each in self.reachability.verdict().addresses}

    def has(self, state: AddressState, num: int = 2) -> bool:
        return [*self.states().values()].count(state) == num

    async def until(self, condition: Callable[[], bool]) -> None:
        changed = asyncio.Event()
        self.reachability.on_change.append(changed.set)
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await changed.wait()


Start = Callable[..., Awaitable[Peer]]


async def _ignore(_: Link) -> None: ...


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def start_peer(
            *bootstrap: str,
            listen: str | None = f"{HERE}:0",
            treats_loopback_as_network: bool = True,
            swarm_key: SwarmKey | None = None,
            has_data_plane: bool = True,
            announce: tuple[str, ...] = (),
            answers: Callable[[PeerId, bytes], Awaitable[bytes | None]] | None = None,
        ) -> Peer:
            identity = Identity.generate()
            discovery = Discovery(
                identity,
                DiscoveryConfig(
                    () if listen is None else (listen,),
                    bootstrap,
                    mdns=False,
                    serve=listen is not None,
                    announce=announce,
                ),
                swarm_key=swarm_key,
                is_loopback=(lambda host: False) if treats_loopback_as_network else is_loopback,
            )
            if answers is not None:
                discovery.add_protocol(RequestProtocol(PROTOCOL_ID, 4096, answers))
            await discovery.start()
            stack.push_async_callback(discovery.aclose)
            peer = Peer(discovery, identity)
            if listen is None:
                return peer
            host = listen.rpartition(":")[0]
            network = WebSocketNetwork(identity, psk=None if swarm_key is None else swarm_key.noise_psk)
            network.on_nonce = lambda nonce, at: discovery.reachability.reached(Plane.DATA, nonce, at)
            if has_data_plane:
                listener = await network.listen(f"{host}:0", _ignore)
                stack.push_async_callback(listener.aclose)
                peer.data_port = split_address(listener.address)[1]
            else:
                probe = stack.enter_context(socket.socket())
                probe.bind((host, 0))  # and never listens
                peer.data_port = probe.getsockname()[1]
            discovery.reachability.bound(Plane.DATA, [(host, peer.data_port)])
            return peer

        yield start_peer


def _lies(outcome: Outcome, seen: str = HERE) -> Callable[[PeerId, bytes], Awaitable[bytes | None]]:
    async def answer(_: PeerId, request: bytes) -> bytes:
        asked = msgspec.msgpack.decode(request, type=DialBackRequest)
        return msgspec.msgpack.encode(DialBackAnswer(VERSION, seen, 1, (outcome,) * len(asked.addresses)))

    return answer


@pytest.mark.parametrize("swarm_key", [None, SwarmKey.generate()], ids=["public", "private"])
async def test_node_is_confirmed_by_the_one_user_that_there_is(start: Start, swarm_key: SwarmKey | None) -> None:
    node = await start(swarm_key=swarm_key)
    assert node.announced() == {Plane.CONTROL: [], Plane.DATA: []}
    assert node.discovery.announced_addresses == []
    assert len(node.discovery.addresses) == 1  # for people: an invite must lead somewhere before anybody has come
    user = await start(node.discovery.addresses[0], listen=None, swarm_key=swarm_key)
    await user.discovery.wait_for_peer(LIMIT_S)
    await node.until(lambda: node.has(AddressState.CONFIRMED) and bool(node.reachability.verdict().seen_hosts))
    assert node.announced() == {Plane.CONTROL: [HERE], Plane.DATA: [HERE]}
    assert node.discovery.announced_addresses == node.discovery.addresses
    verdict = node.reachability.verdict()
    assert (verdict.overall, verdict.nat, verdict.seen_hosts) == (Overall.PUBLIC, NatClass.NONE, (HERE,))
    assert verdict.addresses[0].confirmed_by == (user.id,)


async def test_three_peers_confirm_what_can_be_dialled_and_fail_what_cannot(start: Start) -> None:
    first = await start(has_data_plane=False)
    others = [await start(first.discovery.addresses[0]) for _ in range(3)]
    await first.until(lambda: first.states() == {("control", HERE): "confirmed", ("data", HERE): "failed"})
    assert first.reachability.verdict().overall is Overall.PUBLIC  # the control plane carries everything
    for other in others:
        await other.until(lambda other=other: other.has(AddressState.CONFIRMED))  # type: ignore[misc]
    verdicts = {each.plane: each for each in first.reachability.verdict().addresses}
    assert set(verdicts[Plane.CONTROL].confirmed_by) == {other.id for other in others}
    assert set(verdicts[Plane.DATA].failed_by) == {other.id for other in others}


async def test_lie_of_success_confirms_nothing_and_lie_of_failure_is_outweighed(start: Start) -> None:
    node = await start()
    await start(node.discovery.addresses[0], listen=None, answers=_lies(Outcome.DELIVERED))
    await start(node.discovery.addresses[0], listen=None, answers=_lies(Outcome.UNREACHABLE))
    await node.until(lambda: len(node.reachability.verdict().addresses[0].failed_by) == 2)
    assert node.announced() == {Plane.CONTROL: [], Plane.DATA: []}
    honest = await start(node.discovery.addresses[0], listen=None)
    await node.until(lambda: node.has(AddressState.CONFIRMED))
    assert node.reachability.verdict().addresses[0].confirmed_by == (honest.id,)


async def test_peer_that_claims_to_see_another_host_makes_it_a_candidate_and_no_more(start: Start) -> None:
    node = await start()
    await start(node.discovery.addresses[0], listen=None, answers=_lies(Outcome.DELIVERED, seen="127.9.9.9"))
    await node.until(lambda: ("control", "127.9.9.9") in node.states())
    await start(node.discovery.addresses[0], listen=None)
    await node.until(lambda: node.has(AddressState.CONFIRMED))
    assert node.announced() == {Plane.CONTROL: [HERE], Plane.DATA: [HERE]}


async def test_peer_that_refuses_the_protocol_does_not_keep_others_from_confirming(start: Start) -> None:
    async def refuse(peer: PeerId, request: bytes) -> None: ...

    node = await start()
    await start(node.discovery.addresses[0], listen=None, answers=refuse)
    await start(node.discovery.addresses[0], listen=None)
    await node.until(lambda: node.has(AddressState.CONFIRMED))


async def test_operators_word_is_announced_beside_what_is_confirmed(start: Start) -> None:
    node = await start(announce=("node.example.org:7000",))
    assert [address.split("/")[2] for address in node.discovery.announced_addresses] == ["node.example.org"]
    assert node.reachability.announced(Plane.DATA) == [("node.example.org", 7001)]


async def test_circuit_of_a_relay_comes_before_what_nobody_has_dialled(start: Start) -> None:
    node = await start()
    relay = Identity.generate().peer_id
    circuit = PeerAddress.of("203.0.113.1", 4600, node.id, via=relay)
    node.discovery.extra_addresses.append(lambda: [circuit])
    assert node.discovery.announced_addresses == [str(circuit)]
    assert [PeerAddress.parse(address).host for address in node.discovery.addresses] == ["203.0.113.1", HERE]
    await start(node.discovery.addresses[1], listen=None)
    await node.until(lambda: node.has(AddressState.CONFIRMED))
    assert [PeerAddress.parse(address).host for address in node.discovery.addresses] == [HERE, "203.0.113.1"]
    assert node.discovery.announced_addresses == node.discovery.addresses


async def test_listener_on_loopback_is_announced_without_asking(start: Start) -> None:
    node = await start(treats_loopback_as_network=False)
    assert node.announced() == {Plane.CONTROL: [HERE], Plane.DATA: [HERE]}
    assert node.reachability.verdict().overall is Overall.LOOPBACK_ONLY
    asked = []

    async def note(peer: PeerId, request: bytes) -> None:
        asked.append(request)

    user = await start(node.discovery.addresses[0], listen=None, treats_loopback_as_network=False, answers=note)
    await user.discovery.wait_for_peer(LIMIT_S)
    assert asked == []


async def test_confirmation_outlives_a_restart_of_the_libp2p_thread(start: Start) -> None:
    node = await start()
    user = await start(node.discovery.addresses[0], listen=None)
    await node.until(lambda: node.has(AddressState.CONFIRMED))
    node.discovery._bridge._runner.stop()  # type: ignore[union-attr]
    async with asyncio.timeout(LIMIT_S):
        while node.discovery._bridge.num_restarts == 0:  # noqa: ASYNC110  # of another thread
            await asyncio.sleep(0.05)
    await user.discovery.wait_for_peer(LIMIT_S)
    assert node.announced() == {Plane.CONTROL: [HERE], Plane.DATA: [HERE]}


@pytest.mark.skipif(all(map(is_loopback, dialable_hosts(EVERYWHERE))), reason="no network but loopback")
async def test_neighbour_process_that_came_over_loopback_confirms_this_machines_own_addresses(start: Start) -> None:
    """As a user on the node's machine does that was given 127.0.0.1: nobody else may be there to ask."""
    node = await start(listen=f"{EVERYWHERE}:0", treats_loopback_as_network=False)
    own = dialable_hosts(EVERYWHERE)
    assert node.announced() == {Plane.CONTROL: [], Plane.DATA: []}
    _, _, _, _, port, _, peer = node.discovery.addresses[0].split("/")
    await start(f"/ip4/{HERE}/tcp/{port}/p2p/{peer}", listen=None, treats_loopback_as_network=False)
    await node.until(lambda: node.has(AddressState.CONFIRMED, num=2 * len(own)))
    assert node.announced() == {Plane.CONTROL: own, Plane.DATA: own}


@pytest.mark.skipif(all(map(is_loopback, dialable_hosts(EVERYWHERE))), reason="no network but loopback")
async def test_node_process_on_all_addresses_is_found_with_those_that_its_first_user_has_dialled(
    test_home: Path, builtin_model: StoredModel, tmp_path: Path
) -> None:
    own = dialable_hosts(EVERYWHERE)
    with node_processes(test_home, tmp_path) as nodes:
        await asyncio.to_thread(nodes.start, "0:1", options=("--listen", f"{EVERYWHERE}:0", "--no-upnp"))
        (node,) = nodes.current
        assert [split_address(address)[0] for address in node.ready["data"]] == own
        # Over loopback, as a user of this machine may, at an address that the node itself would not tell.
        _, _, _, _, port, _, peer = node.addresses[0].split("/")
        async with SwarmConnection([f"/ip4/{HERE}/tcp/{port}/p2p/{peer}"], mdns=False, dialled_back_s=LIMIT_S) as user:
            (record,) = await user.find(builtin_model.model_id)
            assert [split_address(address)[0] for address in record.data_addresses] == own
            (measured,) = await user.measure([record])
            assert measured.problem == ""
        assert node.events("can be dialled at")
