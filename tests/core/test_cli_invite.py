"""``fusion-node invite``: what is printed, what is warned of, and that a camera can read the code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import typer.testing
import zxingcpp

from fusion_node.cli.invite import best_of, qr_code, warnings
from fusion_node.cli.main import app
from fusion_node.daemon.config import NodeConfig
from fusion_node.daemon.control import NodeState, Phase, control_socket
from fusion_node.daemon.network_examiner import Visit
from fusion_node.daemon.network_report import NetworkReport
from fusion_node.daemon.node import _swarm_view
from fusion_node.daemon.swarm_report import InviteReply, InviteRequest, PeersReply
from fusion_node.daemon.swarm_view import SwarmView, best_for_strangers
from fusion_node.errors import ConfigError, NodeNotRunning
from fusion_node.types import LayerRange, PeerId, UnixS
from p2p.addresses import PeerAddress
from p2p.control import ConnectionEnds
from p2p.dial_back import DialBackAnswer
from p2p.discovery import Discovery, DiscoveryConfig
from p2p.gate import PeerGate
from p2p.identity import Identity
from p2p.invite import SECRET_PREFIX, Invite
from p2p.reachability_verdict import Overall
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord, sign_record
from p2p.swarm_key import SwarmKey
from tests.core.test_reachability_shell import Control, Machine, until
from tests.core.test_reachability_shell import running as running_machine

NOW = 1_800_000_000.0
US, THEM, RELAY = (Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2, 3))
KEY = SwarmKey(bytes(range(32)))
LAYERS = LayerRange(0, 10)


def address(host: str, peer: PeerId = US, via: PeerId | None = None) -> str:
    return str(PeerAddress.of(host, 4600, peer, via=via))


def record(peer: PeerId, *addresses: str) -> NodeRecord:
    return NodeRecord(
        version=PROTOCOL_VERSION,
        peer=peer,
        sequence=1,
        issued_at=UnixS(NOW - 5),
        expires_at=UnixS(NOW + 55),
        data_addresses=(),
        libp2p_addresses=addresses,
        device="cpu",
        memory_free_bytes=1,
        shards=(ShardRecord("ab" * 32, "tiny", LAYERS.start, LAYERS.stop, 30, "fp32", (0.001, 0.001, 0.001), 4096),),
        num_sessions=0,
        software="test",
    )


def view(
    announced: Sequence[str] = (),
    *,
    guessed: Sequence[str] = (),
    key: SwarmKey | None = None,
    records: Sequence[NodeRecord] = (),
) -> SwarmView:
    return SwarmView(
        US,
        swarm_key=key,
        addresses=lambda: [*announced, *guessed],
        announced=lambda: announced,
        records=lambda: records,
        connections=(),
        standing_of=lambda peer: "",
        met_at=lambda: (),
        clock=lambda: NOW,
    )


class Node:
    """A node with nothing but a view of its swarm."""

    def __init__(self, swarm: SwarmView) -> None:
        self._swarm = swarm

    def state(self) -> NodeState:
        return NodeState(US, 1, "tiny", Phase.READY)

    def pause(self, *, at_once: bool) -> None: ...

    def resume(self) -> None: ...

    async def network(self, *, measure: bool) -> NetworkReport | None:
        return None

    def invite(self, request: InviteRequest) -> InviteReply | None:
        return self._swarm.invite(request)

    async def peers(self) -> PeersReply | None:
        return await self._swarm.peers()


@contextlib.contextmanager
def running(home: Path, swarm: SwarmView, peer: str = US) -> Iterator[None]:
    """A control socket in a thread: the command runs an event loop of its own."""
    loop, up, down = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with control_socket(home / "run", peer, Node(swarm)):
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    up.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join()
        loop.close()


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run(home: Path, *arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, ["invite", "--home", str(home), *arguments])


def test_the_invite_is_the_only_line_on_standard_output(home: Path) -> None:
    with running(home, view([address("203.0.113.7")])):
        result = run(home)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert Invite.parse(line, now=UnixS(NOW)).addresses == (PeerAddress.parse(address("203.0.113.7")),)
    assert result.stderr == ""


def test_an_invite_with_a_key_is_called_a_secret_and_can_be_had_without(home: Path) -> None:
    with running(home, view([address("203.0.113.7")], key=KEY)):
        secret, harmless, described = run(home), run(home, "--no-key", "--expires", "7d"), run(home, "--json")
    assert Invite.parse(secret.stdout, now=UnixS(NOW)).swarm_key == KEY
    assert secret.stdout.startswith(SECRET_PREFIX)
    assert "holds the key of a private swarm" in secret.stderr
    assert secret.stdout.strip() not in secret.stderr
    without = Invite.parse(harmless.stdout, now=UnixS(NOW))
    assert (without.swarm_key, without.expires_at) == (None, NOW + 7 * 86_400)
    assert "holds the key" not in harmless.stderr
    assert json.loads(described.stdout)["has_key"] is True
    assert json.loads(described.stdout)["swarm"] == KEY.tag


def test_there_is_no_invite_without_a_node_or_an_address(home: Path) -> None:
    with pytest.raises(NodeNotRunning, match="fusion-node join"):
        typer.testing.CliRunner().invoke(app, ["invite", "--home", str(home)], catch_exceptions=False)
    with running(home, view()), pytest.raises(ConfigError, match="--listen"):
        typer.testing.CliRunner().invoke(app, ["invite", "--home", str(home)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="not a duration"):
        typer.testing.CliRunner().invoke(app, ["invite", "--expires", "soon"], catch_exceptions=False)


def test_nodes_in_different_swarms_have_to_be_told_apart(home: Path) -> None:
    here = [address("203.0.113.7")]
    with running(home, view(here)), running(home, view(here, key=KEY), THEM):
        with pytest.raises(ConfigError, match="in different swarms"):
            typer.testing.CliRunner().invoke(app, ["invite", "--home", str(home)], catch_exceptions=False)
        assert run(home, US[-8:]).stdout.startswith("fusion1")


def test_public_addresses_come_first_and_loopback_only_alone() -> None:
    texts = [
        address("127.0.0.1"),
        address("192.168.1.2"),
        address("203.0.113.9", via=RELAY),
        address("8.8.8.8"),
        address("8.8.4.4", via=RELAY),
        address("node.example.org"),
    ]
    order = [str(a) for a in best_for_strangers(map(PeerAddress.parse, texts))]
    assert order == [texts[3], texts[5], texts[4], texts[1], texts[2]]  # 203.0.113.0/24 is no public network
    assert [str(a) for a in best_for_strangers([PeerAddress.parse(texts[0])])] == [texts[0]]


def test_a_node_that_nobody_can_dial_invites_to_others_that_can_be() -> None:
    known = [
        record(THEM, address("8.8.8.8", THEM), address("8.8.8.8", RELAY), "nonsense"),
        record(US, address("1.1.1.1")),
    ]
    reply = view(records=known).invite(InviteRequest())
    assert reply.addresses == (address("8.8.8.8", THEM),)
    assert reply.names_others
    assert "leads to others" in " ".join(warnings(reply, now=NOW))


def test_what_nobody_has_confirmed_comes_after_others_and_alone_only_when_there_are_none() -> None:
    guess, lan, public = address("192.168.1.7"), address("192.168.1.8", THEM), address("8.8.8.8", THEM)
    alone = view(guessed=[guess]).invite(InviteRequest())
    assert (alone.addresses, alone.names_others, alone.is_unconfirmed) == ((guess,), False, True)
    assert "no other node has confirmed" in " ".join(warnings(alone, now=NOW))
    met = view(guessed=[guess], records=[record(THEM, lan, public)]).invite(InviteRequest())
    assert (met.addresses, met.names_others, met.is_unconfirmed) == ((public, lan, guess), True, True)
    assert "leads to others" in " ".join(warnings(met, now=NOW))


def test_who_is_confirmed_on_the_local_network_only_names_others_for_the_rest_of_the_world() -> None:
    own, lan, public = address("192.168.1.7"), address("192.168.1.8", THEM), address("8.8.8.8", THEM)
    reply = view([own], records=[record(THEM, lan, public)]).invite(InviteRequest())
    assert (reply.addresses, reply.names_others, reply.is_unconfirmed) == ((own, public), True, False)
    neighbours = view([own], records=[record(THEM, lan)]).invite(InviteRequest())
    assert (neighbours.addresses, warnings(neighbours, now=NOW)) == ((own,), [])


class AmongStrangers(Control):
    """Peers of different networks, of whom none reaches this machine."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.delivers = "192.168.1.7", False

    async def ends_of(self, peer: PeerId) -> list[ConnectionEnds]:
        return [ConnectionEnds(self.host, 50_000, f"45.{peer}.1.1", 4600, True)]

    async def request(self, peer: PeerId, protocol: str, request: bytes, **limits: float) -> bytes:
        answer = msgspec.msgpack.decode(await super().request(peer, protocol, request, **limits), type=DialBackAnswer)
        return msgspec.msgpack.encode(msgspec.structs.replace(answer, seen_host="45.99.1.1"))

    async def probe(self, *_: object) -> None:
        return None


