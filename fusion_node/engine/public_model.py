"""A model as anybody can have it who has its public weights: what it makes of given tokens, and its linear maps.

What an attacker needs beside what it was sent (fusion_node.privacy). The layers are computed by a group of one member,
so that every state a member of a larger group has a part of is there whole: the hidden state before a layer and between
its attention and its MLP, the inputs of its output projections, keys and values.

Shapes: T tokens, D hidden size, V vocabulary, B candidates for one position, K KV heads, H head dim, N query heads,
F channels of the MLP, R outputs and I inputs of a part of a linear map.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusion_node.engine.architectures import load_config
from fusion_node.engine.boundary import Boundary
from fusion_node.engine.kv_cache import KVPool
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.sliced_stage import SlicedStage
from fusion_node.engine.stage import StepInput
from fusion_node.engine.weights import TensorSource
from fusion_node.slices import Dims, Exchange, ModelSlice, SliceBounds
from fusion_node.types import LayerRange

Floats = npt.NDArray[np.float32]

_EMBEDDED_AT_ONCE = 4096
"""Tokens: a vocabulary is embedded part by part, since families do more than look it up."""


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What one layer has of some tokens, as float32 in the rows' order.

    Attributes:
        before_TD: hidden state before the layer.
        middle_TD: after its attention, before its MLP.
        attended_TX: outputs of the heads, ``N * H``, which the output projection takes.
        inner_TF: what the MLP's second map takes; None with experts.
        keys_KTH, values_KTH: as they are kept.
    """

    before_TD: Floats
    middle_TD: Floats
    attended_TX: Floats
    inner_TF: Floats | None
    keys_KTH: Floats
    values_KTH: Floats


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that were computed, and room for candidates at any of their positions.

    Attributes:
        states: by layer.
        logits_TV: of the token after each position.
    """

    pool: KVPool
    states: dict[int, LayerStates]
    logits_TV: Floats


class PublicModel:
    """All layers of a model with both of its ends, on the CPU."""

    def __init__(self, layers: SlicedStage, boundary: Boundary, *, vocabulary: int) -> None:
        self._stage = layers
        self._boundary = boundary
        self.vocabulary = vocabulary
        self._table_VD: Floats | None = None

    @classmethod
    def load(cls, source: TensorSource, *, numerics: NumericsClass) -> PublicModel:
        """Reads a whole model.

        Raises:
            ConfigError: no fusion group can serve this model, and the message says why.
            ResourceExhausted: there is no room for the weights.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        device = torch.device("cpu")
        layers = LayerRange(0, config.num_hidden_layers)
        stage = SlicedStage.load(source, layers, ModelSlice(0, (1,)), numerics=numerics, device=device)
        boundary = Boundary.load(source, numerics=numerics, device=device)
        return cls(stage, boundary, vocabulary=config.vocab_size)

    @property
    def dims(self) -> Dims:
        return self._stage.dims

    @property
    def num_layers(self) -> int:
        return len(self._stage.layers)

    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Rows ``[T, D]`` as a user sends them."""
        return self._boundary.embed(token_ids)

    def nearest_tokens(self, rows_Td: Floats, columns: Sequence[int]) -> npt.NDArray[np.int64]:
        """Of all tokens those whose embedding is nearest to each row, of which only these columns are there."""
        if self._table_VD is None:
            parts = [
                self.embed(range(first, min(first + _EMBEDDED_AT_ONCE, self.vocabulary))).float().numpy()
                for first in range(0, self.vocabulary, _EMBEDDED_AT_ONCE)
            ]
            self._table_VD = np.concatenate(parts)
        table_Vd = self._table_VD[:, columns]
        closeness_TV = 2 * rows_Td @ table_Vd.T - np.square(table_Vd).sum(axis=1)
        nearest: npt.NDArray[np.int64] = closeness_TV.argmax(axis=1)
        return nearest

    def block(self, layer: int, exchange: Exchange, owner: SliceBounds, inputs: range) -> Floats:
        """The part ``[R, I]`` of a linear map that makes what ``owner`` is sent in this exchange of some inputs.

        With the factors of the norm before it, and without the sum of squares. ``inputs`` are columns of the hidden
        state, of all heads' outputs (O) or channels (DOWN). A model with experts has but QKV and O.
        """
        held, own, head_dim = self._stage.layer(layer), slice(inputs.start, inputs.stop), self.dims.head_dim
        match exchange:
            case Exchange.QKV:
                kv_heads = list(dict.fromkeys(owner.kv_heads))
                num_heads, num_kv = self.dims.heads, self.dims.kv_heads
                heads = [*owner.heads, *(num_heads + h for h in kv_heads), *(num_heads + num_kv + h for h in kv_heads)]
                rows = [row for head in heads for row in range(head * head_dim, (head + 1) * head_dim)]
                block = held.qkv.weight[rows, own] * held.input_gamma[own]
            case Exchange.GATE_UP:
                channels, ups = owner.channels, range(self.dims.channels, 2 * self.dims.channels)
                rows = [*channels, *ups[channels.start : channels.stop]]
                block = held.gate_up.weight[rows, own] * held.post_gamma[own]
            case Exchange.O:
                block = held.o.weight[owner.columns.start : owner.columns.stop, own]
            case Exchange.DOWN:
                block = held.down.weight[owner.columns.start : owner.columns.stop, own]
            case Exchange.ROUTER:
                block = held.router[:, own] * held.post_gamma[own]
        return _numpy(block)

    def read(self, token_ids: Sequence[int], layers: Collection[int], *, num_candidates: int) -> Prompt:
        """Computes tokens, with states of these layers; up to ``num_candidates`` can then be tried at each position."""
        num_tokens = len(token_ids)
        pool = self._stage.new_pool(num_tokens + num_candidates)
        step = StepRows(
            live_rows=tuple(range(num_tokens)),
            nodes=tuple(range(1, num_tokens + 1)),
            positions=tuple(range(num_tokens)),
            first_slot=0,
            is_chain=True,
            visible=(),
            num_committed=0,
            move=None,
        )
        item = StepInput(step, self.embed(token_ids), (range(num_tokens),))
        states, rows_TD = self._run(item, pool, layers, range(num_tokens), self._stage.layers)
        return Prompt(pool, states, self._boundary.logits(rows_TD))

    def try_tokens(
        self, prompt: Prompt, position: int, token_ids: Sequence[int], layers: Collection[int]
    ) -> dict[int, LayerStates]:
        """States of these layers if, after the prompt's tokens before ``position``, each of these came."""
        num_rows, first = len(token_ids), prompt.pool.num_slots - len(token_ids)
        slots = range(first, prompt.pool.num_slots)
        step = StepRows(
            live_rows=tuple(range(num_rows)),
            nodes=tuple(range(position + 1, position + 1 + num_rows)),
            positions=(position,) * num_rows,
            first_slot=position,
            is_chain=False,
            visible=tuple(1 << row for row in range(num_rows)),
            num_committed=position,
            move=None,
            live_positions=(position,) * num_rows,
        )
        item = StepInput(step, self.embed(token_ids), (range(position), slots) if position else (slots,))
        states, _ = self._run(item, prompt.pool, layers, slots, LayerRange(0, max(layers) + 1))
        return states

    def _run(
        self, item: StepInput, pool: KVPool, wanted: Collection[int], slots: range, layers: LayerRange
    ) -> tuple[dict[int, LayerStates], torch.Tensor]:
        (step,) = self._stage.begin([item], layers)
        before: dict[int, Floats] = {}
        middle: dict[int, Floats] = {}
        with self._noting_inputs(wanted) as inputs:
            sent = self._stage.phase([step], None, pool)
            while sent is not None:
                layer, exchange = step.position
                if layer in wanted and exchange is Exchange.QKV:
                    before[layer] = _numpy(step.rows_TD)
                elif layer in wanted and exchange is Exchange.DOWN:
                    middle[layer] = _numpy(step.rows_TD)
                sent = self._stage.phase([step], sent, pool)
        states = {}
        for layer in wanted:
            keys_KTH, values_KTH = pool.read(layer, slice(slots.start, slots.stop), torch.float32)
            states[layer] = LayerStates(
                before[layer],
                middle[layer],
                inputs[layer, "o"],
                inputs.get((layer, "down")),
                _numpy(keys_KTH),
                _numpy(values_KTH),
            )
        return states, step.rows_TD

    @contextmanager
    def _noting_inputs(self, layers: Collection[int]) -> Iterator[dict[tuple[int, str], Floats]]:
        """What the output projections of these layers take, by layer and name."""
        noted: dict[tuple[int, str], Floats] = {}

        def noting(layer: int, name: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
            def note(_: Any, args: tuple[torch.Tensor, ...]) -> None:
                noted[layer, name] = _numpy(args[0])

            return note

        handles = [
            module.register_forward_pre_hook(noting(layer, name))
            for layer in layers
            for name in ("o", "down")
            if isinstance(module := getattr(self._stage.layer(layer), name, None), torch.nn.Module)
        ]
        try:
            yield noted
        finally:
            for handle in handles:
                handle.remove()


def _numpy(tensor: torch.Tensor) -> Floats:
    """A copy as float32."""
    array: Floats = tensor.detach().float().cpu().numpy().copy()
    return array
