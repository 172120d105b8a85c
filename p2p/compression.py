"""Compresses the tensors that are sent where that pays: the shell around p2p.compression_core.

The choice, and what is measured, belong to the event loop; the work may be done on any thread.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from fusion_node.types import PeerId
from p2p.compression_core import LEVELS, CompressionCore, Kind, Measured
from p2p.messages import MAX_EXPANSION, MAX_PAYLOAD_BYTES, ZSTD, TensorMeta
from p2p.tensor_wire import Buffer, compress, decompress

FEATURE = "zstd"
"""What a peer announces that takes tensors with the codec ``zs1``."""

LARGE_BYTES = 1024 * 1024
"""Tensors above this are not to be compressed, decompressed or decoded on an event loop, which would stand still for
longer than the milliseconds that 1 MiB takes: 0.7 to 2.4 to compress, by encoding, 0.2 to 5 to decode."""

SAMPLE_BYTES = 64 * 1024
"""Of a tensor, for a trial: 0.5 ms for both levels, and the ratio is within 2 % of that of a megabyte."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as it is to be sent.

    Attributes:
        measured: what compressing it has cost.
    """

    tensor: TensorMeta
    payload: Buffer
    kind: Kind
    level: int
    measured: Measured


@dataclass(frozen=True, slots=True)
class Packing:
    """A tensor that is to be compressed, see ``Compressor.choose``."""

    tensor: TensorMeta
    payload: Buffer
    kind: Kind
    level: int
    is_large: bool
    """Not work for an event loop."""

    def run(self) -> Packed:
        """Compresses it, on any thread. It goes as it is where it does not shrink, or shrinks more than is allowed."""
        began = time.perf_counter()
        stored = compress(self.payload, self.tensor.dtype, level=self.level)
        measured = Measured(len(self.payload), len(stored), time.perf_counter() - began)
        if not len(stored) < len(self.payload) <= MAX_EXPANSION * len(stored):
            return Packed(self.tensor, self.payload, self.kind, self.level, measured)
        tensor = msgspec.structs.replace(self.tensor, codec=ZSTD)
        return Packed(tensor, stored, self.kind, self.level, measured)


class Compressor:
    """Decides for every tensor of one process.

    Args:
        rate_Bps: what the link with a peer delivers in bytes per second; None when that is not known.
        features: what a peer has announced; nothing is compressed for one that has not announced FEATURE.
        limit_Bps: what this process lets itself send at most, on all links together; None for no limit.
        clock: monotonic seconds.
        large_bytes: size of the tensors, before compression, above which they are no work for an event loop.
    """

    def __init__(
        self,
        *,
        rate_Bps: Callable[[PeerId], float | None],
        features: Callable[[PeerId], Collection[str]],
        limit_Bps: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        self._rate_Bps = rate_Bps
        self._features = features
        self._limit_Bps = limit_Bps
        self._clock = clock
        self._large_bytes = large_bytes
        self._core = CompressionCore(random.Random())  # noqa: S311 - spreads trials, guards nothing
        self.counters: Counter[str] = Counter()

    def choose(self, peer: PeerId, tensor: TensorMeta, payload: Buffer) -> Packing | None:
        """How to compress a tensor that goes to ``peer``; None to send it as it is.

        The caller runs what it gets and hands the result to ``note``. A trial that is due is made here, on
        SAMPLE_BYTES.
        """
        if FEATURE not in self._features(peer) or len(payload) > MAX_PAYLOAD_BYTES:
            return None  # what does not fit into a frame as it is, no peer takes compressed
        now = self._clock()
        # Under a limit of our own a link never shows how fast it is.
        rates = [rate for rate in (self._rate_Bps(peer), self._limit_Bps) if rate is not None]
        choice = self._core.choose(peer, tensor.dtype, len(payload), rate_Bps=min(rates, default=None), now=now)
        if choice.is_trial_due:
            self._try(choice.kind, tensor, payload, now)
        if choice.level is None:
            return None
        return Packing(tensor, payload, choice.kind, choice.level, len(payload) > self._large_bytes)

    def is_large(self, tensor: TensorMeta) -> bool:
        """Whether decoding a tensor that has come is no work for an event loop, be it compressed or not.

        Checking 32 MiB of f32 takes 50 to 140 ms, and 31.5 MiB of i8b32 150 to 220 ms.
        """
        return tensor.num_bytes > self._large_bytes

    def note(self, packed: Packed) -> None:
        """Learns from what has been compressed."""
        self._core.note_compressed(packed.kind, packed.level, packed.measured)
        self.counters["tensors"] += 1
        self.counters["bytes_before"] += packed.measured.raw_bytes
        self.counters["bytes_after"] += len(packed.payload)

    def report(self) -> dict[str, float]:
        """How many tensors were compressed, from how many bytes to how many, and how many trials were made."""
        names = ("tensors", "bytes_before", "bytes_after", "trials")
        return {f"compression.{name}": float(self.counters[name]) for name in names}

    def forget(self, peer: PeerId) -> None:
        """The link with this peer is gone."""
        self._core.forget(peer)

    def _try(self, kind: Kind, tensor: TensorMeta, payload: Buffer, now: float) -> None:
        row_bytes = tensor.num_bytes // tensor.num_rows
        num_rows = min(tensor.num_rows, max(1, SAMPLE_BYTES // row_bytes))
        sample = msgspec.structs.replace(tensor, num_rows=num_rows)
        piece = memoryview(payload)[: num_rows * row_bytes]
        measured = {}
        for level in LEVELS:
            began = time.perf_counter()
            stored = compress(piece, tensor.dtype, level=level)
            between = time.perf_counter()
            decompress(stored, sample)
            measured[level] = Measured(len(piece), len(stored), between - began, time.perf_counter() - between)
        self._core.note_trial(kind, measured, now=now)
        self.counters["trials"] += 1


__all__ = ["FEATURE", "LARGE_BYTES", "Compressor", "Packed", "Packing"]