async def test_a_node_behind_a_nat_invites_through_others_with_all_its_parts_in_place() -> None:
    own, other = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)
    machine = Machine(AmongStrangers())
    discovery = Discovery(own, DiscoveryConfig((), (), mdns=False, serve=True))
    discovery.reachability = machine.reachability
    reachable, now = address("45.1.1.1", other.peer_id), time.time()
    known = msgspec.structs.replace(record(other.peer_id, reachable), issued_at=now, expires_at=now + 60)
    discovery.table.receive(sign_record(known, other), now=UnixS(now))
    swarm = _swarm_view(own.peer_id, discovery, None, PeerGate())
    async with running_machine(machine):
        for peer in ("1", "2", "3", "4"):
            machine.reachability.peer_met(PeerId(peer))
        await until(machine, lambda: machine.reachability.verdict().overall is Overall.BEHIND_NAT)
        reply = swarm.invite(InviteRequest())
        guesses = [address(host, own.peer_id) for host in ("45.99.1.1", "192.168.1.7")]
        assert reply.addresses == (reachable, *guesses)
        assert reply.names_others
        # One that a relay carries to needs nobody else.
        circuit = PeerAddress.of("45.1.1.1", 4600, own.peer_id, via=other.peer_id)
        discovery.extra_addresses.append(lambda: [circuit])
        reply = swarm.invite(InviteRequest())
        assert (reply.addresses, reply.names_others) == ((str(circuit),), False)


