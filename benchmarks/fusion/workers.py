"""The processes of ``benchmarks.fusion.exchange``: one member each, of ours or of torch.distributed with gloo.

``python -m benchmarks.fusion.workers KIND RANK SIZE WIDTHS [PORT]`` says a line when it listens, takes a line with what
all of them have said, and then a command ``ROWS LAYERS`` a line. One layer more is passed first, which is not timed: in
it all members come together, and sums are checked. The answer is the seconds of the others, and whether all sums were
right. WIDTHS are values per row: exchanges separated by ``/``, their owners by ``,``.

Contributions are made beforehand; each of a member's is one number in all places, so that any sum can be checked. What
is timed is from contributions to sums, exchange by exchange, each after the one before, as a layer needs them.

Ours is what a member does with its contributions but for computing: made into a message, sealed, carried over a
WebSocket, opened, read, checked for values that are not finite, at both ends, and added up in the order of members.
Masked it is the same in words, with the streams of all pairs, and a look at the bounds of what is sent and of the sum.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fusion.exchange import DIMS, MASKED, OURS
from fusion_node.engine.masked_sums import MaskedSums, encode_words
from fusion_node.engine.tensor_codec import decode_partials, encode_partials
from fusion_node.mask_keys import mask_keys
from fusion_node.slices import exchanges, split
from fusion_node.types import PeerId
from p2p.identity import Identity
from p2p.links import LinkPool
from p2p.messages import AnyMessage, Partials, PartialsEntry
from p2p.websocket import WebSocketNetwork

ALIAS = 0x12345678
"""Of a session; as large as most."""

FIRST_NODE = 300
"""Of the rows; that of the middle of a long prompt."""


class Contributions:
    """What one member contributes, and what sums are."""

    def __init__(self, rank: int, size: int, widths: Sequence[Sequence[int]], rows: int) -> None:
        self.parts = [[torch.full((rows, width), float(rank + 1)) for width in by_owner] for by_owner in widths]
        self.total = size * (size + 1) / 2

    def is_sum(self, sums: torch.Tensor) -> bool:
        return bool((sums == self.total).all())


class Plain:
    """Contributions as they are."""

    def outgoing(self, parts: Sequence[torch.Tensor], layer: int, exchange: int) -> Sequence[Any]:
        """What goes to each member."""
        return parts

    def payload(self, part: Any) -> memoryview:
        return encode_partials([part])

    def total(self, parts: Sequence[Any], own: int, rows: int, exchange: int) -> torch.Tensor:
        tensors = [part if rank == own else decode_partials(part, rows) for rank, part in enumerate(parts)]
        sums = tensors[0] + tensors[1]
        for tensor in tensors[2:]:
            sums += tensor
        return sums


class Masked(Plain):
    """Contributions under masks that cancel."""

    def __init__(self, rank: int, size: int) -> None:
        keys = mask_keys(bytes(32), session=bytes(16), epoch=0, opening=0, stage=0, num_members=size, member=rank)
        self._exchanges = exchanges(DIMS)
        self._sums = MaskedSums(DIMS, split(DIMS, (1,) * size), rank, keys=keys, epoch=0)

    def outgoing(self, parts: Sequence[torch.Tensor], layer: int, exchange: int) -> Sequence[Any]:
        place = self._exchanges[exchange]
        return self._sums.contributions(parts, node=FIRST_NODE, layer=layer, exchange=place)

    def payload(self, part: Any) -> memoryview:
        return encode_words([part])

    def total(self, parts: Sequence[Any], own: int, rows: int, exchange: int) -> torch.Tensor:
        return self._sums.total(parts, rows, self._exchanges[exchange])


class Ours:
    """A member over the links of nodes."""

    def __init__(self, rank: int, size: int, widths: Sequence[Sequence[int]], form: Plain) -> None:
        self._rank, self._size, self._widths, self._form = rank, size, widths, form
        self._identity = Identity.generate()
        self._pool = LinkPool(
            WebSocketNetwork(self._identity),
            self._identity.peer_id,
            on_frame=self._take,
            on_closed=lambda peer, error: sys.exit(f"a link was lost: {error}"),
        )
        self._peers: list[PeerId] = []
        self._rank_of: dict[PeerId, int] = {}
        self._got: dict[int, list[Any]] = {}
        """By exchanges counted from the first one, contributions by member: others are one ahead at most."""
        self._at = self._start = self._stop = self._rows = 0
        self._mine = Contributions(rank, size, widths, 1)
        self._is_right = True
        self._began = 0.0
        self._done: asyncio.Future[None] | None = None

    async def listen(self) -> str:
        return await self._pool.listen("127.0.0.1:0")

    async def connect(self, addresses: Sequence[str]) -> None:
        """Each dials those behind it, and says who it is in the order of the members."""
        for rank, address in enumerate(addresses):
            if rank > self._rank:
                await self._pool.identify(address)
        while len(self._pool.links()) < self._size - 1:  # noqa: ASYNC110 - once, before anything is timed
            await asyncio.sleep(0.01)

    @property
    def peer(self) -> str:
        return self._identity.peer_id

    def meet(self, peers: Sequence[str]) -> None:
        """Who the members are, in order."""
        self._peers = [PeerId(peer) for peer in peers]
        self._rank_of = {peer: rank for rank, peer in enumerate(self._peers)}

    async def run(self, rows: int, layers: int) -> tuple[float, bool]:
        if rows != self._rows:
            self._mine, self._rows = Contributions(self._rank, self._size, self._widths, rows), rows
        self._start, self._is_right = self._at, True
        self._stop = self._start + (layers + 1) * len(self._widths)
        self._done = asyncio.get_running_loop().create_future()
        self._contribute()
        self._go_on()
        await self._done
        return time.perf_counter() - self._began, self._is_right

    def _contribute(self) -> None:
        layer, exchange = divmod(self._at - self._start, len(self._widths))
        parts = self._form.outgoing(self._mine.parts[exchange], layer, exchange)
        for rank, peer in enumerate(self._peers):
            if rank != self._rank:
                payload = self._form.payload(parts[rank])
                entries = (PartialsEntry(ALIAS, FIRST_NODE, self._rows),)
                self._pool.send(peer, Partials(layer, exchange, entries), payload)
        self._place(self._at)[self._rank] = parts[self._rank]

    def _place(self, at: int) -> list[Any]:
        return self._got.setdefault(at, [None] * self._size)

    def _take(self, peer: PeerId, message: AnyMessage, payload: memoryview) -> None:
        if not isinstance(message, Partials):
            return
        rank = self._rank_of[peer]
        at = self._at if self._place(self._at)[rank] is None else self._at + 1
        self._place(at)[rank] = bytearray(payload)  # the view ends with this call
        if self._done is not None:
            self._go_on()

    def _go_on(self) -> None:
        # By identity: arrays compare themselves with None at length.
        while self._at < self._stop and not any(part is None for part in self._place(self._at)):
            parts = self._place(self._at)
            del self._got[self._at]
            exchange = (self._at - self._start) % len(self._widths)
            sums = self._form.total(parts, self._rank, self._rows, exchange)
            if self._at - self._start < len(self._widths):
                self._is_right &= self._mine.is_sum(sums)
                self._began = time.perf_counter()
            self._at += 1
            if self._at < self._stop:
                self._contribute()
            elif self._done is not None:
                self._done.set_result(None)
                self._done = None


async def serve_ours(rank: int, size: int, widths: Sequence[Sequence[int]], form: Plain) -> None:
    """Until there are no more commands."""
    member = Ours(rank, size, widths, form)
    loop = asyncio.get_running_loop()
    _say({"address": await member.listen(), "peer": member.peer})
    others = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    member.meet([each["peer"] for each in others])
    await member.connect([each["address"] for each in others])
    _say({"ready": True})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        rows, layers = map(int, line.split())
        seconds, is_right = await member.run(rows, layers)
        _say({"seconds": seconds, "is_right": is_right})


Scatter = Callable[[list[torch.Tensor]], torch.Tensor]


def scatter_of(kind: str, rank: int, size: int) -> Scatter:
    """Parts for each member to the sum of those for this one.

    ``gloo`` is reduce_scatter itself; ``gloo-all-to-all`` moves contributions with all_to_all_single, as few bytes as
    ours, and adds them up here in the order of members.
    """

    def reduce_scatter(parts: list[torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(parts[rank])
        dist.reduce_scatter(out, parts)
        return out

    def all_to_all(parts: list[torch.Tensor]) -> torch.Tensor:
        sizes = [part.numel() for part in parts]
        got = torch.empty(size * sizes[rank])
        dist.all_to_all_single(got, torch.cat([part.view(-1) for part in parts]), [sizes[rank]] * size, sizes)
        by_member = got.view(size, *parts[rank].shape)
        sums = by_member[0] + by_member[1]
        for each in by_member[2:]:
            sums += each
        return sums

    return reduce_scatter if kind == "gloo" else all_to_all


def serve_gloo(kind: str, rank: int, size: int, widths: Sequence[Sequence[int]], port: int) -> None:
    """Until there are no more commands."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _say({"address": "", "peer": ""})
    sys.stdin.readline()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    scatter = scatter_of(kind, rank, size)
    _say({"ready": True})
    while line := sys.stdin.readline():
        rows, layers = map(int, line.split())
        mine, is_right = Contributions(rank, size, widths, rows), True
        for parts in mine.parts:
            is_right &= mine.is_sum(scatter(parts))
        began = time.perf_counter()
        for _ in range(layers):
            for parts in mine.parts:
                scatter(parts)
        _say({"seconds": time.perf_counter() - began, "is_right": is_right})
    dist.destroy_process_group()


def _say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def main(arguments: Sequence[str]) -> None:
    """One process."""
    torch.set_num_threads(1)
    kind, rank, size = arguments[0], int(arguments[1]), int(arguments[2])
    widths = [[int(width) for width in by_owner.split(",")] for by_owner in arguments[3].split("/")]
    if kind in (OURS, MASKED):
        form = Masked(rank, size) if kind == MASKED else Plain()
        asyncio.run(serve_ours(rank, size, widths, form))
    else:
        serve_gloo(kind, rank, size, widths, int(arguments[4]))


if __name__ == "__main__":
    main(sys.argv[1:])
