"""What people get wrong: each is told in one line on standard error, with the exit status of docs/exit-codes.md."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from fusion_node.errors import ProtocolVersionMismatch
from fusion_node.store import StoredModel
from p2p.identity import Identity
from p2p.records import PROTOCOL_VERSION
from p2p.websocket import WebSocketNetwork
from tests.live.swarm_process import MODEL, NodeProcess, node_processes, run_cli, wait_until

pytestmark = pytest.mark.live

QUIET = ("--no-mdns", "--threads", "1")


def refusal(done: subprocess.CompletedProcess[str], status: int) -> str:
    """The one line that the command ended with; log lines may stand before it."""
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not re.match(r"\{|\d\d:\d\d:\d\d \[", line)]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def join(home: Path, tmp_path: Path, *arguments: str, model: str = MODEL) -> subprocess.CompletedProcess[str]:
    identity = ("--identity", str(tmp_path / "identity.key"))
    return run_cli("join", model, "--log-format", "json", *QUIET, *identity, *arguments, home=home)


@pytest.fixture(scope="module")
def first_third(
    test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    """A swarm of one node, which serves a third of the model."""
    with node_processes(test_home, tmp_path_factory.mktemp("third")) as nodes:
        nodes.start("0:10")
        yield nodes.current[0]


@pytest.fixture(scope="module")
def small_node(
    test_home: Path, builtin_model: StoredModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NodeProcess]:
    """A swarm of one node, which serves the whole model with a mebibyte of KV."""
    with node_processes(test_home, tmp_path_factory.mktemp("small")) as nodes:
        nodes.start("0:30", options=("--kv-memory", "1"))
        yield nodes.current[0]


# joining


@pytest.mark.usefixtures("builtin_model")
@pytest.mark.parametrize(
    ("model", "arguments", "status", "says"),
    [
        ("no-such-model", (), 3, "no-such-model"),
        (MODEL, ("--layers", "20:31"), 4, r"20:31 lies outside the model, which has 30 layers"),
        (MODEL, ("--layers", "10:10"), 4, "START must be below STOP"),
        (MODEL, ("--layers", "ten"), 4, "write START:STOP"),
        (MODEL, ("--layers", "0:1", "--listen", "nowhere"), 2, "HOST:PORT"),
        (MODEL, ("--layers", "0:1", "--listen", "203.0.113.7:0"), 2, "cannot listen"),
        (MODEL, ("--layers", "0:1", "--listen", "127.0.0.1:65535"), 2, "leaves no port"),
        (MODEL, ("--layers", "0:1", "--announce", "0.0.0.0:4600"), 2, "others can dial"),
        (MODEL, ("--layers", "0:1", "--peer", "/ip4/127.0.0.1"), 2, "not a peer address"),
        (MODEL, ("--layers", "0:1", "--numerics", "int3"), 2, "choose one of"),
        (MODEL, ("--layers", "0:1", "--device", "abacus"), 2, "abacus"),
    ],
)
def test_join_refuses_what_it_cannot_do(
    test_home: Path, tmp_path: Path, model: str, arguments: tuple[str, ...], status: int, says: str
) -> None:
    assert re.search(says, refusal(join(test_home, tmp_path, *arguments, model=model), status))


@pytest.mark.usefixtures("builtin_model")
def test_join_refuses_a_port_in_use(test_home: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refusal(join(test_home, tmp_path, "--layers", "0:1", "--listen", address), 5)
    assert address in line


@pytest.mark.usefixtures("builtin_model")
def test_join_refuses_a_data_port_in_use(test_home: Path, tmp_path: Path) -> None:
    """The data plane takes the port behind the one that is named; that one may be taken, too."""
    while True:
        with socket.socket() as taken, socket.socket() as free:
            taken.bind(("127.0.0.1", 0))
            port = int(taken.getsockname()[1])
            try:
                free.bind(("127.0.0.1", port - 1))
            except OSError:
                continue
            free.close()
            taken.listen()
            done = join(test_home, tmp_path, "--layers", "0:1", "--listen", f"127.0.0.1:{port - 1}")
            break
    assert str(port) in refusal(done, 5)


def test_join_refuses_an_identity_that_another_node_runs_with(
    test_home: Path, tmp_path: Path, small_node: NodeProcess
) -> None:
    identity = small_node.folder / "identity.key"
    line = refusal(join(test_home, tmp_path, "--layers", "0:1", "--identity", str(identity)), 2)
    assert "--identity" in line
    assert small_node.is_running


@pytest.mark.usefixtures("builtin_model")
def test_join_refuses_an_identity_that_others_can_read(test_home: Path, tmp_path: Path) -> None:
    identity = tmp_path / "identity.key"
    Identity.load_or_create(identity)
    identity.chmod(0o644)
    assert "chmod 600" in refusal(join(test_home, tmp_path, "--layers", "0:1"), 2)


# asking


@pytest.mark.usefixtures("builtin_model")
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("no-such-model", "Hello"), 3, "no-such-model"),
        ((MODEL, "Hello"), 6, "--peer"),
        ((MODEL, "Hello", "--peer", "/ip4/127.0.0.1/tcp/9/p2p/nobody"), 2, "peer id"),
        ((MODEL, "Hello", "--temperature", "-1"), 2, "temperature"),
    ],
)
def test_generate_refuses_what_it_cannot_do(
    test_home: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    assert says in refusal(run_cli("generate", *arguments, *QUIET, home=test_home), status)


Refusals = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def patient(test_home: Path, first_third: NodeProcess, small_node: NodeProcess) -> Iterator[Refusals]:
    """What says no only when somebody could have come for ten seconds or twenty, begun together."""
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    questions = {
        "no peer": (nobody, "16"),
        "no layers": (first_third.addresses[0], "16"),
        "no room": (small_node.addresses[0], "100"),
    }
    with ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(
                run_cli, "generate", MODEL, "Hello", "--max-tokens", size, "--peer", peer, *QUIET, home=test_home
            )
            for name, (peer, size) in questions.items()
        }


def test_generate_says_that_no_peer_answered(patient: Refusals) -> None:
    assert "no peer answered" in refusal(patient["no peer"].result(), 6)


def test_generate_says_which_layers_nobody_serves(patient: Refusals) -> None:
    line = refusal(patient["no layers"].result(), 7)
    assert "layers 10:30 of" in line
    assert "fusion-node join" in line


def test_generate_says_that_the_kv_memory_of_the_nodes_is_too_small(
    test_home: Path, small_node: NodeProcess, patient: Refusals
) -> None:
    line = refusal(patient["no room"].result(), 7)
    assert re.search(r"layers 0:30 are held without room for \d+ positions: ask for fewer tokens", line)
    # What fits is served, so the advice is right.
    peer = ("--peer", small_node.addresses[0], *QUIET)
    done = run_cli("generate", MODEL, "Hi", "--raw", "--max-tokens", "8", *peer, home=test_home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_generate_refuses_a_prompt_longer_than_the_context(test_home: Path, first_third: NodeProcess) -> None:
    long = "word " * 9000
    line = refusal(
        run_cli("generate", MODEL, "-", "--peer", first_third.addresses[0], *QUIET, home=test_home, stdin=long), 8
    )
    assert "8192" in line
    assert "word word" not in line


async def test_peer_of_another_version_is_told_so_and_the_node_says_it_too(small_node: NodeProcess) -> None:
    network = WebSocketNetwork(Identity.generate(), version=PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolVersionMismatch) as error:
        await network.dial(small_node.data_address, expect=None, timeout_s=10.0)
    assert error.value.exit_code == 26
    assert "version" in str(error.value)
    wait_until(
        lambda: any("version" in entry["why"] for entry in small_node.events("handshake refused")),
        within_s=5.0,
        what="the node logs the refusal",
    )
