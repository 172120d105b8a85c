"""Tensor encodings and their compression: known answers, round trips, and bytes from strangers."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fusion_node.wire import WireError
from p2p.messages import DTYPE_BYTES, INT8, INT8_BLOCK, ZSTD, TensorMeta
from p2p.tensor_wire import RowsNotFinite, compress, decode, decompress, encode
from tests.vectors.make_tensors import smooth_rows, values

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "tensors.json").read_text())
DTYPES = (*DTYPE_BYTES, INT8)

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 2 * INT8_BLOCK + 1))
LARGEST = {
    "f32": float(np.finfo(np.float32).max),
    "f16": 65504.0,
    "bf16": 3.3895313892515355e38,
    INT8: 1.25 * 2.0**126,
}


@st.composite
def rows_for(draw: st.DrawFn, dtype: str) -> Any:
    bound = LARGEST[dtype]
    elements = st.floats(-bound, bound, width=32) | st.floats(-8, 8, width=32)
    return draw(hnp.arrays(np.float32, draw(SHAPES), elements=elements))


def with_rows() -> st.SearchStrategy[tuple[str, Any]]:
    return st.sampled_from(DTYPES).flatmap(lambda dtype: st.tuples(st.just(dtype), rows_for(dtype)))


def meta_of(rows: Any, dtype: str, codec: str = "") -> TensorMeta:
    return TensorMeta(dtype, rows.shape[0], rows.shape[1], codec)


@pytest.mark.parametrize("vector", VECTORS["encoded"], ids=lambda v: f"{v['dtype']}: {v['what']}")
def test_encoding_matches_the_known_answer(vector: dict[str, Any]) -> None:
    meta = TensorMeta(vector["dtype"], vector["num_rows"], vector["row_size"])
    rows = values(vector["values"]).reshape(meta.num_rows, meta.row_size)
    payload = bytes.fromhex(vector["payload"])
    assert encode(rows, meta.dtype).tobytes() == payload
    assert len(payload) == meta.num_bytes
    assert decode(meta, payload).tobytes() == values(vector["decoded"]).tobytes()


@pytest.mark.parametrize("vector", VECTORS["compressed"], ids=lambda v: str(v["dtype"]))
def test_decompression_matches_the_known_answer(vector: dict[str, Any]) -> None:
    meta = TensorMeta(vector["dtype"], vector["num_rows"], vector["row_size"], vector["codec"])
    assert decompress(bytes.fromhex(vector["stored"]), meta).tobytes().hex() == vector["payload"]


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda v: str(v["what"]))
def test_what_no_encoder_makes_is_refused(vector: dict[str, Any]) -> None:
    meta = TensorMeta(vector["dtype"], vector["num_rows"], vector["row_size"])
    with pytest.raises((RowsNotFinite, WireError)):
        decode(meta, bytes.fromhex(vector["payload"]))


@given(with_rows())
def test_what_decodes_encodes_to_the_same_bytes(case: tuple[str, Any]) -> None:
    dtype, rows = case
    payload = encode(rows, dtype).tobytes()
    meta = meta_of(rows, dtype)
    decoded = decode(meta, payload)
    assert len(payload) == meta.num_bytes
    assert decoded.shape == rows.shape
    assert decoded.dtype == np.float32
    if dtype != INT8:  # where rows that are near zero beside their neighbours get a smaller scale
        assert encode(decoded, dtype).tobytes() == payload


@given(rows_for("f32"))
def test_float32_comes_back_bit_by_bit(rows: Any) -> None:
    assert decode(meta_of(rows, "f32"), encode(rows, "f32").tobytes()).tobytes() == rows.tobytes()


@given(rows_for(INT8))
def test_int8_is_off_by_at_most_half_a_scale(rows: Any) -> None:
    decoded = decode(meta_of(rows, INT8), encode(rows, INT8).tobytes())
    for start in range(0, rows.shape[1], INT8_BLOCK):
        block = rows[:, start : start + INT8_BLOCK].astype(np.float64)
        largest = np.abs(block).max(axis=1)
        scale = largest / 127 * (1 + 2**-7)  # bfloat16 has eight bits, and is rounded up
        tiny = 127 * 2.0**-126
        error = np.abs(decoded[:, start : start + INT8_BLOCK] - block).max(axis=1)
        assert (error <= np.maximum(scale / 2 * (1 + 1e-6), tiny)).all()


@given(with_rows(), st.sampled_from([1, 3]))
def test_compression_is_undone(case: tuple[str, Any], level: int) -> None:
    dtype, rows = case
    payload = encode(rows, dtype).tobytes()
    assert decompress(compress(payload, dtype, level=level), meta_of(rows, dtype, ZSTD)).tobytes() == payload


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_rows_survive_compression_on_many_threads(dtype: str) -> None:
    rows = smooth_rows(64, 2048)  # planes of more than one block of Zstandard
    payload = encode(rows, dtype).tobytes()
    results: list[bytes] = []

    def work() -> None:
        for _ in range(5):
            results.append(decompress(compress(payload, dtype, level=1), meta_of(rows, dtype, ZSTD)).tobytes())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [payload] * 15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_neither_sent_nor_taken(dtype: str, value: float) -> None:
    rows = np.ones((2, 40), dtype=np.float32)
    rows[1, 33] = value
    with pytest.raises(RowsNotFinite):
        encode(rows, dtype)
    if dtype == INT8:
        return  # where a value cannot be one, and a scale is among the known answers
    bits = {"f32": 4, "f16": 2, "bf16": 2}[dtype]
    patterns = {math.inf: {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}[dtype]}
    pattern = patterns.get(abs(value), {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}[dtype])
    payload = bytes(bits * 39) + pattern.to_bytes(bits, "little")
    with pytest.raises(RowsNotFinite):
        decode(TensorMeta(dtype, 1, 40), payload)


@pytest.mark.parametrize(("dtype", "value"), [("f16", 65520.0), ("bf16", 3.4e38), (INT8, 1.7e38), (INT8, -1.7e38)])
def test_a_value_that_the_encoding_cannot_hold_is_not_sent(dtype: str, value: float) -> None:
    with pytest.raises(RowsNotFinite):
        encode(np.array([[1.0, value]], dtype=np.float32), dtype)


def frame_of(payload: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(payload)


def streamed(payload: bytes) -> bytes:
    """A frame that does not say how long it is."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(payload) + stream.flush()


