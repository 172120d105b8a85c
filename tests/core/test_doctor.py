"""`fusion-node doctor` where a node runs: it is asked, its report is judged, and the exit status says how bad it is."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from fusion_node.cli.doctor import Examined, doctor
from fusion_node.daemon.control import control_socket
from fusion_node.daemon.network_report import NetworkReport
from fusion_node.errors import ConfigError, PeerError, ProblemsFound
from tests.core.test_control_socket import PEERS, Node
from tests.core.test_diagnosis_core import BEHIND_NAT, HEALTHY


class Reporting(Node):
    """A node with a given report."""

    def __init__(self, report: NetworkReport | None) -> None:
        super().__init__(PEERS[0])
        self._report = report
        self.is_measured = False

    async def network(self, *, measure: bool) -> NetworkReport | None:
        self.is_measured |= measure
        return self._report


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("COLUMNS", "160")
        yield Path(folder)


@contextmanager
def running(home: Path, node: Node) -> Iterator[None]:
    """The node's control socket, answered in another thread, as by another process."""
    loop, stop, is_up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with control_socket(home / "run", node.peer, node):
            is_up.set()
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_up.wait(10.0)
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def run_doctor(home: Path, *arguments: str) -> tuple[str, BaseException | None]:
    app = typer.Typer()
    app.command()(doctor)
    done = CliRunner().invoke(app, ["--home", str(home), *arguments])
    return done.stdout, done.exception


def test_a_healthy_node_is_said_to_be_well(home: Path) -> None:
    node = Reporting(HEALTHY)
    with running(home, node):
        output, error = run_doctor(home)
    assert error is None
    assert "0 warnings, 0 problems, 0 unknown" in output
    assert node.is_measured


def test_warnings_are_shown_with_what_to_do_and_are_no_failure(home: Path) -> None:
    node = Reporting(BEHIND_NAT)
    with running(home, node):
        output, error = run_doctor(home, "--no-bandwidth")
    assert error is None
    assert "→ forward TCP ports 4600 and 4601" in output
    assert not node.is_measured


def test_a_problem_has_its_own_exit_status_and_is_named(home: Path) -> None:
    lost = msgspec.structs.replace(HEALTHY, num_peers=0)
    with running(home, Reporting(lost)):
        output, error = run_doctor(home)
    assert isinstance(error, ProblemsFound)
    assert error.exit_code == 14
    assert "no peer is connected" in str(error)
    assert "no peer is connected" in output


def test_json_holds_the_whole_report_and_the_findings(home: Path) -> None:
    with running(home, Reporting(BEHIND_NAT)):
        output, _ = run_doctor(home, "--json")
    (examined,) = msgspec.json.decode(output, type=list[Examined])
    assert examined.report == BEHIND_NAT
    assert {finding.check for finding in examined.findings} >= {"listening", "clock", "relay", "bandwidth"}


def test_a_node_that_still_starts_is_not_taken_for_none(home: Path) -> None:
    with running(home, Reporting(None)):
        _, error = run_doctor(home)
    assert isinstance(error, PeerError)
    assert "still starting" in str(error)


@pytest.mark.parametrize("arguments", [("--announce", "node.example.org:65535"), ("--listen", "127.0.0.1:65535")])
def test_a_port_that_join_would_refuse_is_refused(home: Path, arguments: tuple[str, ...]) -> None:
    _, error = run_doctor(home, *arguments)
    assert isinstance(error, ConfigError)
    assert "leaves no port for the data plane" in str(error)