def test_an_invite_to_loopback_is_said_to_be_local() -> None:
    reply = view([address("127.0.0.1")]).invite(InviteRequest())
    assert "works on this machine only" in " ".join(warnings(reply, now=NOW))


def test_the_secret_is_in_no_repr() -> None:
    reply = view([address("8.8.8.8")], key=KEY).invite(InviteRequest())
    assert reply.has_key
    assert reply.invite not in repr(reply)
    ways = (reply.invite,)
    for settings in (
        NodeConfig("tiny", peers=ways),
        DiscoveryConfig((), ways, mdns=False, serve=False),
        Visit(ways, None, (), False, Path(), False, KEY),
    ):
        assert SECRET_PREFIX not in repr(settings)


def test_of_several_nodes_the_one_that_can_be_dialled_invites() -> None:
    replies = [
        InviteReply("a", "public", problem="none"),
        InviteReply("b", "public", "fusion1b", is_local=True),
        InviteReply("c", "public", "fusion1c", is_unconfirmed=True),
        InviteReply("d", "public", "fusion1d", names_others=True),
        InviteReply("e", "public", "fusion1e"),
    ]
    assert [best_of(replies[: count + 1]).peer for count in range(5)] == ["a", "b", "c", "d", "e"]


def read_by_a_camera(drawn: str) -> str:
    """What a reader makes of the picture that a terminal shows: each character cell is twice as high as wide."""
    light = {"█": (1, 1), "▀": (1, 0), "▄": (0, 1), " ": (0, 0)}
    lines = drawn.splitlines()
    rows = [[light[character][half] for character in line] for line in lines for half in (0, 1)]
    picture = np.kron(np.array(rows, dtype=np.uint8) * 255, np.ones((4, 4), dtype=np.uint8))
    (found,) = zxingcpp.read_barcodes(picture, zxingcpp.BarcodeFormat.QRCode)
    text: str = found.text
    return text


@pytest.mark.parametrize("num_addresses", [1, 2, 4])
@pytest.mark.parametrize("key", [None, KEY])
def test_the_code_is_read_back_from_a_terminal_of_80_columns(num_addresses: int, key: SwarmKey | None) -> None:
    addresses = [address(f"203.0.113.{number}") for number in range(num_addresses)]
    text = view(addresses, key=key).invite(InviteRequest(7 * 86_400.0)).invite
    drawn, _ = qr_code(text, columns=80)
    assert max(map(len, drawn.splitlines())) <= 80
    assert read_by_a_camera(drawn) == text


def test_a_code_that_does_not_fit_is_not_drawn() -> None:
    drawn, why_not = qr_code("fusion1" + "a" * 500, columns=80)
    assert drawn == ""
    assert "the terminal has 80" in why_not


def test_a_code_is_drawn_when_asked_for_and_the_reason_told_when_it_cannot_be(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(home, view([address("203.0.113.7")])):
        wide = run(home, "--qr")
        monkeypatch.setenv("COLUMNS", "40")
        narrow = run(home, "--qr")
    text, _, drawn = wide.stdout.partition("\n")
    assert read_by_a_camera(drawn) == text
    assert narrow.stdout.splitlines() == [text]
    assert "no QR code" in narrow.stderr
