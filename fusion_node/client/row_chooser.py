"""Which token follows a row that came back, for an answer that speculates: its work on the compute thread.

Guarantees: the token is the one that plain decode chooses from that row. A row is judged by its own bytes alone, so
that what a guess has led to, which nobody will choose from, blames nobody. Rows ahead share a product with the LM head
only in such numbers as give each the logits that it has alone, to the bit.

Shapes: T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_node.client.answer import Returned
from fusion_node.client.sampling import SamplingParams, choose_token
from fusion_node.client.speculative_answer import Chosen, ReturnedRow, RowUnfit
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.drafts import Verified
from fusion_node.engine.tensor_codec import RowsNotFinite, decode_rows
from fusion_node.wire import WireError
from p2p.messages import TensorMeta
from p2p.tensor_wire import decompress

MAX_ROWS = 8
"""Multiplied by the LM head at a time: on two cores eight take little longer than one, because the head has to be read
once."""


class RowChooser:
    """Chooses the tokens of one answer (fusion_node.client.speculative_answer.Chooser).

    Args:
        all_ids: prompt and answer so far, for the repetition penalty.
        seed: of the sampling noise.
        as_dtype: the lossless encoding of the session's numerics class.
        max_rows: of one product with the LM head; see exact_rows.
        on_compute: runs a function on the compute thread.
        observe_step: is told how many seconds each choice took.
    """

    def __init__(
        self,
        boundary: Boundary,
        all_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        as_dtype: str,
        max_rows: int,
        on_compute: Callable[[Callable[[], Chosen]], Awaitable[Chosen]],
        observe_step: Callable[[float], None],
    ) -> None:
        self._boundary = boundary
        self._all_ids = all_ids
        self._params = params
        self._seed = seed
        self._as_dtype = as_dtype
        self._max_rows = max_rows
        self._on_compute = on_compute
        self._observe_step = observe_step

    async def choose(self, position: int, row: ReturnedRow, ahead: Sequence[ReturnedRow]) -> Chosen:
        """See Chooser."""
        began = time.perf_counter()
        chosen = await self._on_compute(lambda: self.choose_now(position, row, ahead))
        self._observe_step(time.perf_counter() - began)
        return chosen

    def choose_now(self, position: int, row: ReturnedRow, ahead: Sequence[ReturnedRow]) -> Chosen:
        """The same, on the calling thread."""
        try:
            row_D = self._decoded(row)
        except (RowsNotFinite, WireError) as error:
            raise RowUnfit(str(error)) from error
        logits_V = row.of.logits.pop(row.index, None)
        if logits_V is None:
            rows, decoded = [row], [row_D]
            for each in ahead:
                if len(rows) >= self._max_rows:
                    break
                with suppress(RowsNotFinite, WireError):  # told when it is its turn, which may never come
                    if each.index not in each.of.logits:
                        decoded.append(self._decoded(each))
                        rows.append(each)
            logits_TV = self._boundary.logits_of(decoded)
            logits_V = logits_TV[0]
            for each, logits in zip(rows[1:], logits_TV[1:], strict=True):
                each.of.logits[each.index] = logits
        token = choose_token(logits_V, self._params, seed=self._seed, position=position, seen=self._all_ids)
        # What else was probable is looked for by the drafter that wants it, while the token is on its way.
        return Chosen(Verified([token], row_D.float().numpy()[None], logits_TV=logits_V[None]))

    def _decoded(self, row: ReturnedRow) -> Any:
        """A row of a message as a tensor ``[D]``."""
        return _decoded(row.of, row.index, self._as_dtype)


def decode_tap(rows: Returned, index: int, *, as_dtype: str) -> npt.NDArray[np.float32] | None:
    """One of the rows of a layer that a stage has sent, as numbers ``[D]``; None where it is none.

    Args:
        as_dtype: the lossless encoding of the session's numerics class.
    """
    try:
        row: npt.NDArray[np.float32] = _decoded(rows, index, as_dtype).float().numpy()
    except (RowsNotFinite, WireError):
        return None
    return row


def _decoded(returned: Returned, index: int, as_dtype: str) -> Any:
    if returned.plain is None:
        tensor, payload = returned.tensor, returned.payload
        returned.plain = decompress(payload, tensor).data if tensor.codec else payload
    meta = TensorMeta(returned.tensor.dtype, 1, returned.tensor.row_size)
    start = index * meta.num_bytes
    return decode_rows(meta, returned.plain[start : start + meta.num_bytes], as_dtype=as_dtype)[0]


def exact_rows(boundary: Boundary, vocabulary: int) -> int:
    """So many rows, MAX_ROWS at most, can be multiplied by the LM head at once, and fewer as well, without a bit of
    their logits differing from what each has alone. Which kernel a product is given to goes by its shape.

    Args:
        vocabulary: ids of the model.
    """
    rows_TD = boundary.embed([index * vocabulary // MAX_ROWS for index in range(MAX_ROWS)])
    alone = [boundary.logits(rows_TD[:1])]
    for num_rows in range(2, MAX_ROWS + 1):
        alone.append(boundary.logits(rows_TD[num_rows - 1 : num_rows]))
        if not np.array_equal(boundary.logits(rows_TD[:num_rows]), np.concatenate(alone)):
            return num_rows - 1
    return MAX_ROWS
