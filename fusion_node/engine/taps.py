"""Rows after some of a stage's layers, as a forward comes past them, for whoever asked for them beside the result.

Nothing here changes what is computed: rows are copied out of what a layer puts out. Layers are counted as transformers
counts hidden states: n is the row after n layers of the model.

Shapes: T rows, D hidden size.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fusion_node.engine.tensor_codec import RowsNotFinite, encode_rows
from p2p.messages import TensorMeta


@dataclass(frozen=True, slots=True, eq=False)
class Tapped:
    """What is wanted of the rows of one call, and what was found.

    Attributes:
        layers: of any stage; each takes those that are its own.
        rows: indices into the rows that the call takes.
        found: by layer, ``[T, D]`` of those rows.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    found: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)


class TapTensors:
    """The tapped rows of one step on their way through a node: encoded part by part.

    Args:
        rows: indices into the step's live rows, ascending.
        wire_dtype: encoding of what goes out.
    """

    def __init__(self, layers: Sequence[int], rows: Sequence[int], row_size: int, wire_dtype: str) -> None:
        self._layers = tuple(layers)
        self._rows = tuple(rows)
        self._wire_dtype = wire_dtype
        self._row_bytes = TensorMeta(wire_dtype, 1, row_size).num_bytes
        self._out: dict[int, bytearray] = {}
        """Made when the first rows of a layer come: a step that waits for the device has none."""
        self._has: dict[int, set[int]] = {}

    def of(self, start: int, stop: int) -> Tapped | None:
        """What to take of a call with the live rows ``[start, stop)``; None: nothing."""
        rows = tuple(row - start for row in self._rows if start <= row < stop)
        return Tapped(self._layers, rows) if rows else None

    def keep(self, start: int, tapped: Tapped) -> None:
        """Takes what was found in a call whose first live row was ``start``; again, when it is computed anew.

        A layer whose rows do not fit into the encoding is left out: they are a hint, and no part of the answer.
        """
        first = next(place for place, row in enumerate(self._rows) if row >= start)
        for layer, rows_TD in tapped.found.items():
            places, has = range(first, first + len(rows_TD)), self._has.setdefault(layer, set())
            try:
                _, encoded = encode_rows(rows_TD, self._wire_dtype)
            except RowsNotFinite:
                has.difference_update(places)
                continue
            out = self._out.get(layer)
            if out is None:
                out = self._out[layer] = bytearray(self._row_bytes * len(self._rows))
            out[first * self._row_bytes : places.stop * self._row_bytes] = encoded
            has.update(places)

    def payloads(self) -> list[tuple[int, memoryview]]:
        """By layer what goes out, of those of which everything is there."""
        whole = [layer for layer in self._layers if len(self._has.get(layer, ())) == len(self._rows)]
        return [(layer, memoryview(self._out[layer])) for layer in whole]


@contextmanager
def tapping(
    modules: Mapping[int, torch.nn.Module], wishes: Sequence[tuple[Tapped, int]], layers: Collection[int]
) -> Iterator[None]:
    """Fills ``Tapped.found`` in the calls of a model within, by this thread.

    A forward that is still running when its node goes over to other layers shares modules with what comes after it,
    and rows of one user are not to be taken for another's.

    Args:
        modules: by layer, what puts out the rows after so many layers.
        wishes: with each, where its rows begin in the call.
        layers: whose rows are looked at.
    """
    with ExitStack() as stack:
        for layer in layers:
            of_layer = [wish for wish in wishes if layer in wish[0].layers]
            if of_layer:
                hook = partial(_take, layer, of_layer, threading.get_ident())
                stack.enter_context(modules[layer].register_forward_hook(hook))
        yield


def _take(
    layer: int, wishes: Sequence[tuple[Tapped, int]], thread: int, module: torch.nn.Module, arguments: Any, output: Any
) -> None:
    if threading.get_ident() != thread:
        return
    hidden_1TD: torch.Tensor = output[0] if isinstance(output, tuple) else output
    # All at once, because on a GPU each copy of indices waits for what is computed.
    rows = torch.tensor([start + row for tapped, start in wishes for row in tapped.rows], device=hidden_1TD.device)
    parts = torch.split(hidden_1TD[0].index_select(0, rows), [len(tapped.rows) for tapped, _ in wishes])
    for (tapped, _), part_TD in zip(wishes, parts, strict=True):
        tapped.found[layer] = part_TD
