"""A stage: the decoder layers of one layer range, and nothing else of the model.

Shapes: T packed tokens, D hidden size, S KV slots in use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from fusion_node.engine import f16r32
from fusion_node.engine.architectures import (
    ARCHITECTURES,
    build_layers,
    first_layers,
    join_layers,
    keep_layers,
    load_config,
)
from fusion_node.engine.attention import KVReader, PackedBatch, Segment
from fusion_node.engine.device import memory_errors
from fusion_node.engine.kv_cache import KVLayout, KVPool, LayoutProbe, bytes_per_slot
from fusion_node.engine.linear import speed_up_linears
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.quantized import Quantization
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.taps import Tapped, tapping
from fusion_node.engine.weights import OnTensor, TensorSource, fill
from fusion_node.errors import InvalidLayers
from fusion_node.types import LayerRange


@dataclass(frozen=True, slots=True)
class StepInput:
    """Rows of one step of one session for one packed call.

    Attributes:
        step: as the session's log describes it; what it moves was moved before.
        rows_TD: live rows of the step from ``first_row`` on: all of them, or as many as this call takes.
        runs: the session's slots in the pool, at least up to the last row's.
        tapped: rows of layers to take on the way; None: none.
    """

    step: StepRows
    rows_TD: torch.Tensor
    runs: tuple[range, ...]
    first_row: int = 0
    tapped: Tapped | None = None


def segments_of(batch: Sequence[StepInput]) -> list[Segment]:
    """The shares of these steps in one packed call, in order."""
    segments, start = [], 0
    for item in batch:
        step, first, stop = item.step, item.first_row, item.first_row + len(item.rows_TD)
        segments.append(
            Segment(
                start,
                start + stop - first,
                step.first_slot + first,
                item.runs,
                step.positions[first:stop],
                None if step.is_chain else step.visible[first:stop],
                step.num_committed,
                step.live_positions,
            )
        )
        start += stop - first
    return segments


class Stage:
    """Layers ``[start, stop)`` of a model, resident on one device. Not thread-safe: one compute thread calls it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: PretrainedConfig,
        layers: LayerRange,
        numerics: NumericsClass,
        device: torch.device,
        num_weight_bytes: int,
        layer_idx_base: int = 0,
    ) -> None:
        self._model = model
        self._config = config
        self.layers = layers
        self.numerics = numerics
        self.device = device
        self.num_weight_bytes = num_weight_bytes
        self.hidden_size: int = config.hidden_size
        # What the attention of the pool's first layer calls itself; a part of a stage uses the whole one's pool.
        self._layer_idx_base = layer_idx_base
        self._kv_layouts: tuple[KVLayout, ...] | None = None

    @classmethod
    def load(
        cls,
        source: TensorSource,
        layers: LayerRange,
        *,
        numerics: NumericsClass,
        device: torch.device,
        on_tensor: OnTensor | None = None,
    ) -> Stage:
        """Reads only the bytes of these layers, checked against the manifest.

        Raises:
            InvalidLayers: the range lies outside the model.
            ConfigError: the architecture is not supported, or its quantisation cannot be loaded here.
            ResourceExhausted: the device has no room for the weights.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        quantization = Quantization.find(source, numerics=numerics, device=device)
        model = build_layers(config, layers, dtype=numerics.dtype, quantization=quantization)
        f16r32.prepare(model, numerics, device)
        with memory_errors(f"layers {layers} of {source.name} do not fit on {device}: serve fewer with --layers"):
            num_bytes = fill(
                model, source, dtype=numerics.dtype, device=device, quantization=quantization, on_tensor=on_tensor
            )
            speed_up_linears(model, is_output_contiguous=ARCHITECTURES[config.model_type].needs_contiguous)
            f16r32.apply(model, numerics)
        return cls(
            model.eval(),
            config=config,
            layers=layers,
            numerics=numerics,
            device=device,
            num_weight_bytes=num_bytes,
            layer_idx_base=layers.start,
        )

    def moved(self, source: TensorSource, layers: LayerRange, *, on_tensor: OnTensor | None = None) -> Stage:
        """A stage of other layers of the same model, on the same device.

        What this stage has of them is shared, not read and not held a second time. Layers that only this one has are
        freed when it is given up, so that for as long as both are there both can be used.

        Raises:
            InvalidLayers, ResourceExhausted, StoreCorrupted: as ``load``.
        """
        loaded = [
            Stage.load(source, missing, numerics=self.numerics, device=self.device, on_tensor=on_tensor)
            for missing in layers.without(self.layers)
        ]
        num_kept = len(layers) - sum(len(stage.layers) for stage in loaded)
        num_bytes = self.num_weight_bytes * num_kept // len(self.layers)
        models = [stage._model for stage in ([self] if num_kept else []) + loaded]
        return Stage(
            join_layers(models, self._config, layers),
            config=self._config,
            layers=layers,
            numerics=self.numerics,
            device=self.device,
            num_weight_bytes=num_bytes + sum(stage.num_weight_bytes for stage in loaded),
            layer_idx_base=layers.start,
        )

    def part(self, layers: LayerRange) -> Stage:
        """A stage of some of these layers, sharing their weights: a node can be entered and left within what it holds.

        Raises:
            InvalidLayers: the range is not within this stage's, or does not begin at one of ``first_layers``.
        """
        if layers == self.layers:
            return self
        if layers.start < self.layers.start or layers.stop > self.layers.stop:
            raise InvalidLayers(f"layers {layers} are not within {self.layers}")
        return Stage(
            keep_layers(self._model, self._config, layers),
            config=self._config,
            layers=layers,
            numerics=self.numerics,
            device=self.device,
            num_weight_bytes=self.num_weight_bytes * len(layers) // len(self.layers),
            layer_idx_base=self._layer_idx_base,
        )

    def parameters_of(self, layer: int) -> dict[str, torch.Tensor]:
        """The weights of one of its layers by their names within the layer, as they are held."""
        module = self._model.get_submodule(f"layers.{layer}")
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    @property
    def first_layers(self) -> frozenset[int] | None:
        """Layers of the model at which a range may begin; None: all of them."""
        return first_layers(self._config)

    @property
    def kv_layouts(self) -> tuple[KVLayout, ...]:
        """What each layer keeps per position, as its attention says when it is first called.

        Raises:
            ConfigError: a layer does not attend through the attention interface.
        """
        if self._kv_layouts is None:
            probe = LayoutProbe(self.layers, self.device)
            rows = torch.zeros((1, self.hidden_size), dtype=self.numerics.dtype)
            self._run(probe, [Segment(0, 1, 0, (range(1),), (0,))], rows)
            self._kv_layouts = probe.layouts()
        return self._kv_layouts

    @property
    def kv_bytes_per_position(self) -> int:
        """KV bytes that one position of one session takes on this stage."""
        return bytes_per_slot(self.kv_layouts, self.numerics.kv_dtype)

    def new_pool(self, num_slots: int) -> KVPool:
        """Keys and values of this stage's layers for ``num_slots`` positions of all sessions together.

        Raises:
            ResourceExhausted: the device has no room for them.
        """
        with memory_errors(f"no memory left on {self.device} for the KV of {num_slots} positions"):
            return KVPool(self.kv_layouts, num_slots, dtype=self.numerics.kv_dtype, device=self.device)

    def forward(self, batch: Sequence[StepInput], pool: KVPool) -> list[torch.Tensor]:
        """Runs one packed call.

        Args:
            pool: of this stage, or of the one that this is a part of.

        Returns:
            Per input, the hidden rows ``[T, D]`` after the last layer, before any final norm.

        Raises:
            ResourceExhausted: the device has no room for what the call needs beside the KV.
        """
        segments = segments_of(batch)
        rows = [item.rows_TD for item in batch]
        rows_TD = rows[0] if len(rows) == 1 else torch.cat(rows)
        wishes = [(i.tapped, s.start) for i, s in zip(batch, segments, strict=True) if i.tapped is not None]
        if wishes:
            own = range(self.layers.start + 1, self.layers.stop + 1)
            modules = {layer: self._model.get_submodule(f"layers.{layer - 1}") for layer in own}
            with tapping(modules, wishes, own):
                hidden_TD = self._run(pool, segments, rows_TD)
        else:
            hidden_TD = self._run(pool, segments, rows_TD)
        return [hidden_TD[s.start : s.stop] for s in segments]

    @torch.inference_mode()
    def _run(self, pool: KVReader, segments: Sequence[Segment], rows_TD: torch.Tensor) -> torch.Tensor:
        with memory_errors(f"no memory left on {self.device} for this step"):
            positions = [position for s in segments for position in s.positions]
            hidden_1TD: torch.Tensor = self._model(
                inputs_embeds=rows_TD.to(device=self.device, dtype=self.numerics.dtype).unsqueeze(0),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                batch=PackedBatch(
                    pool,
                    tuple(segments),
                    first_layer=self._layer_idx_base,
                    query_dtype=self.numerics.attention_input_dtype,
                    kv_dtype=self.numerics.kv_dtype,
                ),
            ).last_hidden_state
        return hidden_1TD[0]

    def measure_seconds(self, num_tokens: int = 1, *, rounds: int = 3) -> float:
        """Seconds of one step of ``num_tokens``, the median of a few on zeros; also warms the kernels up."""
        pool = self.new_pool(num_tokens)
        segment = Segment(0, num_tokens, 0, (range(num_tokens),), range(num_tokens))
        rows = torch.zeros((num_tokens, self.hidden_size), dtype=self.numerics.dtype)
        samples = []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            self._run(pool, [segment], rows).cpu()
            samples.append(time.perf_counter() - began)
        return float(np.median(samples[1:]))
