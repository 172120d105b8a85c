"""A node that serves honestly until it is told to answer with garbage. A launcher for tests; the product knows nothing.

It is ``fusion-node join`` in a process (tests.live.forks) whose links spoil what it sends as a file with orders says:
``KIND SEQUENCE``, where from the entry of a session's log with that sequence on all rows are spoilt, to the next stage
or to the user. While there is no such file, nothing is changed. It is read before each row is sent, so what it says
holds from the next on.

And a node with ``--announce`` announces nothing else: where it listens itself, nobody is to find it, or links that a
test cuts at a proxy would be made again around it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
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


def become_chaotic(orders: Path, announced: Sequence[str]) -> None:
    """In the process of a node, before it begins: from now on it is one of these."""
    Spoiler(orders).install()
    announce_only_what_the_operator_says()
    if announced:
        advertise_only(announced)
