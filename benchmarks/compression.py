"""What Zstandard gains on rows of hidden state, and what int8 costs: on real activations of the built-in model.

The rows are those that travel when three nodes serve ten layers each: embeddings to the first, hidden state to the
second and the third, and back. Each is measured in every encoding, as a prefill chunk and as one decoded row, in three
forms: ``plain`` bytes, byte planes in one stream (``planes``), and ``zs1``, in which each plane ends its block. Speeds
are of bytes before compression, medians. The *break-even* is the bandwidth below which compressing saves time, the time
of both ends counted: saved bytes / (seconds to compress + seconds to decompress).

What int8 costs is measured in the logits of every position of the texts, with rows rounded at each of the four hops.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.numerics import CPU, MODEL, TEXTS, prefilled
from benchmarks.report import Check, main
from fusion_node.client.tokenizer import Tokenizer
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.stage import Stage
from fusion_node.engine.tensor_codec import decode_rows, encode_rows
from fusion_node.store import ModelStore
from fusion_node.types import LayerRange, PeerId
from p2p.compression import FEATURE, Compressor
from p2p.messages import DTYPE_BYTES, INT8, ZSTD, TensorMeta
from p2p.tensor_wire import compress, decompress

DTYPES = (*DTYPE_BYTES, INT8)
CUTS = (0, 10, 20, 30)
HOPS = ("user → 0:10", "0:10 → 10:20", "10:20 → 20:30", "20:30 → user")
PREFILL_ROWS = 256
"""The largest chunk that a client sends."""

LEVEL = 1

MIN_PREFILL_RATIO = {"f32": 1.15, "f16": 1.12, "bf16": 1.35, INT8: 1.05}
MIN_BREAK_EVEN_MBIT = 50.0
"""A fast home uplink: slower ones are what compression is for."""

MIN_INT8_AGREEMENT = 0.97


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. Speeds in MB/s (10^6 bytes before compression), the break-even in Mbit/s, 0 without a gain."""

    hop: str
    dtype: str
    kind: str
    form: str
    num_bytes: int
    ratio: float
    compress_MBps: float
    decompress_MBps: float
    break_even_Mbit: float


def compression_rows(activations: Sequence[torch.Tensor], *, quick: bool) -> list[Row]:
    """Measures every hop, encoding, kind and form.

    Args:
        activations: per hop the rows that travel, ``[T, D]``.
        quick: fewer repetitions.
    """
    rows = []
    for hop, rows_TD in zip(HOPS, activations, strict=True):
        for dtype in DTYPES:
            for kind, num_rows in (("prefill", PREFILL_ROWS), ("decode", 1)):
                samples = _samples(rows_TD, dtype, num_rows, num_samples=(1 if num_rows > 1 else 8))
                rows += [_measure(hop, dtype, kind, form, samples, 5 if quick else 25) for form in _FORMS]
    return rows


def _samples(rows_TD: torch.Tensor, dtype: str, num_rows: int, num_samples: int) -> list[tuple[TensorMeta, memoryview]]:
    starts = np.linspace(0, len(rows_TD) - num_rows, num_samples).astype(int)
    return [encode_rows(rows_TD[start : start + num_rows], dtype) for start in starts]


def _measure(
    hop: str, dtype: str, kind: str, form: str, samples: Sequence[tuple[TensorMeta, memoryview]], repeats: int
) -> Row:
    pack, unpack = _FORMS[form]
    raw = stored = 0
    packing, unpacking = [], []
    for meta, payload in samples:
        packed = pack(payload, dtype)
        raw, stored = raw + len(payload), stored + len(packed)
        for _ in range(repeats):
            began = time.perf_counter()
            pack(payload, dtype)
            between = time.perf_counter()
            unpack(packed, meta)
            packing.append((between - began) / len(payload))
            unpacking.append((time.perf_counter() - between) / len(payload))
    compress_s, decompress_s = statistics.median(packing), statistics.median(unpacking)
    saved = max(0.0, 1 - stored / raw)
    break_even_Bps = saved / (compress_s + decompress_s)
    return Row(
        hop, dtype, kind, form, len(samples[0][1]), raw / stored, 1e-6 / compress_s, 1e-6 / decompress_s,
        8e-6 * break_even_Bps,
    )  # fmt: skip


def _in_one_stream(payload: memoryview, dtype: str) -> bytes:
    planes = np.frombuffer(payload, dtype=np.uint8).reshape(-1, DTYPE_BYTES.get(dtype, 1)).T
    return _COMPRESSOR.compress(np.ascontiguousarray(planes))


def _unpack_zs1(stored: bytes, meta: TensorMeta) -> object:
    return decompress(stored, TensorMeta(meta.dtype, meta.num_rows, meta.row_size, ZSTD))