META = TensorMeta("f32", 1, 64, ZSTD)
PLAIN = bytes(256)
BOMB = frame_of(bytes(1 << 26))


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x28\xb5",
        b"\x28\xb5\x2f\xfd",
        PLAIN,
        frame_of(PLAIN)[:-1],
        frame_of(PLAIN) + b"\0",
        frame_of(PLAIN) + frame_of(PLAIN),
        frame_of(PLAIN[:-1]),
        frame_of(PLAIN + b"\0"),
        frame_of(b""),
        streamed(PLAIN),
        BOMB,
        b"\x50\x2a\x4d\x18\x00\x01\x00\x00" + PLAIN,  # a skippable frame of 256 bytes
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + frame_of(PLAIN),
        # The header of the right size on the body of a bomb.
        frame_of(PLAIN)[:6] + BOMB[8:],
    ],
)  # fmt: skip
def test_what_is_not_one_frame_of_the_announced_size_is_refused(stored: bytes) -> None:
    with pytest.raises(WireError):
        decompress(stored, META)


def test_any_valid_frame_is_accepted_and_may_carry_a_checksum() -> None:
    for stored in (frame_of(PLAIN), frame_of(PLAIN, write_checksum=True), frame_of(PLAIN, write_checksum=False)):
        assert decompress(stored, META).tobytes() == PLAIN


def test_a_changed_byte_is_refused_or_decodes_to_as_many_bytes() -> None:
    payload = encode(smooth_rows(1, 64), "f32").tobytes()
    stored = compress(payload, "f32", level=1)
    for index in range(len(stored)):
        changed = stored[:index] + bytes([stored[index] ^ 0x41]) + stored[index + 1 :]
        try:
            assert len(decompress(changed, META)) == 256
        except WireError:
            continue


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_have_the_announced_size(stored: bytes) -> None:
    for data in (stored, b"\x28\xb5\x2f\xfd" + stored):
        try:
            assert len(decompress(data, META)) == 256
        except WireError:
            continue


def test_an_unknown_encoding_is_not_guessed_at() -> None:
    with pytest.raises(ValueError, match="unknown tensor encoding"):
        encode(np.ones((1, 1), dtype=np.float32), "f8")
    with pytest.raises(ValueError, match="unknown tensor encoding"):
        decode(TensorMeta("f8", 1, 1), b"\0")
