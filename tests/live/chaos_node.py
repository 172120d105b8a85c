"""A node that serves honestly until it is told to answer with garbage. A launcher for tests; the product knows nothing.

It is ``fusion-node join`` in a process whose links spoil what it sends as a file with orders says: ``KIND SEQUENCE``,
where from the entry of a session's log with that sequence on all rows are spoilt, to the next stage or to the user.
While there is no such file, nothing is changed. It is read before each row is sent, so what it says holds from the next
on.

Processes are forked from one that has imported everything: importing is most of what a node does until it serves, and a
swarm for a test has six.

And a node with ``--announce`` announces nothing else: where it listens itself, nobody is to find it, or links that a
test cuts at a proxy would be made again around it.
"""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TypeVar

import msgspec
import multiaddr
import structlog

from fusion_node.types import PeerId
from p2p.connection import Connection, Payload, route
from p2p.libp2p_adapter import hardening
from p2p.links import LinkPool
from p2p.messages import DTYPE_BYTES, AnyMessage, Step, StepResult, TensorMeta
from p2p.reachability import Reachability
from p2p.reachability_verdict import Address, Source
from tests.live.swarm_process import die_with_parent, environment

Rows = TypeVar("Rows", Step, StepResult)


class Garbage(enum.StrEnum):
    """What comes instead of the rows."""

    NAN = "nan"
    """As many rows as should be, not one a number."""
    SHAPE = "shape"
    """Rows of another size than the model's."""
    SEQUENCE = "sequence"
    """The right rows, of an entry that is not due."""
    ROWS = "rows"
    """One row more than the entry has, and its own as they should be."""
    NO_FRAME = "no-frame"
    """Bytes that are no message at all."""
    SILENCE = "silence"
    """Nothing. The node lives, answers pings and queries, and hands no rows on."""


log = structlog.get_logger(__name__)


class Spoiler:
    """Stands in front of LinkPool.send.

    Args:
        orders: the file.
    """

    def __init__(self, orders: Path) -> None:
        self._orders = orders
        self._send = LinkPool.send

    def install(self) -> None:
        """From now on, for all link pools of this process."""
        spoiler = self

        def send(pool: LinkPool, peer: PeerId, message: AnyMessage, payload: Payload = b"") -> None:
            spoiler.send(pool, peer, message, payload)

        LinkPool.send = send  # type: ignore[method-assign]

    def send(self, pool: LinkPool, peer: PeerId, message: AnyMessage, payload: Payload) -> None:
        """As LinkPool.send, unless it is time for garbage."""
        kind = self._due(message.sequence) if isinstance(message, Step | StepResult) else None
        if kind is None or not isinstance(message, Step | StepResult):
            self._send(pool, peer, message, payload)
            return
        log.info("garbage", kind=kind.value, sequence=message.sequence, epoch=message.epoch)
        match kind:
            case Garbage.SILENCE:
                return
            case Garbage.NO_FRAME:
                connection: Connection = pool._connections[peer]
                lane, key = route(message, payload)
                connection.transfer.queue(lane, key, b"\xff" * 64, b"")
                connection.pump()
            case _:
                self._send(pool, peer, *_spoil(kind, message, payload))

    def _due(self, sequence: int) -> Garbage | None:
        try:
            kind, since = self._orders.read_text().split()
        except OSError:
            return None
        return Garbage(kind) if sequence >= int(since) else None


def _spoil(kind: Garbage, message: Rows, payload: Payload) -> tuple[Rows, Payload]:
    tensor = message.tensor
    if kind is Garbage.SEQUENCE:
        return msgspec.structs.replace(message, sequence=message.sequence + 5), payload
    num_rows = tensor.num_rows + (kind is Garbage.ROWS)
    size = tensor.row_size - 32 * (kind is Garbage.SHAPE)
    plain = TensorMeta(tensor.dtype, num_rows, size)
    if kind is Garbage.NAN and tensor.dtype in DTYPE_BYTES:
        rows: bytes = {4: struct.pack("<f", float("nan")), 2: b"\xff\x7f"}[DTYPE_BYTES[tensor.dtype]]
        rows *= num_rows * size
    elif kind is Garbage.NAN:
        rows = b"\xff" * plain.num_bytes  # the scale of each block as well
    elif kind is Garbage.ROWS and not tensor.codec:
        rows = bytes(payload) + bytes(payload[: len(payload) // max(1, tensor.num_rows)])
    else:
        rows = bytes(plain.num_bytes)
    if isinstance(message, StepResult):
        nodes = (*message.nodes, *range(2**31, 2**31 + num_rows - len(message.nodes)))
        return msgspec.structs.replace(message, tensor=plain, nodes=nodes), rows
    return msgspec.structs.replace(message, tensor=plain), rows


def announce_only_what_the_operator_says() -> None:
    """See the head of this file."""
    candidates = Reachability._candidates

    def by_operator(reachability: Reachability) -> Iterator[tuple[Address, Source]]:
        found = list(candidates(reachability))
        told = [each for each in found if each[1] is Source.OPERATOR]
        yield from told or found

    Reachability._candidates = by_operator  # type: ignore[method-assign]


def advertise_only(announced: Sequence[str]) -> None:
    """libp2p's identify tells peers nothing else either: they would have a way around the proxies."""
    told = [multiaddr.Multiaddr("/ip4/{}/tcp/{}".format(*each.rsplit(":", 1))) for each in announced]
    hardening._advertised = lambda candidates: list(told)


def serve(orders: Path, arguments: Sequence[str], home: Path, folder: Path) -> None:
    """Runs ``fusion-node`` with these arguments in this process, which is its own: see ``NodeFork``."""
    # With this end of its pipe in our hands, the server of forks would outlive the test run, and we that server.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    die_with_parent()
    os.environ.update(environment(home))
    sys.stdout.flush()
    for name, number in (("stdout", 1), ("log", 2)):
        with (folder / name).open("ab", buffering=0) as file:
            os.dup2(file.fileno(), number)
    Spoiler(orders).install()
    announce_only_what_the_operator_says()
    announced = [arguments[index + 1] for index, each in enumerate(arguments) if each == "--announce"]
    if announced:
        advertise_only(announced)
    sys.argv = ["fusion-node", *arguments]
    from fusion_node.cli.main import main

    main()


class NodeFork:
    """A process that ``serve`` runs in, with what NodeProcess uses of subprocess.Popen."""

    def __init__(self, orders: Path, arguments: Sequence[str], home: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log").touch()
        self._process = _FORKS.Process(target=serve, args=(orders, arguments, home, folder), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fusion-node", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "fusion_node.cli.main",
        "fusion_node.cli.join",
        "fusion_node.daemon.node",
        "fusion_node.daemon.serving_node",
        "p2p.libp2p_adapter",
        "transformers.models.llama.modeling_llama",
        "tests.live.chaos_node",
    ]
)
