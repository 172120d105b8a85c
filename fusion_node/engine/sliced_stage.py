"""A slice of a stage: what one member of a fusion group holds of a layer range, and nothing else of the model.

A forward is a chain of *phases*. Each takes what all members contributed to one exchange (fusion_node.slices.Exchange),
computes with what this member owns, and ends with what it contributes to the next. Between two phases steps wait, each
on its own: steps of many sessions are computed together when they are at the same place, however they came there.

Shapes: T packed rows, d own columns, W values per row that a member contributes, S KV slots in use.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from fusion_node.engine import f16r32
from fusion_node.engine.architectures import build_layers, load_config
from fusion_node.engine.attention import PackedBatch
from fusion_node.engine.device import memory_errors
from fusion_node.engine.kv_cache import KVLayout, KVPool, bytes_per_slot
from fusion_node.engine.linear import speed_up_linears
from fusion_node.engine.numerics import NUMERICS, NumericsClass
from fusion_node.engine.session_log_core import SessionLog, StepRows
from fusion_node.engine.sliced_layer import HeadRows, Rotary, Routing, SlicedLayer, fusion_dims
from fusion_node.engine.sliced_weights import fill_slices
from fusion_node.engine.stage import StepInput, segments_of
from fusion_node.engine.weights import OnTensor, TensorSource, compute_buffers
from fusion_node.errors import ConfigError, InvalidLayers, LocalProtocolError
from fusion_node.slices import Dims, Exchange, ModelSlice, SliceBounds, exchange_width, exchanges, split
from fusion_node.store.quantization import quantization_settings
from fusion_node.types import LayerRange

_MAX_TOGETHER = 4
"""Sets of steps whose packed batches are kept between phases; steps that came together stay together mostly."""


Contributions: TypeAlias = "Sequence[torch.Tensor] | torch.Tensor"
"""Those of all members to one exchange, or their sum."""


@dataclass(slots=True, eq=False)
class FusedStep:
    """Rows of a step of one session on their way through the layers of a member.

    Attributes:
        layers: that the step passes.
        rows_TD: this member's columns of the rows, ``[T, d]``: of the residual, and when it is done of the result.
        position: the exchange that it waits for.
        has_begun: whether this member has contributed to it.
    """

    input: StepInput
    layers: LayerRange
    rows_TD: torch.Tensor
    rotary: Rotary
    position: tuple[int, Exchange]
    has_begun: bool = False
    routing: Routing | None = None

    @property
    def is_done(self) -> bool:
        return self.position[0] == self.layers.stop


@dataclass(frozen=True, slots=True)
class _Together:
    """What steps that are computed together share from phase to phase."""

    packed: PackedBatch
    rotary: Rotary


class SlicedStage:
    """A member's slice of layers ``[start, stop)``, on one device. Not thread-safe: one compute thread calls it."""

    def __init__(
        self,
        layers: Sequence[SlicedLayer],
        rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        *,
        held: LayerRange,
        member: ModelSlice,
        dims: Dims,
        numerics: NumericsClass,
        device: torch.device,
    ) -> None:
        self._layers = {layer.layer_idx: layer for layer in layers}
        self._rotary = rotary
        self._together: OrderedDict[tuple[FusedStep, ...], _Together] = OrderedDict()
        self.layers = held
        self.member = member
        self.dims = dims
        self.bounds = split(dims, member.weights)
        self.numerics = numerics
        self.device = device
        self.hidden_size = dims.hidden
        self.exchanges = exchanges(dims)
        self.num_weight_bytes = sum(p.nbytes for layer in layers for p in layer.parameters())

    @classmethod
    def load(
        cls,
        source: TensorSource,
        layers: LayerRange,
        member: ModelSlice,
        *,
        numerics: NumericsClass,
        device: torch.device,
        on_tensor: OnTensor | None = None,
    ) -> SlicedStage:
        """Keeps this member's slice of each tensor, and at no time more of the others than the tensor that is read.

        Raises:
            InvalidLayers: the range lies outside the model.
            ConfigError: the model, its numerics class or the number of members does not fuse, and the message says why.
            ResourceExhausted: the device has no room for the weights.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        dims = fusion_dims(config)
        _check(source, numerics)
        bounds = split(dims, member.weights)
        model = build_layers(config, layers, dtype=numerics.dtype)
        f16r32.prepare(model, numerics, device)
        with memory_errors(f"slice {member} of layers {layers} of {source.name} does not fit on {device}: serve fewer"):
            compute_buffers(model, device)
            head_rows = HeadRows.of(bounds, dims.head_dim, device)
            sliced = [
                SlicedLayer(
                    model.get_submodule(f"layers.{layer}"),
                    dims=dims,
                    bounds=bounds,
                    index=member.index,
                    head_rows=head_rows,
                    numerics=numerics,
                    device=device,
                )
                for layer in range(layers.start, layers.stop)
            ]
            fill_slices(sliced, model, source, dims=dims, bounds=bounds, head_rows=head_rows, on_tensor=on_tensor)
            for each in sliced:
                speed_up_linears(each)
                f16r32.apply(each.eval(), numerics)
        rotary = model.get_submodule("rotary_emb")
        return cls(sliced, rotary, held=layers, member=member, dims=dims, numerics=numerics, device=device)

    @property
    def own(self) -> SliceBounds:
        """What this member holds of every layer."""
        return self.bounds[self.member.index]

    def layer(self, number: int) -> SlicedLayer:
        """What is held of one of its layers."""
        return self._layers[number]

    @property
    def first_layers(self) -> frozenset[int] | None:
        """Layers of the model at which a range may begin: all of them."""
        return None

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """What each layer keeps per position: the KV heads that this member's query heads read."""
        return (KVLayout(len(self.own.kv_heads), self.dims.head_dim, self.dims.head_dim),) * len(self.layers)

    @property
    def kv_bytes_per_position(self) -> int:
        """KV bytes that one position of one session takes with this member."""
        return bytes_per_slot(self.kv_layouts, self.numerics.kv_dtype)

    def new_pool(self, num_slots: int) -> KVPool:
        """Keys and values of these layers for ``num_slots`` positions of all sessions together.

        Raises:
            ResourceExhausted: the device has no room for them.
        """
        with memory_errors(f"no memory left on {self.device} for the KV of {num_slots} positions"):
            return KVPool(self.kv_layouts, num_slots, dtype=self.numerics.kv_dtype, device=self.device)

    def width(self, exchange: Exchange, member: int) -> int:
        """Values per row that each member contributes for this one."""
        return exchange_width(self.dims, self.bounds[member], exchange)

    @torch.inference_mode()
    def begin(self, batch: Sequence[StepInput], layers: LayerRange | None = None) -> list[FusedStep]:
        """Steps whose rows, the own columns ``[T, d]``, have come.

        Args:
            layers: that they pass; None: all that are held.

        Raises:
            InvalidLayers: these layers are not held.
        """
        layers = layers or self.layers
        if layers.start < self.layers.start or layers.stop > self.layers.stop:
            raise InvalidLayers(f"layers {layers} are not within {self.layers}")
        steps = []
        for item in batch:
            if item.rows_TD.shape[1:] != (len(self.own.columns),) or not len(item.rows_TD):
                raise LocalProtocolError(f"rows of {tuple(item.rows_TD.shape)} for {len(self.own.columns)} columns")
            rows_TD = item.rows_TD.to(device=self.device, dtype=self.numerics.dtype)
            positions = item.step.positions[item.first_row : item.first_row + len(rows_TD)]
            cos, sin = self._rotary(rows_TD.unsqueeze(0), torch.tensor([positions], device=self.device))
            steps.append(FusedStep(item, layers, rows_TD, Rotary(cos, sin), (layers.start, Exchange.QKV)))
        return steps

    @torch.inference_mode()
    def phase(
        self, steps: Sequence[FusedStep], received: Sequence[Contributions] | None, pool: KVPool
    ) -> list[list[torch.Tensor]] | None:
        """Takes the contributions of all members to one exchange, and makes those of this member to the next.

        Args:
            steps: that wait for the same exchange.
            received: per step and member ``[T, W]`` in float32 on the CPU, the own one included, or per step their sum;
                None when the steps have just begun.
            pool: of this slice.

        Returns:
            Per step and member ``[T, W]``, contiguous and on the CPU; no members for a step that is done. None: all are
            done.

        Raises:
            ResourceExhausted: the device has no room for what the call needs. The steps are as they were, and the call
                may be made again.
            LocalProtocolError: steps wait for different exchanges, or contributions have not the shapes that they must.
        """
        number, exchange = steps[0].position
        if any(s.position != (number, exchange) or s.has_begun != (received is not None) or s.is_done for s in steps):
            raise LocalProtocolError("steps of one phase wait for different exchanges")
        with memory_errors(f"no memory left on {self.device} for this step"):
            sum_TW = None if received is None else self._summed(steps, received, exchange)
            rows_TD = _joined([s.rows_TD for s in steps])
            layer = self._layers[number]
            routing = None if steps[0].routing is None else _joined_routing([s.routing for s in steps])
            if sum_TW is None:
                sent, after = layer.send_qkv(rows_TD), (number, Exchange.QKV)
            elif exchange is Exchange.QKV:
                together = self._find_together(steps, pool)
                sent, after = layer.attend(sum_TW, together.rotary, together.packed), (number, Exchange.O)
            elif exchange is Exchange.O:
                rows_TD = layer.add_attention(rows_TD, sum_TW)
                if self.dims.num_experts:
                    sent, after = layer.send_scores(rows_TD), (number, Exchange.ROUTER)
                else:
                    sent, after = layer.send_gate_up(rows_TD, None), (number, Exchange.GATE_UP)
            elif exchange is Exchange.ROUTER:
                routing = layer.route(sum_TW)
                sent, after = layer.send_gate_up(rows_TD, routing), (number, Exchange.GATE_UP)
            elif exchange is Exchange.GATE_UP:
                sent, after = layer.send_down(sum_TW, routing), (number, Exchange.DOWN)
                routing = None
            else:
                rows_TD, after = layer.add_mlp(rows_TD, sum_TW), (number + 1, Exchange.QKV)
                sent = self._send_on(steps, rows_TD, number + 1)
            if self.device.type != "cpu":
                sent = [part.cpu() for part in sent]
            return self._handed(steps, rows_TD, routing, after, sent)

    def _send_on(self, steps: Sequence[FusedStep], rows_TD: torch.Tensor, number: int) -> list[torch.Tensor]:
        """Into the next layer, but for those that leave before it; rows of these are not among what is returned."""
        lengths = [s.rows_TD.shape[0] for s in steps]
        going = [part for s, part in zip(steps, torch.split(rows_TD, lengths), strict=True) if s.layers.stop > number]
        return self._layers[number].send_qkv(_joined(going)) if going else []

    def _handed(
        self,
        steps: Sequence[FusedStep],
        rows_TD: torch.Tensor,
        routing: Routing | None,
        after: tuple[int, Exchange],
        sent: Sequence[torch.Tensor],
    ) -> list[list[torch.Tensor]] | None:
        """Nothing that can fail: the steps take what was computed."""
        out: list[list[torch.Tensor]] = []
        start = first = 0
        for step in steps:
            num_rows = step.rows_TD.shape[0]
            stop = start + num_rows
            step.rows_TD = rows_TD[start:stop]
            step.position, step.has_begun = after, True
            step.routing = None
            if routing is not None:
                step.routing = Routing(
                    routing.experts_Tk[start:stop], routing.weights_Tk[start:stop], routing.scale_T1[start:stop]
                )
            start = stop
            if step.is_done:
                out.append([])
                continue
            out.append([part[first : first + num_rows] for part in sent])
            first += num_rows
        if not sent:
            self._together.pop(tuple(steps), None)
            return None
        return out

    def _summed(
        self, steps: Sequence[FusedStep], received: Sequence[Contributions], exchange: Exchange
    ) -> torch.Tensor:
        """Contributions summed in the order of the members."""
        if any(isinstance(parts, torch.Tensor) for parts in received):
            # Row by row the same as all at once.
            of_step = zip(steps, received, strict=True)
            return _joined([self._one_sum(step, parts, exchange) for step, parts in of_step])
        shape = (sum(s.rows_TD.shape[0] for s in steps), self.width(exchange, self.member.index))
        total: torch.Tensor | None = None
        for parts in zip(*received, strict=True):
            part = _joined(parts)
            if part.shape != shape or part.dtype != self.numerics.dtype:
                raise LocalProtocolError(f"contributions {part.dtype} of {tuple(part.shape)} instead of {shape}")
            if self.device.type != "cpu":
                part = part.to(self.device)
            total = part if total is None else total + part
        if total is None or len(received[0]) != self.member.num_members:
            raise LocalProtocolError(f"contributions of {len(received[0])} members of {self.member.num_members}")
        return total

    def _one_sum(self, step: FusedStep, parts: Contributions, exchange: Exchange) -> torch.Tensor:
        if not isinstance(parts, torch.Tensor):
            return self._summed([step], [parts], exchange)
        shape = (step.rows_TD.shape[0], self.width(exchange, self.member.index))
        if parts.shape != shape or parts.dtype != self.numerics.dtype:
            raise LocalProtocolError(f"a sum {parts.dtype} of {tuple(parts.shape)} instead of {shape}")
        return parts.to(self.device)

    def _find_together(self, steps: Sequence[FusedStep], pool: KVPool) -> _Together:
        key = tuple(steps)
        found = self._together.get(key)
        if found is not None:
            self._together.move_to_end(key)
            return found
        cos_1TH = _joined([s.rotary.cos_1TH for s in steps], dim=1)
        sin_1TH = _joined([s.rotary.sin_1TH for s in steps], dim=1)
        packed = PackedBatch(
            pool,
            tuple(segments_of([s.input for s in steps])),
            first_layer=self.layers.start,
            query_dtype=self.numerics.attention_input_dtype,
            kv_dtype=self.numerics.kv_dtype,
        )
        self._together[key] = made = _Together(packed, Rotary(cos_1TH, sin_1TH))
        while len(self._together) > _MAX_TOGETHER:
            self._together.popitem(last=False)
        return made

    def forget(self) -> None:
        """Lets go of what is kept for steps that will not go on, and with it of their pool."""
        self._together.clear()

    def measure_seconds(self, num_tokens: int = 1, *, rounds: int = 3) -> float:
        """Seconds that this member computes in one step of ``num_tokens``, the median of a few on zeros."""
        pool = self.new_pool(num_tokens)
        step = SessionLog(num_tokens).apply(0, first_node=1, num_rows=num_tokens, parent=0, advance=num_tokens)
        if not isinstance(step, StepRows):
            raise LocalProtocolError(f"a step of {num_tokens} rows is none")
        rows_TD = torch.zeros((num_tokens, len(self.own.columns)), dtype=self.numerics.dtype)
        zeros = {e: torch.zeros((num_tokens, self.width(e, self.member.index))) for e in self.exchanges}
        samples = []
        for _ in range(rounds + 1):
            (fused,) = self.begin([StepInput(step, rows_TD, (range(num_tokens),))])
            began = time.perf_counter()
            self.phase([fused], None, pool)
            while not fused.is_done:
                self.phase([fused], [[zeros[fused.position[1]]] * self.member.num_members], pool)
            fused.rows_TD.cpu()
            samples.append(time.perf_counter() - began)
        return float(np.median(samples[1:]))


def _check(source: TensorSource, numerics: NumericsClass) -> None:
    quantization = quantization_settings(source.config)
    if quantization is not None:
        raise ConfigError(
            f"the weights of {source.name} are quantised ({quantization.label}): what is packed together cannot be "
            "sliced by columns, so that no fusion group can serve it"
        )
    if numerics.dtype != torch.float32:
        classes = [name for name, each in NUMERICS.items() if each.dtype == torch.float32]
        raise ConfigError(
            f"a fusion group sums partial results in float32, which {numerics.name} has not: use {', '.join(classes)}"
        )


def _joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)


def _joined_routing(parts: Sequence[Any]) -> Routing:
    return Routing(
        _joined([p.experts_Tk for p in parts]),
        _joined([p.weights_Tk for p in parts]),
        _joined([p.scale_T1 for p in parts]),
    )
