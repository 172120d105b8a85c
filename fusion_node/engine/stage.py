"""A stage: the decoder layers of one layer range, and nothing else of the model.

Shapes: T packed tokens, D hidden size, S KV slots in use.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModel, PretrainedConfig

from fusion_node.engine.attention import ATTENTION_NAME, PackedBatch, Segment
from fusion_node.engine.device import memory_errors
from fusion_node.engine.kv_cache import SessionKV
from fusion_node.engine.numerics import NumericsClass
from fusion_node.engine.session_log_core import StepRows
from fusion_node.engine.weights import OnTensor, TensorSource, assign_weights, load_config
from fusion_node.errors import InvalidLayers
from fusion_node.types import LayerRange


@dataclass(frozen=True, slots=True)
class StepInput:
    """Rows of one session for one packed call: ``rows_TD`` holds the live rows of ``step``, in order."""

    kv: SessionKV
    step: StepRows
    rows_TD: torch.Tensor


class Stage:
    """Layers ``[start, stop)`` of a model, resident on one device. Not thread-safe: one compute thread calls it."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        config: PretrainedConfig,
        layers: LayerRange,
        numerics: NumericsClass,
        device: torch.device,
        num_weight_bytes: int,
        first_kv_layer: int = 0,
    ) -> None:
        self._model = model
        self._config = config
        self.layers = layers
        self.numerics = numerics
        self.device = device
        self.num_weight_bytes = num_weight_bytes
        self.hidden_size: int = config.hidden_size
        # What the first layer's attention module calls itself; not 0 in a part of a stage.
        self._first_kv_layer = first_kv_layer
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

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
            ConfigError: the architecture is not supported.
            ResourceExhausted: the device has no room for the weights.
            StoreCorrupted: a tensor does not match the manifest.
        """
        config = load_config(source)
        layers.check_within(config.num_hidden_layers)
        config = config_of_range(config, layers)
        with torch.device("meta"):
            model = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME, dtype=numerics.dtype)
        # What stays with the user has no place here; the identities keep the class's own forward unchanged.
        model.embed_tokens = torch.nn.Identity()
        model.norm = torch.nn.Identity()
        # Its frequencies are computed, not stored, so the module on the meta device has none.
        model.rotary_emb = type(model.rotary_emb)(config=config).to(device)

        def rename(name: str) -> str:
            _, index, rest = name.split(".", 2)
            return f"model.layers.{layers.start + int(index)}.{rest}"

        with memory_errors(f"layers {layers} of {source.name} do not fit on {device}: serve fewer with --layers"):
            num_bytes = assign_weights(model, source, rename, dtype=numerics.dtype, device=device, on_tensor=on_tensor)
        model.eval()
        return cls(model, config=config, layers=layers, numerics=numerics, device=device, num_weight_bytes=num_bytes)

    def part(self, layers: LayerRange) -> Stage:
        """A stage of some of these layers, sharing their weights: a node can be entered and left at any layer it holds.

        Raises:
            InvalidLayers: the range is not within this stage's.
        """
        if layers == self.layers:
            return self
        if layers.start < self.layers.start or layers.stop > self.layers.stop:
            raise InvalidLayers(f"layers {layers} are not within {self.layers}")
        inner = LayerRange(layers.start - self.layers.start, layers.stop - self.layers.start)
        # A shallow copy of the module with its own table of children; the layers themselves are the same objects.
        model = copy.copy(self._model)
        model._modules = dict(self._model._modules)
        model.layers = torch.nn.ModuleList(
            list(self._model.get_submodule("layers").children())[inner.start : inner.stop]
        )
        config = config_of_range(self._config, inner)
        model.config = config
        return Stage(
            model,
            config=config,
            layers=layers,
            numerics=self.numerics,
            device=self.device,
            num_weight_bytes=self.num_weight_bytes * len(layers) // len(self.layers),
            first_kv_layer=inner.start + self._first_kv_layer,
        )

    @property
    def kv_bytes_per_position(self) -> int:
        """KV bytes that one position of one session takes on this stage."""
        return 2 * len(self.layers) * self._num_kv_heads * self._head_dim * self.numerics.dtype.itemsize

    def new_kv(self, max_positions: int) -> SessionKV:
        """An empty KV cache for one session.

        Raises:
            ResourceExhausted: the device has no room even for its beginning.
        """
        with memory_errors(f"no memory left on {self.device} for a session's KV"):
            return SessionKV(
                num_layers=len(self.layers),
                first_layer=self._first_kv_layer,
                num_kv_heads=self._num_kv_heads,
                head_dim=self._head_dim,
                max_positions=max_positions,
                dtype=self.numerics.dtype,
                device=self.device,
            )

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepInput]) -> list[torch.Tensor]:
        """Runs one packed call.

        Returns:
            Per input, the hidden rows ``[T, D]`` after the last layer, before any final norm.

        Raises:
            ResourceExhausted: the device has no room for the KV.
        """
        for item in batch:
            if item.step.move is not None:
                item.kv.move(item.step.move)
        # An entry of the log may leave no row alive: it is applied, and computes nothing.
        alive = [item for item in batch if item.step.live_rows]
        outputs = iter(self._forward(alive) if alive else ())
        return [next(outputs) if item.step.live_rows else item.rows_TD[:0] for item in batch]

    def _forward(self, batch: Sequence[StepInput]) -> list[torch.Tensor]:
        with memory_errors(f"no memory left on {self.device} for this step"):
            segments, start = [], 0
            for item in batch:
                stop = start + len(item.step.live_rows)
                num_slots = item.step.first_slot + len(item.step.live_rows)
                item.kv.reserve(num_slots)
                mask = None if item.step.is_chain else self._mask(item.step, num_slots)
                segments.append(Segment(start, stop, item.kv, item.step.first_slot, mask))
                start = stop
            rows = [item.rows_TD for item in batch]
            rows_1TD = (rows[0] if len(rows) == 1 else torch.cat(rows)).unsqueeze(0)
            positions = [position for item in batch for position in item.step.positions]
            hidden_1TD = self._model(
                inputs_embeds=rows_1TD.to(device=self.device, dtype=self.numerics.dtype),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                batch=PackedBatch(tuple(segments)),
            ).last_hidden_state
        return [hidden_1TD[0, s.start : s.stop] for s in segments]

    def measure_seconds_per_layer(self, *, num_tokens: int = 1, rounds: int = 3) -> float:
        """Seconds per layer of one step of ``num_tokens``, the median of a few on zeros; also warms the kernels up."""
        samples = []
        for _ in range(rounds + 1):
            kv = self.new_kv(num_tokens)
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
            rows = torch.zeros((num_tokens, self.hidden_size), dtype=self.numerics.dtype)
            began = time.perf_counter()
            self.forward([StepInput(kv, step, rows)])[0].cpu()
            samples.append((time.perf_counter() - began) / len(self.layers))
        return float(np.median(samples[1:]))

    def _mask(self, step: StepRows, num_slots: int) -> torch.Tensor:
        num_bytes = (num_slots - step.num_committed + 7) // 8
        packed = np.frombuffer(b"".join(v.to_bytes(num_bytes, "little") for v in step.visible), dtype=np.uint8)
        tree = np.unpackbits(packed.reshape(len(step.visible), num_bytes), axis=1, bitorder="little")
        mask = np.ones((len(step.visible), num_slots), dtype=bool)
        mask[:, step.num_committed :] = tree[:, : num_slots - step.num_committed].astype(bool)
        return torch.from_numpy(mask).to(self.device)


def config_of_range(config: PretrainedConfig, layers: LayerRange) -> PretrainedConfig:
    """The configuration of a model that has only these layers: every per-layer list is cut to the range."""
    cut = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(cut, key, value[layers.start : layers.stop])
    cut.num_hidden_layers = len(layers)
    return cut
