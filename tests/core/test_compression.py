"""The shell around the choice of compression: what is really compressed, and for whom."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from fusion_node.types import PeerId
from p2p.compression import FEATURE, LARGE_BYTES, Compressor, Packing
from p2p.compression_core import Kind
from p2p.messages import ZSTD, TensorMeta
from p2p.tensor_wire import decompress, encode
from tests.vectors.make_tensors import smooth_rows

PEER, OLD_PEER = PeerId("peer"), PeerId("old")
ROWS = smooth_rows(4, 512)
TENSOR, PAYLOAD = TensorMeta("f32", 4, 512), encode(ROWS, "f32").tobytes()
KIND = Kind("f32", 13)


def features(peer: PeerId) -> Collection[str]:
    return {FEATURE} if peer == PEER else ()


def compressor(rate_Bps: float | None) -> Compressor:
    return Compressor(rate_Bps=lambda peer: rate_Bps, features=features, clock=lambda: 5.0)


def test_on_a_slow_link_a_trial_decides_and_the_tensor_shrinks() -> None:
    # So slow that no noise of the machine under test can outweigh it.
    slow = compressor(100.0)
    packing = slow.choose(PEER, TENSOR, PAYLOAD)
    assert packing is None  # it has not been measured when it is chosen, but afterwards
    packing = slow.choose(PEER, TENSOR, memoryview(PAYLOAD))
    assert packing is not None
    packed = packing.run()
    slow.note(packed)
    assert packed.tensor == TensorMeta("f32", 4, 512, ZSTD)
    assert decompress(packed.payload, packed.tensor).tobytes() == PAYLOAD
    assert slow.counters == {
        "trials": 1, "tensors": 1, "bytes_before": len(PAYLOAD), "bytes_after": len(packed.payload),
    }  # fmt: skip
    slow.forget(PEER)
    assert slow.choose(PEER, TENSOR, PAYLOAD) is not None  # what it costs is known from before


def test_a_peer_that_did_not_announce_it_gets_plain_tensors() -> None:
    slow = compressor(100.0)
    assert [slow.choose(OLD_PEER, TENSOR, PAYLOAD) for _ in range(3)] == [None] * 3
    assert not slow.counters


@pytest.mark.parametrize("rate_Bps", [None, 1e15])
def test_a_fast_link_or_one_of_unknown_rate_gets_plain_tensors(rate_Bps: float | None) -> None:
    fast = compressor(rate_Bps)
    assert [fast.choose(PEER, TENSOR, PAYLOAD) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("rate_Bps", [None, 1e9])
def test_a_limit_of_ones_own_makes_a_slow_link(rate_Bps: float | None) -> None:
    limited = Compressor(rate_Bps=lambda peer: rate_Bps, features=features, limit_Bps=100.0, clock=lambda: 5.0)
    assert limited.choose(PEER, TENSOR, PAYLOAD) is None
    assert limited.choose(PEER, TENSOR, PAYLOAD) is not None


def test_what_does_not_shrink_goes_as_it_is() -> None:
    noise = np.random.default_rng(1).bytes(len(PAYLOAD))
    packed = Packing(TENSOR, noise, KIND, 1, False).run()
    assert (packed.tensor, packed.payload) == (TENSOR, noise)


def test_what_shrinks_so_much_that_a_receiver_would_refuse_it_goes_as_it_is() -> None:
    zeros = bytes(len(PAYLOAD))
    packed = Packing(TENSOR, zeros, KIND, 1, False).run()
    assert (packed.tensor, packed.payload) == (TENSOR, zeros)


def test_a_trial_of_a_large_tensor_looks_at_some_of_its_rows() -> None:
    rows = np.random.default_rng(1).standard_normal((256, 2048), dtype=np.float32)
    payload = encode(rows, "bf16").tobytes()
    slow = compressor(100.0)
    assert len(payload) == LARGE_BYTES
    assert slow.choose(PEER, TensorMeta("bf16", 256, 2048), payload) is None
    packing = slow.choose(PEER, TensorMeta("bf16", 256, 2048), payload)
    assert packing is not None
    assert not packing.is_large  # but the next row would make it so
    assert slow.is_large(TensorMeta("bf16", 257, 2048, ZSTD))
    assert not slow.is_large(TensorMeta("bf16", 256, 2048, ZSTD))
    assert slow.is_large(TensorMeta("bf16", 257, 2048))  # is checked and copied all the same
    assert not slow.is_large(TensorMeta("bf16", 256, 2048))
    assert decompress(packing.run().payload, TensorMeta("bf16", 256, 2048, ZSTD)).tobytes() == payload


def test_what_is_longer_than_a_frame_is_not_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = compressor(100.0)
    slow.choose(PEER, TENSOR, PAYLOAD)
    assert slow.choose(PEER, TENSOR, PAYLOAD) is not None
    monkeypatch.setattr("p2p.compression.MAX_PAYLOAD_BYTES", len(PAYLOAD) - 1)
    assert slow.choose(PEER, TENSOR, PAYLOAD) is None
