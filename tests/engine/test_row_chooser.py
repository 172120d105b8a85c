"""Choosing from rows of a tree: what a dead guess has led to harms nobody, and rows ahead change no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fusion_node.client.answer import Returned
from fusion_node.client.row_chooser import MAX_ROWS, RowChooser, exact_rows
from fusion_node.client.sampling import SamplingParams, choose_token
from fusion_node.client.speculative_answer import Chosen, ReturnedRow, RowUnfit
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.numerics import numerics_class
from fusion_node.engine.tensor_codec import encode_rows
from fusion_node.types import PeerId
from p2p.messages import INT8, ZSTD, TensorMeta
from p2p.tensor_wire import compress
from tests.engine.tiny import tiny_model
from tests.scenarios.swarm import CPU

VOCABULARY = 128
PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def boundary() -> Boundary:
    return Boundary.load(tiny_model("llama"), numerics=numerics_class("fp32"), device=CPU)


def chooser_of(boundary: Boundary, max_rows: int = MAX_ROWS) -> RowChooser:
    async def on_compute(work: Callable[[], Chosen]) -> Chosen:
        return work()

    return RowChooser(
        boundary,
        [],
        PARAMS,
        seed=1,
        as_dtype="f32",
        max_rows=max_rows,
        on_compute=on_compute,
        observe_step=lambda seconds: None,
    )


def rows_of(boundary: Boundary, num: int) -> torch.Tensor:
    return boundary.embed(range(num)) * 30.0


def returned(rows_TD: torch.Tensor, *, bad: Sequence[int] = (), is_packed: bool = False) -> list[ReturnedRow]:
    """The rows of one message, of which some are no numbers."""
    tensor, payload = encode_rows(rows_TD, "f32")
    values = np.frombuffer(payload, dtype="<f4").reshape(rows_TD.shape).copy()
    values[list(bad), 3] = np.nan
    data = values.tobytes()
    if is_packed:
        tensor, data = TensorMeta("f32", *rows_TD.shape, ZSTD), compress(data, "f32", level=1)
    message = Returned(tensor, memoryview(data), PeerId("a"))
    return [ReturnedRow(message, index) for index in range(len(rows_TD))]


def token_of(boundary: Boundary, row_D: torch.Tensor) -> int:
    return choose_token(boundary.logits(row_D[None])[0], PARAMS, seed=1, position=1, seen=[])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("bad", [0, 2])
async def test_bad_row_beside_the_one_that_is_chosen_from_is_not_looked_at(
    boundary: Boundary, bad: int, is_packed: bool
) -> None:
    rows_TD = rows_of(boundary, 3)
    rows = returned(rows_TD, bad=[bad], is_packed=is_packed)
    chooser = chooser_of(boundary)
    for ahead in ((), (rows[bad],)):
        assert (await chooser.choose(1, rows[1], ahead)).token == token_of(boundary, rows_TD[1])
    with pytest.raises(RowUnfit, match="NaN"):
        await chooser.choose(1, rows[bad], ())


@pytest.mark.parametrize("payload", [b"", b"\x28\xb5\x2f\xfd"])
async def test_message_that_does_not_decompress_is_unfit(boundary: Boundary, payload: bytes) -> None:
    tensor = TensorMeta("f32", 1, rows_of(boundary, 1).shape[1], ZSTD)
    with pytest.raises(RowUnfit):
        await chooser_of(boundary).choose(1, ReturnedRow(Returned(tensor, memoryview(payload), PeerId("a")), 0), ())


async def test_rows_of_eight_bits_are_decoded_one_by_one(boundary: Boundary) -> None:
    rows_TD = rows_of(boundary, 3)
    tensor, payload = encode_rows(rows_TD, INT8)
    message = Returned(tensor, payload, PeerId("a"))
    chosen = [(await chooser_of(boundary).choose(1, ReturnedRow(message, index), ())) for index in range(3)]
    for each, row_D in zip(chosen, rows_TD, strict=True):
        assert each.verified.rows_TD is not None
        assert np.allclose(each.verified.rows_TD[0], row_D.numpy(), atol=float(row_D.abs().max()) / 100)


class Counting:
    """A boundary whose logits differ in the last bit where more than so many rows are multiplied at once."""

    def __init__(self, num_alike: int) -> None:
        self._num_alike = num_alike
        self.num_rows: list[int] = []

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.arange(1.0, 1.0 + len(ids))[:, None].repeat(1, 4)

    def logits(self, rows_TD: torch.Tensor) -> npt.NDArray[np.float32]:
        self.num_rows.append(len(rows_TD))
        logits: npt.NDArray[np.float32] = rows_TD.numpy().repeat(2, axis=1)
        return np.nextafter(logits, np.float32(np.inf)) if len(rows_TD) > self._num_alike else logits

    def logits_of(self, rows: Sequence[torch.Tensor]) -> npt.NDArray[np.float32]:
        return self.logits(torch.stack(list(rows)))


@pytest.mark.parametrize("num_alike", [1, 4, MAX_ROWS])
async def test_no_more_rows_are_multiplied_at_once_than_leave_every_bit_as_it_is(num_alike: int) -> None:
    counting = Counting(num_alike)
    max_rows = exact_rows(counting, VOCABULARY)  # type: ignore[arg-type]
    assert max_rows == num_alike
    rows_TD = counting.embed(range(MAX_ROWS + 2))
    rows = returned(rows_TD)
    counting.num_rows.clear()
    chooser = chooser_of(counting, max_rows)  # type: ignore[arg-type]
    for position, row in enumerate(rows):
        await chooser.choose(position, row, rows[position + 1 :])
    assert max(counting.num_rows) == num_alike
    assert sum(counting.num_rows) == len(rows), "no row is multiplied twice"


def test_rows_that_are_said_to_be_exact_are(boundary: Boundary) -> None:
    num = exact_rows(boundary, VOCABULARY)
    rows_TD = rows_of(boundary, num)
    alone = np.concatenate([boundary.logits(rows_TD[i : i + 1]) for i in range(num)])
    assert np.array_equal(boundary.logits(rows_TD), alone)
