"""Real node processes on this machine, for the demonstration: started, watched, and always ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusion_node.errors import NodeFailed
from fusion_node.types import LayerRange
from p2p.link_emulation_core import LineShape

START_TIMEOUT_S = 120.0
"""A cold disk cache and one slow core; a warm start takes a few seconds."""

STOP_TIMEOUT_S = 8.0


@dataclass(slots=True)
class LocalNode:
    """One node process and what its log has told so far."""

    name: str
    layers: LayerRange
    process: asyncio.subprocess.Process
    slice: str = ""
    state: str = "starting"
    peer: str = ""
    addresses: tuple[str, ...] = ()
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    last_words: deque[str] = field(default_factory=lambda: deque(maxlen=5))

    def take(self, line: str) -> None:
        """Reads one line of the node's log."""
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            self.last_words.append(line.strip())
            return
        match event:
            case {"event": "listening", "peer": str(peer), "addresses": [*addresses]}:
                self.state, self.peer, self.addresses = "listening", peer, tuple(map(str, addresses))
                self.listening.set()
            case {"event": "loading"}:
                self.state = "loading layers"
            case {"event": "ready"}:
                self.state = "serving"
                self.ready.set()
            case {"event": "leaving"}:
                self.state = "leaving"
            case {"event": str(what), "level": "error" | "warning"}:
                self.last_words.append(what)


class LocalSwarm:
    """Node processes that know one another only through the first one's address. Use ``async with``.

    Args:
        folder: for their keys.
        threads: of each.
        line: that each of them emulates (p2p.link_emulation); None: none.
        is_audited: each keeps an audit log in the folder, as ``NAME.audit``.
    """

    def __init__(
        self,
        model: str,
        *,
        folder: Path,
        home: Path | None,
        threads: int,
        numerics: str,
        line: LineShape | None = None,
        is_audited: bool = False,
    ) -> None:
        self._model = model
        self._folder = folder
        self._home = home
        self._threads = threads
        self._numerics = numerics
        self._line = line
        self._is_audited = is_audited
        self._readers: list[asyncio.Task[None]] = []
        self.nodes: list[LocalNode] = []

    async def __aenter__(self) -> LocalSwarm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, ranges: list[LayerRange], *, slices: Sequence[str] = (), is_in_turn: bool = False) -> None:
        """Starts one process per range and returns when all listen; they go on to load.

        Args:
            slices: of the last ones, which hold no more of their layers (``--slice``).
            is_in_turn: each serves before the next one starts, so that none measures its speed while others begin.
        """
        texts = [""] * (len(ranges) - len(slices)) + list(slices)
        for number, (layers, text) in enumerate(zip(ranges, texts, strict=True), start=1):
            peer = self.nodes[0].addresses[0] if self.nodes else None
            node = await self._spawn(f"node {number}", layers, text, peer=peer)
            if number == 1 or is_in_turn:
                await self._wait(node, node.ready if is_in_turn else node.listening)
        await asyncio.gather(*(self._wait(node, node.listening) for node in self.nodes))

    async def wait_ready(self) -> None:
        """Returns when every node serves.

        Raises:
            NodeFailed: one ended instead.
        """
        await asyncio.gather(*(self._wait(node, node.ready) for node in self.nodes))

    async def stop(self) -> None:
        """Asks every node to leave, waits, and kills what is still there."""
        alive = [node for node in self.nodes if node.process.returncode is None]
        for node in alive:
            with contextlib.suppress(ProcessLookupError):
                node.process.terminate()
        if alive:
            await asyncio.wait([asyncio.ensure_future(n.process.wait()) for n in alive], timeout=STOP_TIMEOUT_S)
        for node in alive:
            if node.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    node.process.kill()
                await node.process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _spawn(self, name: str, layers: LayerRange, slice_: str, *, peer: str | None) -> LocalNode:
        key, log = (self._folder / f"{name.replace(' ', '-')}.{kind}" for kind in ("key", "audit"))
        command: list[str] = [
            sys.executable, "-m", "fusion_node.cli.main", "join", self._model,
            "--layers", str(layers), "--identity", str(key), "--threads", str(self._threads),
            "--numerics", self._numerics, "--listen", "127.0.0.1:0", "--no-mdns", "--log-format", "json",
        ]  # fmt: skip
        command += ["--until-stdin-ends"]
        command += ["--slice", slice_] if slice_ else []
        command += ["--audit-log", str(log)] if self._is_audited else []
        command += ["--peer", peer] if peer else []
        command += ["--home", str(self._home)] if self._home else []
        command += emulation_options(self._line)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,  # ends with us, and the node with it
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        node = LocalNode(name, layers, process, slice_)
        self.nodes.append(node)
        self._readers.append(asyncio.ensure_future(self._read(node)))
        return node

    async def _read(self, node: LocalNode) -> None:
        stderr = node.process.stderr
        while stderr is not None and (line := await stderr.readline()):
            node.take(line.decode(errors="replace"))
        await node.process.wait()
        node.state = f"ended ({node.process.returncode})"

    async def _wait(self, node: LocalNode, event: asyncio.Event) -> None:
        ended, happened = asyncio.ensure_future(node.process.wait()), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((ended, happened), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if event.is_set():
                return
            words = " / ".join(node.last_words) or "it said nothing"
            what = "ended" if ended.done() else f"was not ready within {START_TIMEOUT_S:.0f} s"
            raise NodeFailed(f"{node.name} {what}: {words}")
        finally:
            ended.cancel()
            happened.cancel()


def emulation_options(line: LineShape | None) -> list[str]:
    """Those that tell a node, or a user, to emulate this line."""
    if line is None:
        return []
    rate = [] if line.rate_Mbps is None else ["--emulate-rate", str(line.rate_Mbps)]
    return ["--emulate-rtt", str(line.rtt_ms), "--emulate-jitter", str(line.jitter_ms), *rate]


def split_evenly(num_layers: int, num_nodes: int) -> list[LayerRange]:
    """Contiguous ranges that differ by at most one layer."""
    edges = [num_layers * index // num_nodes for index in range(num_nodes + 1)]
    return [LayerRange(start, stop) for start, stop in itertools.pairwise(edges)]


def describe_nodes(nodes: list[LocalNode]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [
        {
            "name": n.name,
            "pid": n.process.pid,
            "peer": n.peer,
            "layers": str(n.layers),
            "slice": n.slice,
            "state": n.state,
        }
        for n in nodes
    ]
