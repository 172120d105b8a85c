"""Light nodes: processes with the network half of a node, real sockets and real libp2p, but no torch and no model.

Importing libp2p takes two seconds of CPU. So one process, the nursery, imports it once and is forked for every node,
before it has any thread. A node can be put into a network namespace, and is told what to do over a socket.

This side is what tests use; the other one is tests/nat/light_node.py.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from tests.live.swarm_process import wait_until
from tests.nat.internet import REPOSITORY, Host, Router

IMPORT_S = 60.0
START_S = 30.0
KNOWN_S = 30.0
"""Until a node's record with an address that can be dialled is at another one."""

DIRECT_S = 30.0
ANSWER_S = 40.0
"""Longer than anything a node does when it is asked: it says itself when it gives up."""


@dataclass(eq=False)
class LightNode:
    """One process. What it can be asked is in tests/nat/light_node.py."""

    name: str
    process: psutil.Process
    talk: socket.socket
    log_path: Path
    host: Host | None = None
    peer: str = ""
    addresses: list[str] = field(default_factory=list)
    """Multiaddrs that it listens on, each with the peer id."""
    _received: bytes = b""

    def ask(self, what: str, *, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Has the node do something, and returns what it says.

        Raises:
            NodeError: the node reports one of the product's errors.
        """
        self.begin(what, **arguments)
        return self.result(within_s=within_s)

    def begin(self, what: str, **arguments: Any) -> None:
        """As ``ask``, without waiting: the answer is taken by ``result``, in the same order."""
        self.talk.sendall(json.dumps({"do": what, **arguments}).encode() + b"\n")

    def result(self, *, within_s: float = ANSWER_S) -> Any:
        self.talk.settimeout(within_s)
        while b"\n" not in self._received:
            try:
                chunk = self.talk.recv(1 << 16)
            except TimeoutError:
                raise AssertionError(
                    f"node {self.name} gave no answer in {within_s:.0f} s; {self.last_words}"
                ) from None
            if not chunk:
                raise AssertionError(f"node {self.name} is gone; {self.last_words}")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise NodeError(answer["error"], answer["message"])
        return answer["result"]

    @property
    def last_words(self) -> str:
        return f"the end of its log:\n{self.log_path.read_text(errors='replace')[-3000:]}"

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.ask("status"))

    @property
    def known_peers(self) -> set[str]:
        """Of whom it holds a live record."""
        return set(self.ask("known"))

    def link(self, peer: LightNode) -> dict[str, Any] | None:
        """Its link with another node, as its pool tells; None without one."""
        return next((link for link in self.status["links"] if link["peer"] == peer.peer), None)

    def path_to(self, peer: LightNode) -> str | None:
        """The kind of the path that it sends to another node on; None without a link."""
        link = self.link(peer)
        return None if link is None else str(link["path"])

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)  # psutil sees to it that no other process with this id gets it

    def kill(self) -> None:
        """As kill -9; returns when it is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.signal(signal.SIGKILL)
        wait_until(lambda: not self.process.is_running(), within_s=10.0, what=f"{self.name} is gone")
        self.talk.close()


class NodeError(Exception):
    """What a node reported; ``kind`` is the name of the product's error class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Nursery:
    """The process that nodes are forked from."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nat.light_node", str(theirs.fileno())],
                cwd=REPOSITORY,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._socket.settimeout(IMPORT_S)
        self._is_ready = False
        self._num_started = 0
        self.nodes: list[LightNode] = []

    def start(
        self, name: str, *, host: Host | None = None, peers: Sequence[LightNode | str] = (), **options: Any
    ) -> LightNode:
        """Starts a node and waits until it listens. ``options`` are those of light_node.Options."""
        node = self.start_soon(name, host=host, peers=peers, **options)
        self.wait_started(node)
        return node

    def start_soon(
        self, name: str, *, host: Host | None = None, peers: Sequence[LightNode | str] = (), **options: Any
    ) -> LightNode:
        """As ``start``, without waiting for it to listen: several can begin together."""
        if not self._is_ready:
            assert self._socket.recv(64) == b"ready", (self._folder / "nursery.log").read_text()
            self._is_ready = True
        self._num_started += 1
        log_path = self._folder / f"{self._num_started}-{name}.log"
        ours, theirs = socket.socketpair()
        bootstrap = [peer if isinstance(peer, str) else peer.addresses[0] for peer in peers]
        request = {"namespace": host.namespace if host else None, "options": {"bootstrap": bootstrap, **options}}
        with theirs, log_path.open("wb") as log:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs.fileno(), log.fileno()])
        process = psutil.Process(int(self._socket.recv(64)))
        node = LightNode(name, process, ours, log_path, host)
        self.nodes.append(node)
        return node

    def wait_started(self, node: LightNode) -> None:
        told = node.result(within_s=START_S)
        node.peer, node.addresses = told["peer"], told["addresses"]

    def end_nodes(self) -> None:
        """Kills the nodes and keeps the nursery."""
        for node in self.nodes:
            node.kill()
        self.nodes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_nodes()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def connect(user: LightNode, node: LightNode) -> None:
    """Waits until the node has told the swarm where it can be reached, and makes a link with it."""

    def can_be_reached() -> bool:
        record = user.ask("record", peer=node.peer)
        return record is not None and bool(record["data"] or record["libp2p"])

    began = time.monotonic()
    wait_until(can_be_reached, within_s=KNOWN_S, what=f"{user.name} knows an address of {node.name}")
    print(f"\nan address of {node.name} known after {time.monotonic() - began:.2f} s")
    began = time.monotonic()
    user.ask("connect", peer=node.peer)
    said = user.ask("converse", peer=node.peer, seconds=0.2)
    assert said["in_order"]
    print(f"link and first answers after {time.monotonic() - began:.2f} s, path {user.path_to(node)}")


def start_pair(
    nodes: Nursery, theirs: Router, ours: Router, entrances: list[LightNode], *, user_serves: bool = False
) -> tuple[LightNode, LightNode]:
    """A node behind one router, and a user behind another one, who has its record and has said something to it."""
    node = nodes.start("node", host=theirs.host("node"), peers=entrances)
    user = nodes.start("user", host=ours.host("user"), peers=entrances, serve=user_serves)
    connect(user, node)
    return node, user


def wait_for_path(user: LightNode, node: LightNode, path: str, within_s: float = DIRECT_S) -> float:
    began = time.monotonic()
    wait_until(lambda: user.path_to(node) == path, within_s=within_s, what=f"the path is {path}")
    return time.monotonic() - began


def round_trip_ms(user: LightNode, node: LightNode) -> float:
    return 1000 * float(user.ask("round_trip", peer=node.peer, count=9))
