"""`fusion-node doctor` in homes with different routers: it says what is so, and what to do."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.forks import Fork
from tests.live.swarm_process import environment
from tests.nat.internet import Host, Internet, Ports, join_namespace
from tests.nat.light_nodes import LightNode, Nursery

pytestmark = pytest.mark.live

NUM_PEERS = 4
DOCTOR_S = 90.0


@pytest.fixture
def peers(internet: Internet, nodes: Nursery) -> list[LightNode]:
    """Public nodes; the first relays."""
    first = nodes.start("peer0", host=internet.host("peer0"), relay=True)
    others = [
        nodes.start(f"peer{index}", host=internet.host(f"peer{index}"), peers=[first]) for index in range(1, NUM_PEERS)
    ]
    return [first, *others]


class Doctor:
    """One run of it, on one host."""

    def __init__(self, host: Host, folder: Path, *arguments: str) -> None:
        self._files = (folder / f"{host.namespace}.out", folder / f"{host.namespace}.err")
        self._process = Fork(
            ("doctor", "--json", "--no-mdns", *arguments),
            environment=environment(folder / host.namespace),
            stdout=self._files[0],
            stderr=self._files[1],
            before=functools.partial(join_namespace, host.namespace),
        )

    def __enter__(self) -> Doctor:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def findings(self) -> tuple[int, dict[str, Any], list[dict[str, str]]]:
        """Waits for its end. Exit status, report, and findings."""
        status = self._process.wait(DOCTOR_S)
        output, errors = (path.read_text() for path in self._files)
        assert output, errors
        (examined,) = json.loads(output)
        for finding in examined["findings"]:
            print(f"{finding['level']:8} {finding['check']:14} {finding['what']}  {finding['fix']}")
        print(f"exit status {status}: {errors}")
        return status, examined["report"], examined["findings"]


def of(findings: list[dict[str, str]], check: str) -> list[str]:
    return [finding["level"] for finding in findings if finding["check"] == check]


def test_doctor_tells_a_public_machine_from_one_behind_a_router(
    internet: Internet, peers: list[LightNode], tmp_path: Path
) -> None:
    options = ("--listen", "0.0.0.0:4600", "--peer", peers[0].addresses[0])
    hosts = [internet.host("public"), internet.router("r", ports=Ports.RANDOM).host("home")]
    # Together: most of it is waiting.
    with Doctor(hosts[0], tmp_path, *options) as public, Doctor(hosts[1], tmp_path, *options) as home:
        status, report, findings = public.findings()
        home_status, home_report, home_findings = home.findings()

    assert status == 0
    assert report["overall"] == "public"
    assert set(of(findings, "dialability")) == {"ok"}
    assert of(findings, "bootstrap") == ["ok"]
    assert of(findings, "clock") == ["ok"]
    assert of(findings, "bandwidth") == ["ok", "ok"]

    assert home_report["overall"] == "behind-nat"
    assert home_report["nat"] == "endpoint-dependent"
    assert of(home_findings, "nat") == ["warning"]
    assert of(home_findings, "relay") == ["warning"]
    assert home_report["relays"][0]["peer"] == peers[0].peer
    assert home_status == 0, "it can be reached"


@pytest.mark.slow
def test_doctor_names_a_bootstrap_peer_that_is_gone_and_fails(
    internet: Internet, nodes: Nursery, tmp_path: Path
) -> None:
    gone = nodes.start("gone", host=internet.host("gone"))
    gone.kill()
    with Doctor(internet.host("me"), tmp_path, "--peer", gone.addresses[0]) as doctor:
        status, _, findings = doctor.findings()
    assert status == 14
    assert of(findings, "bootstrap") == ["problem"]
    assert of(findings, "peers") == ["problem"]