_COMPRESSOR = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
_DECOMPRESSOR = zstandard.ZstdDecompressor()
_FORMS: dict[str, tuple[Callable[[memoryview, str], bytes], Callable[[bytes, TensorMeta], object]]] = {
    "plain": (
        lambda payload, dtype: _COMPRESSOR.compress(payload),
        lambda stored, meta: _DECOMPRESSOR.decompress(stored),
    ),
    "planes": (_in_one_stream, _unpack_zs1),
    "zs1": (lambda payload, dtype: compress(payload, dtype, level=LEVEL), _unpack_zs1),
}


RATES_MBIT = (1, 10, 25, 50, 100, 1000, 10_000)
"""From a thin uplink to a network card on its own bus: loopback is faster than the last."""

NUM_CHOICES = 8
"""Tensors of a kind that are offered before the choice is looked at."""


def choices(activations: Sequence[torch.Tensor]) -> dict[str, dict[str, list[int]]]:
    """At which rates (Mbit/s) a node would compress what it passes on, by kind and encoding."""
    chosen: dict[str, dict[str, list[int]]] = {"prefill": {}, "decode": {}}
    for kind, num_rows in (("prefill", PREFILL_ROWS), ("decode", 1)):
        for dtype in DTYPES:
            samples = _samples(activations[1], dtype, num_rows, NUM_CHOICES)
            chosen[kind][dtype] = [rate for rate in RATES_MBIT if _would_compress(samples, rate * 125_000.0)]
    return chosen


def _would_compress(samples: Sequence[tuple[TensorMeta, memoryview]], rate_Bps: float) -> bool:
    clock = itertools.count(0.0, 60.0)  # long enough apart for a trial each time
    compressor = Compressor(rate_Bps=lambda peer: rate_Bps, features=lambda peer: {FEATURE}, clock=clock.__next__)
    peer, packing = PeerId("peer"), None
    for meta, payload in samples:
        packing = compressor.choose(peer, meta, payload)
    return packing is not None


Logits: TypeAlias = npt.NDArray[np.float32]
Rounding: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Rows as they leave to rows as they arrive."""


def _through(dtype: str) -> Rounding:
    return lambda rows_TD: decode_rows(*encode_rows(rows_TD, dtype)).float()


def _in_blocks(block: int | None) -> Rounding:
    """As ``i8b32``, but with blocks of another size, or with one scale per row: for comparison."""

    def rounded(rows_TD: torch.Tensor) -> torch.Tensor:
        blocks = rows_TD.unflatten(-1, (-1, block or rows_TD.shape[-1]))
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        upper = (scale.contiguous().view(torch.int32) + 0xFFFF) & -0x10000  # bfloat16, rounded up
        scale = upper.view(torch.float32).clamp(min=2.0**-126)
        return ((blocks / scale).round() * scale).flatten(-2)

    return rounded


EXACT = "f32"
ROUNDINGS: dict[str, Rounding] = {
    "f16": _through("f16"),
    "bf16": _through("bf16"),
    INT8: _through(INT8),
    "int8 in blocks of 16": _in_blocks(16),
    "int8 in blocks of 64": _in_blocks(64),
    "int8, one scale per row": _in_blocks(None),
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What rounding rows at every hop does to the logits of all positions, against float32.

    Attributes:
        rounding: one of ROUNDINGS.
        agreement: share of positions whose best token is the same.
        divergence_nats: mean Kullback-Leibler divergence of the next token's distribution.
        logit_error: median over positions of the error's norm in that of the centred logits.
    """

    rounding: str
    num_positions: int
    agreement: float
    divergence_nats: float
    logit_error: float


class Pipeline:
    """The built-in model in three stages of ten layers, computed in float32."""

    def __init__(self, texts: Sequence[str]) -> None:
        model, numerics = ModelStore().find(MODEL), numerics_class("fp32")
        tokenizer = Tokenizer(model.path)
        self.boundary = Boundary.load(model, numerics=numerics, device=CPU)
        self.stages = [
            Stage.load(model, LayerRange(start, start + 10), numerics=numerics, device=CPU) for start in CUTS[:-1]
        ]
        self.ids = [tokenizer.encode(text) for text in texts]

    def travelling_rows(self, rounded: Rounding) -> Iterator[list[torch.Tensor]]:
        """Per hop the rows of each text as they arrive, each stage having computed with those before."""
        rows = [rounded(self.boundary.embed(ids)) for ids in self.ids]
        yield rows
        for stage in self.stages:
            rows = [rounded(rows_TD) for rows_TD in prefilled(stage, rows)]
            yield rows

    def logits(self, rounded: Rounding) -> Logits:
        """Of all positions of all texts, ``[T, V]``."""
        *_, last = self.travelling_rows(rounded)
        return np.concatenate([np.asarray(self.boundary.logits(rows_TD), dtype=np.float32) for rows_TD in last])


