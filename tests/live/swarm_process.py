"""Real `fusion-node join` processes on this machine: started, watched through their logs, hurt, never left behind.

They are forked from one that has imported everything (tests.live.forks), but for those that are told to be fresh.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.live.forks import Fork, die_with_parent
from tests.nat.internet import join_namespace

MODEL = "smollm2-135m"
READY_S = 90.0
"""A node is ready in 5 s on an idle core; three at once on two busy ones take several times that."""

STOP_S = 20.0
POLL_S = 0.05

CLI = (sys.executable, "-m", "fusion_node.cli.main")


def wait_until(condition: Callable[[], bool], *, within_s: float, what: str) -> None:
    """Polls a condition of the outside world until it holds, or fails the test."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s:.0f} s")
        time.sleep(POLL_S)


def environment(home: Path) -> dict[str, str]:
    """Ours, with the test store, and without a proxy between processes of one machine."""
    return {**os.environ, "FUSION_HOME": str(home), "PYTHONWARNINGS": "default", "FUSION_DEBUG": ""}


def run_cli(
    *arguments: str, home: Path, stdin: str = "", timeout_s: float = 90.0, namespace: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end, in a network namespace if one is named."""
    with tempfile.TemporaryDirectory() as name:
        given, out, err = (Path(name) / each for each in ("in", "out", "err"))
        given.write_text(stdin)
        before = functools.partial(join_namespace, namespace) if namespace else None
        process = Fork(arguments, environment=environment(home), stdin=given, stdout=out, stderr=err, before=before)
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())


def fork_of(arguments: Sequence[str], *, home: Path, folder: Path, before: Callable[[], None] | None = None) -> Fork:
    """The process of a node whose log is in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    out, log = folder / "stdout", folder / "log"
    return Fork(arguments, environment=environment(home), stdout=out, stderr=log, before=before)


def join_arguments(layers: str, *, folder: Path, peers: Sequence[str], options: Sequence[str]) -> list[str]:
    """Of ``fusion-node``, for a node of a test."""
    arguments = [
        "join", MODEL, *(("--layers", layers) if layers else ()), "--log-format", "json", "--verbose", "--no-mdns",
        "--threads", "1", "--identity", str(folder / "identity.key"), *options,
    ]  # fmt: skip
    for peer in peers:
        arguments += ["--peer", peer]
    return arguments


@dataclass
class NodeProcess:
    """One node process and its log."""

    layers: str
    folder: Path
    process: subprocess.Popen[bytes] | Fork
    ready: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        layers: str,
        *,
        folder: Path,
        home: Path,
        peers: Sequence[str] = (),
        options: Sequence[str] = (),
        namespace: str = "",
        fresh: bool = False,
    ) -> NodeProcess:
        """
        Args:
            namespace: of the network, for a node that is not fresh.
            fresh: in an interpreter of its own, which has to import everything, as a user's has.
        """
        arguments = join_arguments(layers, folder=folder, peers=peers, options=options)
        if not fresh:
            before = functools.partial(join_namespace, namespace) if namespace else None
            return cls(layers, folder, fork_of(arguments, home=home, folder=folder, before=before))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "stdout").open("wb") as out, (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*CLI, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=environment(home),
                preexec_fn=die_with_parent,
            )
        return cls(layers, folder, process)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def identity_seed(self) -> bytes:
        return (self.folder / "identity.key").read_bytes()[4:]

    @property
    def peer(self) -> str:
        return str(self.ready["peer"])

    @property
    def addresses(self) -> list[str]:
        return list(self.ready["addresses"])

    @property
    def data_address(self) -> str:
        return str(self.ready["data"][0])

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines whose event is ``name``."""
        found = []
        for line in self.log.splitlines():
            if line.startswith("{") and line.endswith("}"):
                entry = json.loads(line)
                if entry.get("event") == name:
                    found.append(entry)
        return found

    def wait_ready(self) -> NodeProcess:
        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"node {self.layers} ended with {self.process.returncode}:\n{self.log[-2000:]}")
            found = self.events("ready")
            self.ready = found[0] if found else {}
            return bool(found)

        wait_until(is_ready, within_s=READY_S, what=f"node {self.layers} is ready")
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float) -> int:
        return self.process.wait(within_s)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Whatever state it is in, it is gone afterwards."""
        if self.is_running:
            self.process.kill()  # a frozen process dies of this too
        self.process.wait(STOP_S)


class Nodes:
    """The nodes of one swarm, in the order of their layers; all but the first know one address only."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self.folder = folder
        self.all: list[NodeProcess] = []
        self.current: list[NodeProcess] = []

    def start(self, *ranges: str, options: Sequence[str] = ()) -> None:
        """Starts a new swarm."""
        first = self._start(ranges[0], (), options)
        self.current = [first.wait_ready()]
        # Together: most of a start is importing, and there are two cores.
        others = [self._start(layers, first.addresses[:1], options) for layers in ranges[1:]]
        self.current += [node.wait_ready() for node in others]

    def restore(self) -> None:
        """Replaces every node that is gone by a new one with the same layers."""
        alive = [node for node in self.current if node.is_running]
        for index, node in enumerate(self.current):
            if not node.is_running:
                self.current[index] = self._start(node.layers, alive[0].addresses[:1], ())
        for node in self.current:
            if not node.ready:
                node.wait_ready()

    def add(self, layers: str) -> NodeProcess:
        """One more node beside those that there are."""
        return self.begin(layers).wait_ready()

    def begin(self, layers: str, *, options: Sequence[str] = ()) -> NodeProcess:
        """One more node, which is not ready yet; without layers, it chooses them."""
        return self._start(layers, self.current[0].addresses[:1], options)

    @property
    def addresses(self) -> list[str]:
        return [address for node in self.current for address in node.addresses]

    def _start(self, layers: str, peers: Sequence[str], options: Sequence[str]) -> NodeProcess:
        folder = self.folder / f"node{len(self.all)}"
        node = NodeProcess.start(layers, folder=folder, home=self.home, peers=peers, options=options)
        self.all.append(node)
        return node

    def end(self) -> None:
        for node in self.all:
            node.end()


@contextmanager
def node_processes(home: Path, folder: Path) -> Iterator[Nodes]:
    """Nodes that are gone when the block is left."""
    nodes = Nodes(home, folder)
    try:
        yield nodes
    finally:
        nodes.end()
