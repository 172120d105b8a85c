"""Rows between torch and the wire: the same bytes as p2p.tensor_wire, which defines them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fusion_node.engine.numerics import WIRE_DTYPES
from fusion_node.engine.tensor_codec import RowsNotFinite, StepTensors, decode_rows, encode_rows
from fusion_node.wire import WireError
from p2p import tensor_wire
from p2p.messages import INT8, ZSTD, TensorMeta

ROWS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    elements=st.floats(-65504, 65504, width=32) | st.floats(-1, 1, width=32),
)


@given(ROWS, st.sampled_from([*WIRE_DTYPES, INT8]))
def test_torch_makes_the_bytes_that_the_wire_format_defines(rows: np.ndarray, dtype: str) -> None:
    meta, payload = encode_rows(torch.from_numpy(rows), dtype)
    assert bytes(payload) == tensor_wire.encode(rows, dtype).tobytes()
    assert meta == TensorMeta(dtype, *rows.shape)
    decoded = decode_rows(meta, payload)
    assert decoded.float().numpy().tobytes() == tensor_wire.decode(meta, payload).tobytes()


@pytest.mark.parametrize("dtype", [*WIRE_DTYPES, INT8])
def test_compressed_rows_decode_to_the_same_tensor(dtype: str) -> None:
    meta, payload = encode_rows(torch.linspace(-2, 2, 256).view(2, 128), dtype)
    stored = tensor_wire.compress(payload, dtype, level=1)
    compressed = TensorMeta(dtype, 2, 128, ZSTD)
    decoded = decode_rows(compressed, memoryview(stored))
    assert torch.equal(decoded, decode_rows(meta, payload))
    decoded += 1  # may be written to
    with pytest.raises(WireError):
        decode_rows(compressed, memoryview(stored)[:-1])


def test_int8_rows_are_rounded_to_the_class_and_never_to_infinity() -> None:
    # Decoded, the largest value is a little above what fp16 can hold.
    meta, payload = encode_rows(torch.full((1, 32), 65504.0), INT8)
    assert decode_rows(meta, payload).max() > 65520
    as_f16 = decode_rows(meta, payload, as_dtype="f16")
    assert as_f16.dtype == torch.float16
    assert as_f16.tolist() == [[65504.0] * 32]


def test_int8_refuses_rows_that_are_not_finite() -> None:
    with pytest.raises(RowsNotFinite):
        encode_rows(torch.tensor([[1.0, torch.nan]]), INT8)
    with pytest.raises(RowsNotFinite):
        decode_rows(TensorMeta(INT8, 1, 1), memoryview(b"\xc0\x7f\x01"))


def test_a_step_leaves_dead_rows_out() -> None:
    rows_TD = torch.linspace(-3, 3, 4 * 40).view(4, 40)
    tensors = StepTensors(rows_TD, [0, 2, 3], None, INT8)
    tensors.keep(0, rows_TD[[0, 2]])
    tensors.keep(2, rows_TD[[3]])
    assert tensors.is_complete
    assert bytes(tensors.payload) == bytes(encode_rows(rows_TD[[0, 2, 3]], INT8)[1])


def test_a_step_that_has_not_begun_may_lose_rows() -> None:
    rows_TD = torch.linspace(-3, 3, 5 * 40).view(5, 40)
    tensors = StepTensors(rows_TD, [0, 2, 3, 4], None, INT8).narrowed([0, 3, 4], None).narrowed([0, 4], [1])
    assert torch.equal(tensors.live_rows(0, 2), rows_TD[[0, 4]])
    tensors.keep(0, rows_TD[[0, 4]])
    assert tensors.is_complete
    assert bytes(tensors.payload) == bytes(encode_rows(rows_TD[[4]], INT8)[1])
    nothing = StepTensors(rows_TD, [0, 2], None, INT8).narrowed([], None)
    assert nothing.is_complete
    assert bytes(nothing.payload) == b""


@pytest.mark.parametrize("dtype", [*WIRE_DTYPES, INT8])
def test_no_rows_decode_to_an_empty_table(dtype: str) -> None:
    assert decode_rows(TensorMeta(dtype, 0, 40), memoryview(b""), as_dtype="f16").shape == (0, 40)


def test_a_step_may_return_no_row() -> None:
    rows_TD = torch.linspace(-3, 3, 4 * 40).view(4, 40)
    none = StepTensors(rows_TD, [0, 1, 2, 3], [], INT8)
    none.keep(0, rows_TD)
    assert bytes(none.payload) == b""