def accuracy(pipeline: Pipeline, roundings: Sequence[str]) -> list[Accuracy]:
    """Of each rounding, against float32."""
    exact = pipeline.logits(_through(EXACT))
    return [_compare(name, pipeline.logits(ROUNDINGS[name]), exact) for name in roundings]


def _compare(rounding: str, ours: Logits, exact: Logits) -> Accuracy:
    agree, divergence, error = [], [], []
    for start in range(0, len(exact), 64):  # in float64, all of them at once would take gigabytes
        p, q = (logits[start : start + 64].astype(np.float64) for logits in (exact, ours))
        agree.append(p.argmax(axis=1) == q.argmax(axis=1))
        log_p, log_q = (t - np.logaddexp.reduce(t, axis=1, keepdims=True) for t in (p, q))
        divergence.append((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
        centred, off = (t - t.mean(axis=1, keepdims=True) for t in (p, q - p))
        error.append(np.linalg.norm(off, axis=1) / np.linalg.norm(centred, axis=1))
    return Accuracy(
        rounding=rounding,
        num_positions=len(exact),
        agreement=float(np.concatenate(agree).mean()),
        divergence_nats=float(np.concatenate(divergence).mean()),
        logit_error=float(np.median(np.concatenate(error))),
    )


def run(quick: bool) -> tuple[list[Check], dict[str, Any]]:
    """Measures; see the head of this file."""
    torch.set_num_threads(2)
    pipeline = Pipeline(TEXTS)
    activations = [torch.cat(rows) for rows in pipeline.travelling_rows(_through(EXACT))]
    rows = compression_rows(activations, quick=quick)
    chosen = choices(activations)
    pipeline.ids = pipeline.ids[:2] if quick else pipeline.ids
    losses = accuracy(pipeline, (INT8,) if quick else tuple(ROUNDINGS))
    _print(rows, chosen, losses)
    between = {(row.dtype, row.kind): row for row in rows if row.hop == HOPS[1] and row.form == "zs1"}
    checks = [
        Check(f"ratio-{dtype}", f"{dtype}: ratio of a prefill chunk between stages",
              between[dtype, "prefill"].ratio, "x", target, ">=")
        for dtype, target in MIN_PREFILL_RATIO.items()
    ] + [
        Check(f"break-even-{dtype}", f"{dtype}: bandwidth below which compressing a prefill chunk pays",
              between[dtype, "prefill"].break_even_Mbit, "Mbit/s", MIN_BREAK_EVEN_MBIT, ">=")
        for dtype in DTYPES
    ] + [
        Check("off-on-fast-links", "encodings and kinds that are compressed at 10 Gbit/s",
              sum(RATES_MBIT[-1] in rates for kinds in chosen.values() for rates in kinds.values()), "", 0, "=="),
        Check("on-on-slow-links", "encodings of which prefill chunks are compressed at 10 Mbit/s, of 4",
              sum(10 in rates for rates in chosen["prefill"].values()), "", 4, "=="),
        Check("int8-agreement", "int8 at four hops: positions whose best token is that of float32",
              next(loss.agreement for loss in losses if loss.rounding == INT8), "", MIN_INT8_AGREEMENT, ">="),
    ]  # fmt: skip
    return checks, {
        "rows": [asdict(row) for row in rows],
        "compressed_at_Mbit": chosen,
        "accuracy": [asdict(loss) for loss in losses],
    }


def _print(rows: Sequence[Row], chosen: Mapping[str, Mapping[str, Sequence[int]]], losses: Sequence[Accuracy]) -> None:
    print(
        f"{'hop':15}{'encoding':10}{'kind':9}{'form':8}{'bytes':>7}{'ratio':>8}{'MB/s':>7}{'back':>7}{'pays below':>12}"
    )
    for row in rows:
        print(
            f"{row.hop:15}{row.dtype:10}{row.kind:9}{row.form:8}{row.num_bytes:7}{row.ratio:8.3f}{row.compress_MBps:7.0f}"
            f"{row.decompress_MBps:7.0f}{row.break_even_Mbit:7.0f} Mb/s"
        )
    for kind, encodings in chosen.items():
        for dtype, rates in encodings.items():
            print(f"{kind} in {dtype}: compressed at {', '.join(map(str, rates)) or 'none'} of {RATES_MBIT} Mbit/s")
    for loss in losses:
        print(
            f"{loss.rounding} at four hops, {loss.num_positions} positions: best token agrees in {loss.agreement:.1%}, "
            f"divergence {loss.divergence_nats:.5f} nats, logit error {loss.logit_error:.2%}"
        )


if __name__ == "__main__":
    sys.exit(
        main(
            "compression",
            run,
            description="What zstd gains on hidden state per encoding, and what int8 costs in accuracy; 2 min.",
        )
    )
