"""``fusion-node peers``: what a node knows of others, with the ages of the facts."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fusion_node.cli.main import app
from fusion_node.cli.peers import age, picture, size
from fusion_node.daemon.control import Phase
from fusion_node.daemon.swarm_report import ConnectionView, PeersReply, PeerView
from fusion_node.daemon.swarm_view import SwarmView
from fusion_node.errors import PeerError
from fusion_node.types import PeerId, UnixS
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION, NodeRecord, ShardRecord
from tests.core.test_control_socket import PEERS, Node
from tests.core.test_doctor import running

NOW = 1_800_000_000.0
US, ANNA, BERT, CLEO, DORA = (Identity.from_seed(bytes([number]) * 32).peer_id for number in range(5))

DATA = ConnectionView("data", "direct", "203.0.113.7:4601", 310.0, 21.4, 0.4, True, 123_456, 7_890_123)
CONTROL = ConnectionView("control", "relayed", "203.0.113.9:4600", 45.0, heard_s=18.0, we_dialled=False)


def record(peer: PeerId, *, age_s: float, operator: str = "") -> NodeRecord:
    return NodeRecord(
        version=PROTOCOL_VERSION,
        peer=peer,
        sequence=1,
        issued_at=UnixS(NOW - age_s),
        expires_at=UnixS(NOW - age_s + 60.0),
        data_addresses=(),
        libp2p_addresses=(),
        device="cpu",
        memory_free_bytes=1,
        shards=(ShardRecord("ab" * 32, "tiny", 0, 10, 30, "fp32", (0.001, 0.001, 0.001), 4096),),
        num_sessions=0,
        operator=operator,
        software="test",
    )


async def reply() -> PeersReply:
    """A node with a link to Anna, a relayed one to the silent Bert, and hearsay of Cleo and of Dora, who is banned."""

    async def control() -> list[tuple[PeerId, ConnectionView]]:
        silent = msgspec.structs.replace(CONTROL, is_suspect=True)
        return [(BERT, silent), (ANNA, msgspec.structs.replace(CONTROL, path="stream"))]

    async def data() -> list[tuple[PeerId, ConnectionView]]:
        return [(ANNA, DATA)]

    view = SwarmView(
        US,
        swarm_key=None,
        addresses=lambda: (),
        announced=lambda: (),
        records=lambda: [record(ANNA, age_s=7.0, operator="anna"), record(CLEO, age_s=58.0), record(US, age_s=1.0)],
        connections=[control, data],
        standing_of=lambda peer: "banned" if peer == DORA else "",
        met_at=lambda: [(ANNA, NOW - 3.0), (DORA, NOW - 3 * 86_400.0)],
        clock=lambda: NOW,
    )
    return await view.peers()


async def test_peers_are_put_together_from_connections_records_and_the_book() -> None:
    told = {peer.peer: peer for peer in (await reply()).peers}
    assert set(told) == {ANNA, BERT, CLEO, DORA}
    assert [connection.plane for connection in told[ANNA].connections] == ["control", "data"]
    assert (told[ANNA].operator, told[ANNA].record_age_s, told[ANNA].record_left_s) == ("anna", 7.0, 53.0)
    assert (told[BERT].standing, told[BERT].record_age_s, told[BERT].met_s) == ("suspect", None, None)
    assert (told[CLEO].connections, told[CLEO].serves, told[CLEO].record_age_s) == ((), ("tiny 0:10",), 58.0)
    assert (told[DORA].standing, told[DORA].met_s) == ("banned", 3 * 86_400.0)


async def test_connected_peers_come_first() -> None:
    assert [bool(peer.connections) for peer in (await reply()).peers] == [True, True, False, False]


def printed(renderable: object, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


async def test_the_picture_shows_who_dialled_over_what_and_when_it_was_heard() -> None:
    lines = printed(picture(await reply())).splitlines()
    assert lines[0] == f"…{US[-8:]}: 2 connected, 2 only known"
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "data direct → 203.0.113.7:4601 21.4 5 min 0 s 123 kB/7.9 MB" in text
    assert "control relayed ← 203.0.113.9:4600 – 45 s 18 s –" in text
    assert f"…{ANNA[-8:]} anna tiny 0:10 7 s 3 s" in text
    assert f"…{BERT[-8:]} – – – suspect" in text
    assert f"…{CLEO[-8:]} tiny 0:10 58 s – not connected" in text
    assert f"…{DORA[-8:]} – – 3 d banned" in text


async def test_the_picture_fits_eighty_columns() -> None:
    text = printed(picture(await reply()), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "203.0.113.7:4601" in text


def test_what_peers_say_is_shown_as_text() -> None:
    hostile = PeerView(ANNA, "[red]\x1b[31mboo", ("\x07bell",), (DATA,))
    told = PeersReply(US, "0123456789abcdef", (hostile, msgspec.structs.replace(hostile, connections=())))
    text = printed(picture(told), width=200)
    assert "private swarm 0123456789abcdef" in text
    assert "[red]?[31mboo" in text
    assert "?bell" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (119.9, "119 s"), (120.0, "2 min"), (7199.0, "119 min"), (7200.0, "2 h"), (200_000.0, "2 d")],
)
def test_ages_are_rounded_down(seconds: float, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (12_345, "12 kB"), (7_890_123, "7.9 MB"), (5 * 10**15, "5000 TB")],
)
def test_sizes_have_two_or_three_digits(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run_peers(home: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["peers", "--home", str(home), *arguments])


def test_a_node_that_still_starts_is_a_failure_and_does_not_hide_the_others(home: Path) -> None:
    with running(home, Node(PEERS[0], Phase.STARTING)):
        alone = run_peers(home, "--json")
        with running(home, Node(PEERS[1])):
            both = run_peers(home, "--json")
    for result in (alone, both):
        assert isinstance(result.exception, PeerError)
        assert "still starting" in str(result.exception)
    assert msgspec.json.decode(alone.stdout) == []
    assert [reply["peer"] for reply in msgspec.json.decode(both.stdout)] == [PEERS[1]]
